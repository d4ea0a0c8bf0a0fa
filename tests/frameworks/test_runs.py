"""What each framework runs: one table that search, estimate and launch read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

import rlhfsim
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.answers.frameworks import SHORT, lines, listing
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions
from rlhfsim.specs.frameworks.runs import ANY, FEATURES, OWN, Known, Runs, framework, frameworks, runner_of
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import preset, published_type, resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm, Lora, Reward, Rules, Workload
from rlhfsim.what_if.planned import not_launched

GRPO = Workload(algorithm="grpo", model="8b", prompts=64, samples=8, reward=Reward(model="same"))


@pytest.mark.parametrize("runs", frameworks(), ids=lambda runs: runs.name)
def test_a_table_names_what_a_plan_can_ask_and_says_how_it_is_known(runs: Runs) -> None:
    assert set(runs.features) <= set(FEATURES)
    assert set(runs.weight_paths) <= set(WEIGHT_PATHS)
    assert set(runs.known_trainers) == set(runs.trainers)
    assert set(runs.only_with) <= set(runs.features)
    assert all(set(backends) < set(runs.trainers) for backends in runs.only_with.values())
    known = [*runs.features.values(), *runs.known_trainers.values()]
    known += [k for where in runs.weight_paths.values() for k in where.values()]
    assert set(known) <= set(get_args(Known))
    assert runs.source


def test_ours_comes_first_and_nothing_of_it_was_run_on_gpus_unseen() -> None:
    assert frameworks()[0].name == OWN
    assert "run on GPUs" not in framework(OWN).features.values()
    assert runner_of("deepspeed") is framework(OWN)
    assert runner_of("fsdp2") is framework(OWN)
    assert runner_of("megatron") is framework("nemo-rl"), (
        "a feature that nobody asks for changes every default plan"
    )


def test_what_is_lacking_is_named_with_its_remedy() -> None:
    ours = framework(OWN)
    small = ours.lacks_workload(replace(GRPO, lora=Lora(base="nf4")))
    assert small is not None
    assert small.code == "lora-on-a-4-bit-base-not-run"
    wide = ours.lacks_rollout(RolloutLayout(tp=8, attention_dp=2, ep=16), one_node=False)
    assert wide is not None
    assert wide.what == "rollout expert parallelism"
    assert ours.lacks_rollout(RolloutLayout(tp=16), one_node=False) is None
    path = ours.lacks_path("ipc", "across nodes")
    assert path is not None
    assert "broadcast" in path.remedy
    for backend in ("deepspeed", "fsdp2"):
        long = ours.lacks_layout(backend, Layout(dp=4, cp=2, zero=3), GRPO, "actor")
        assert long is not None
        assert (long.code, "Ulysses" in long.what) == ("context-parallelism-not-run", True)
        assert ("or tp" in long.remedy) == (backend == "deepspeed")
    adapters = ours.lacks_layout("deepspeed", Layout(tp=2, dp=4), replace(GRPO, lora=Lora()), "actor")
    assert adapters is not None
    assert adapters.code == "lora-with-tensor-or-pipeline-parallelism-not-run"


def test_verl_filters_groups_where_the_reward_model_has_gpus_of_its_own() -> None:
    work = replace(GRPO, reward=Reward(model=None, rules=Rules()), dynamic_sampling=DynamicSampling(kept=0.5))
    beside, apart = [["actor", "reward"], ["rollout"]], [["actor", "rollout"], ["reward"]]
    lacks = framework("verl").lacks_pools(beside, work)
    assert lacks is not None
    assert "filters groups before they are scored" in lacks.what
    assert framework("verl").lacks_pools(beside, replace(work, dynamic_sampling=None)) is None
    assert framework("verl").lacks_pools(apart, work) is None
    assert framework("nemo-rl").lacks_pools(beside, work) is None


def test_what_a_framework_runs_without_an_export_of_ours_is_said_so() -> None:
    taught = Workload(algorithm="distillation", reference="qwen3-4b")
    lacks = framework("verl").lacks_workload(taught)
    assert lacks is not None
    assert lacks.what == "Distillation through an export of ours"
    assert framework("nemo-rl").lacks_workload(taught) is None
    assert framework(OWN).lacks_workload(taught) is None


def test_a_kind_of_layer_that_nothing_runs_is_named() -> None:
    hybrid, sparse = preset("qwen3-next-80b-a3b"), preset("deepseek-v3.2")
    assert (
        framework("rlhfsim").lacks_kinds(hybrid, generates=True).what == "gated delta net or Mamba-2 layers"
    )
    assert framework("rlhfsim").lacks_model(Layout(dp=1), sparse, "deepseek_v32").what == "sparse attention"
    assert framework("nemo-rl").lacks_kinds(hybrid, generates=True) is None
    assert framework("verl").lacks_kinds(preset("qwen3-8b"), generates=True) is None
    oss = preset("gpt-oss-20b")
    assert framework("rlhfsim").lacks_kinds(oss, generates=True).what == "weight sync of attention sinks"
    assert framework("rlhfsim").lacks_kinds(oss, generates=False) is None, "SFT sends no weights"
    assert framework("verl").lacks_kinds(oss, generates=True) is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--fix", "reference.residency=swapped"], "reference swapped in place of the actor"),
        (["--speculation", "method=ngram,draft_tokens=4,acceptance=0.6"], "speculative decoding"),
        (["--oversampling", "0.25"], "oversampling"),
        (["--model", "qwen3-next", "--framework", "rlhfsim"], "gated delta net or Mamba-2 layers"),
        (["--model", "gpt-oss-20b", "--framework", "rlhfsim"], "weight sync of attention sinks"),
        (["--model", "qwen2.5-vl-7b", "--framework", "rlhfsim"], "vision towers"),
    ],
)
def test_design_refuses_by_name_what_launch_refuses(options: list[str], what: str) -> None:
    asked = ["design", "--model", "8b", "--gpus", "16", "--algorithm", "grpo", *options]
    with pytest.raises(RlhfsimError, match=f"our own executor does not run {what}"):
        CliRunner().invoke(cli, asked, catch_exceptions=False)


def test_a_feature_may_hold_for_some_backends_only() -> None:
    ours, small = framework(OWN), replace(GRPO, optimizer="adam8bit")
    assert ours.lacks_workload(small) is None
    assert ours.lacks_workload(small, "deepspeed") is None
    lacks = ours.lacks_workload(small, "fsdp2")
    assert lacks is not None
    assert lacks.what == "8-bit Adam with PyTorch FSDP2"
    assert "--backend deepspeed" in lacks.remedy
    asked = Request(cluster=parse_cluster(8), workload=small, backend="fsdp2")
    assert not list(partitions(asked, models_of(small)))
    assert list(partitions(replace(asked, backend="deepspeed"), models_of(small)))


def test_a_framework_refuses_a_backend_that_it_does_not_train_with() -> None:
    cluster = rlhfsim.parse_cluster(8, "h100")
    with pytest.raises(RlhfsimError, match="does not run training by Megatron-Core"):
        Request(cluster=cluster, workload=GRPO, backend="megatron", framework=OWN)
    with pytest.raises(RlhfsimError, match="verll"):
        Request(cluster=cluster, workload=GRPO, framework="verll")
    assert Request(cluster=cluster, workload=GRPO, backend="megatron", framework=ANY).runs is None


def test_amd_gpus_are_offered_where_a_framework_runs_them() -> None:
    cluster = parse_cluster(8, "mi300x")
    with pytest.raises(RlhfsimError, match="does not run AMD GPUs"):
        Request(cluster=cluster, workload=GRPO, framework=OWN)
    runs = Request(cluster=cluster, workload=GRPO, backend="fsdp2").runs
    assert runs is not None
    assert runs.name == "verl"
    asked = Request(cluster=cluster, workload=GRPO, backend="deepspeed")
    assert asked.runs is not None
    assert asked.runs.name == "trl"
    answer = rlhfsim.design(Request(cluster=cluster, workload=GRPO), explain=False)
    assert answer.chosen is not None
    assert any("AMD GPUs" in note for note in not_launched(answer.chosen, cluster))


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "reward_model"])
def test_amd_gpus_choose_a_framework_that_trains_by_the_algorithm(algorithm: Algorithm) -> None:
    """verl, the first on AMD GPUs, has no trainer of pairs or labels."""
    asked = Request(cluster=parse_cluster(8, "mi300x"), workload=replace(GRPO, algorithm=algorithm))
    assert (asked.framework, asked.backend) == ("trl", "deepspeed")


GIVEN: dict[str, set[Algorithm]] = {
    "rlhfsim": {"sft", "reward_model", "dpo", "kto"},
    "trl": {"sft", "reward_model", "dpo", "kto"},
    "openrlhf": {"sft", "reward_model", "dpo"},
    "areal": {"sft", "reward_model", "dpo"},
    "nemo-rl": {"sft", "reward_model", "dpo"},
    "verl": {"sft"},
    "skyrl": {"sft"},
    "slime": {"sft"},
}
"""Trainers of given data that stand in a framework's pinned release, counted in its files."""


@pytest.mark.parametrize("runs", frameworks(), ids=lambda runs: runs.name)
def test_only_trainers_that_a_framework_has_are_offered(runs: Runs) -> None:
    for algorithm in ("sft", "reward_model", "dpo", "kto"):
        lacks = runs.lacks_workload(replace(GRPO, algorithm=algorithm))
        assert (lacks is None) == (algorithm in GIVEN[runs.name]), algorithm


def test_amd_gpus_alone_choose_a_framework_that_runs_them() -> None:
    amd, nvidia = (Request(cluster=parse_cluster(8, gpu), workload=GRPO) for gpu in ("mi300x", "h100"))
    assert (amd.framework, amd.backend) == ("verl", "fsdp2")
    assert (nvidia.framework, nvidia.backend) == (None, "deepspeed")
    named = Request(cluster=parse_cluster(8, "mi300x"), workload=GRPO, backend="deepspeed")
    assert named.framework is None


def test_what_other_backends_would_bring_is_asked_of_frameworks_that_run_the_gpus() -> None:
    request = Request(cluster=parse_cluster(1, "mi300x"), workload=GRPO, framework="verl", backend="fsdp2")
    answer = rlhfsim.design(request, left_out=True)
    assert answer.chosen is not None
    deepspeed = next(gain for gain in answer.gains if gain.name == "deepspeed")
    assert deepspeed.meaning == "TRL, training by DeepSpeed"


@pytest.mark.parametrize("runs", frameworks(), ids=lambda runs: runs.name)
def test_design_answers_with_what_the_framework_runs(runs: Runs) -> None:
    backend = next(iter(runs.trainers))
    request = Request(
        cluster=rlhfsim.parse_cluster(16, "h100"), workload=GRPO, backend=backend, framework=runs.name
    )
    answer = rlhfsim.design(request, explain=False)
    assert answer.chosen is not None
    for plan in (answer.chosen, *answer.runners_up):
        place = plan.topology, plan.replicas_in_one_node
        assert not list(runs.lacks(plan.placement, plan.workload, place[0], one_node=place[1]))
        assert runs.known(plan.placement, plan.workload, place[0], one_node=place[1])


# --- the document -----------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"


def table() -> str:
    """The lines of `rlhfsim frameworks` as Markdown."""
    names = [runs.name for runs in frameworks()]
    head = f"| a plan asks for | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
    return head + "".join(f"| {what} | {' | '.join(_words(what, known))} |\n" for what, known in lines())


def _words(what: str, known: list[Known | None]) -> Iterator[str]:
    """How it is known that each framework runs it, next to the backends with which alone some do."""
    for of, runs in zip(known, frameworks(), strict=True):
        backends = ", ".join(runs.only_with.get(what, ()))
        yield f"{SHORT[of]} ({backends})" if backends else SHORT[of]


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), "run this file with python"


def test_people_and_machines_see_the_same() -> None:
    shown = listing().as_data["frameworks"]
    assert [x["name"] for x in shown] == [x.name for x in frameworks()]
    for column, entry in enumerate(shown):
        assert entry["runs"] == {what: row[column] for what, row in lines() if row[column]}


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :])


def test_our_pipeline_cuts_dense_models_of_its_types_and_whole_heads() -> None:
    ours = framework(OWN)
    staged, plain = Layout(pp=2, tp=2, zero=0), Layout(tp=2, zero=0)
    for name, code in (("mixtral-8x7b", "pipeline-model-not-run"), ("gemma-2-9b", "pipeline-model-not-run")):
        model = resolve_model(name)
        lacks = ours.lacks_model(staged, model, published_type(model.name))
        assert lacks is not None
        assert lacks.code == code
        assert ours.lacks_model(plain, model, published_type(model.name)) is None
    qwen = resolve_model("qwen2.5-7b")
    assert ours.lacks_model(staged, qwen, "qwen2") is None
    wide = ours.lacks_model(Layout(pp=2, tp=8, zero=0), qwen, "qwen2")
    assert wide is not None
    assert wide.code == "pipeline-heads-not-run"


def test_design_offers_our_pipelines_only_for_models_that_they_cut() -> None:
    mixtral = resolve_model("mixtral-8x7b")
    request = Request(cluster=parse_cluster(gpus=16), workload=Workload(model="mixtral-8x7b"))
    for asked, stages in ((request, {1}), (replace(request, framework="any"), {1, 2, 4, 8, 16})):
        space = role_layouts(asked, "actor", mixtral, 16, 8)
        assert {layout.pp for layout in space.layouts} == stages


def test_the_table_of_frameworks_is_cut_nowhere_at_100_columns() -> None:
    shown = CliRunner().invoke(cli, ["frameworks"], catch_exceptions=False).output
    assert "…" not in shown
    assert "* skyrl with megatron: " in shown


@pytest.mark.parametrize(
    ("name", "backend"), [(each.name, backend) for each in frameworks() for backend in each.trainers]
)
def test_every_framework_is_designed_for_with_each_of_its_backends(name: str, backend: Backend) -> None:
    cluster = rlhfsim.parse_cluster(8, "h100")
    question = Request(cluster=cluster, workload=GRPO, framework=name, backend=backend, time_limit=5.0)
    plan = rlhfsim.design(question, explain=False, rivals=False).chosen
    assert plan is not None
    lacks = framework(name).lacks(plan.placement, plan.workload, plan.topology, one_node=True)
    assert list(lacks) == []


@pytest.mark.parametrize(
    ("name", "changes", "code"),
    [
        ("trl", {"algorithm": "ppo"}, "algorithm-not-run"),
        ("slime", {"algorithm": "rloo"}, "algorithm-not-run"),
        ("slime", {"epochs": 2}, "epochs-not-run"),
        ("areal", {"epochs": 2}, "epochs-not-run"),
    ],
)
def test_what_a_framework_does_not_train_is_refused_at_design_time(
    name: str, changes: dict[str, Any], code: str
) -> None:
    lacks = framework(name).lacks_workload(replace(GRPO, **changes))
    assert lacks is not None
    assert lacks.code == code
    assert framework(name).lacks_workload(GRPO) is None


def test_a_framework_that_always_swaps_is_offered_swapped_references_and_ours_refuses_them() -> None:
    question = Request(
        cluster=rlhfsim.parse_cluster(8, "h100"),
        workload=GRPO,
        framework="nemo-rl",
        backend="megatron",
        architecture="disaggregated",
    )
    plan = rlhfsim.design(question, explain=False, rivals=False).chosen
    assert plan is not None
    assert plan.placement.role("reference") is not None
    assert plan.placement.role("reference").residency == "swapped"
    ours = replace(plan.placement, backend="fsdp2")
    lacks = framework(OWN).lacks(ours, plan.workload, plan.topology, one_node=True)
    assert "reference-swapped-in-place-of-the-actor-not-run" in {x.code for x in lacks}
