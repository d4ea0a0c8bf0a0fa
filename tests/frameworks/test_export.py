"""`rlhfsim export`: what is written is what the framework has a key for, and says the same plan."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rlhfsim.api import cluster_of, estimate, estimate_file
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Exported, export, exporter, exporters
from rlhfsim.interchange.nearest import with_placement, with_rollout, with_workload
from rlhfsim.interchange.nemo_rl.keys import TABLE as NEMO_RL
from rlhfsim.interchange.verl.keys import TABLE as VERL
from rlhfsim.plan import Plan, Prediction, read_plan, write_plan
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Dispatcher, Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, Schedule
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Workload
from tests.frameworks.test_accepted import plan as drawn_plan
from tests.frameworks.test_accepted import workload

LENGTHS = {"prompt_len": Fixed(value=300), "response_len": Fixed(value=700)}
ROOT = Path(__file__).parents[2]
RECIPES = {name: sorted((ROOT / "scenarios/recipes").glob(f"{name}-*.yaml")) for name in exporters()}
EVERY = [pytest.param(name, path, id=path.stem) for name, paths in RECIPES.items() for path in paths]


@cache
def planned(path: Path) -> Plan:
    return estimate_file(path)


def written(name: str, path: Path) -> Exported:
    return export(planned(path), name, frozenset())


@cache
def known_keys(name: str) -> frozenset[str]:
    lines = (ROOT / f"tests/data/framework_keys/{name.replace('-', '_')}.txt").read_text().splitlines()
    return frozenset(line.split()[0] for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_every_key_is_one_of_the_framework(name: str, path: Path) -> None:
    found = written(name, path)
    sections = [s for s in found.written.sections if s.title not in ("accelerate", "server")]
    keys = {setting.key for section in sections for setting in section.settings}
    added = {key for key in keys if key.startswith("+")}
    assert {key for key in keys - added if key not in known_keys(name)} == set()
    parents = ("engine_kwargs.vllm", "vllm_kwargs", "override_optimizer_config", "override_ddp_config")
    parents += ("critic.fsdp", "critic.megatron", "critic.ppo_infer")  # of its classes, not of its YAML
    assert all(any(parent in key for parent in parents) for key in added)


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_gpus_and_batch_are_those_of_the_plan(name: str, path: Path) -> None:
    plan, values = planned(path), written(name, path).written.values
    work = plan.workload
    assert COUNTS[name](values) == {
        "gpus": plan.placement.pool(plan.placement.actor.pool).gpus,
        "samples": work.num_sequences,
        "updates": work.mini_batches,
    }


def _verl(v: dict) -> dict:
    return {
        "gpus": v["trainer.nnodes"] * v["trainer.n_gpus_per_node"],
        "samples": v["data.train_batch_size"] * v["actor_rollout_ref.rollout.n"],
        "updates": v["data.train_batch_size"] // v["actor_rollout_ref.actor.ppo_mini_batch_size"],
    }


def _openrlhf(v: dict) -> dict:
    samples = v["--rollout.batch_size"] * v["--rollout.n_samples_per_prompt"]
    return {
        "gpus": v["--actor.num_nodes"] * v["--actor.num_gpus_per_node"],
        "samples": samples,
        "updates": samples // v["--train.batch_size"],
    }


def _nemo_rl(v: dict) -> dict:
    if "policy.generation.colocated.enabled" not in v:  # DPO
        pairs = v["policy.train_global_batch_size"]
        return {
            "gpus": v["cluster.num_nodes"] * v["cluster.gpus_per_node"],
            "samples": 2 * pairs,
            "updates": 1,
        }
    loop = "ppo" if "ppo.num_prompts_per_step" in v else "grpo"
    samples = v[f"{loop}.num_prompts_per_step"] * v[f"{loop}.num_generations_per_prompt"]
    gpus = v["cluster.num_nodes"] * v["cluster.gpus_per_node"]
    own = "policy.generation.colocated.resources"
    if not v["policy.generation.colocated.enabled"]:
        gpus -= (v[f"{own}.num_nodes"] or 1) * v[f"{own}.gpus_per_node"]
    return {"gpus": gpus, "samples": samples, "updates": samples // v["policy.train_global_batch_size"]}


def _trl(v: dict) -> dict:
    ranks = v["num_processes"]
    update = ranks * v["per_device_train_batch_size"] * v["gradient_accumulation_steps"]
    samples = ranks * v["per_device_train_batch_size"] * v["steps_per_generation"]
    return {"gpus": ranks, "samples": samples, "updates": samples // update}


def _slime(v: dict) -> dict:
    samples = v["--rollout-batch-size"] * v["--n-samples-per-prompt"]
    return {
        "gpus": v["--actor-num-nodes"] * v["--actor-num-gpus-per-node"],
        "samples": samples,
        "updates": samples // v["--global-batch-size"],
    }


def _skyrl(v: dict) -> dict:
    place = "trainer.placement.policy_num"
    samples = v["trainer.train_batch_size"] * v["generator.n_samples_per_prompt"]
    return {
        "gpus": v[f"{place}_nodes"] * v[f"{place}_gpus_per_node"],
        "samples": samples,
        "updates": v["trainer.train_batch_size"] // v["trainer.policy_mini_batch_size"],
    }


def _areal(v: dict) -> dict:
    gpus = 1
    for number in re.findall(r"[dptc](\d+)", v["actor.backend"].partition(":")[2]):
        gpus *= int(number)
    samples = v["train_dataset.batch_size"] * v["gconfig.n_samples"]
    return {"gpus": gpus, "samples": samples, "updates": v["actor.ppo_n_minibatches"]}


COUNTS = {
    "verl": _verl,
    "openrlhf": _openrlhf,
    "nemo-rl": _nemo_rl,
    "trl": _trl,
    "slime": _slime,
    "skyrl": _skyrl,
    "areal": _areal,
}


@pytest.mark.parametrize("name", exporters())
def test_scripts_parse_and_the_page_says_what_cannot_be_told(name: str, tmp_path: Path) -> None:
    for path in RECIPES[name]:
        found = written(name, path)
        script = tmp_path / "launch.sh"
        script.write_text(found.files["launch.sh"])
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
        page = found.files["README.md"]
        assert all(unsaid.what in page and unsaid.instead in page for unsaid in found.written.unsaid)
        assert found.start in page
        for line in page.splitlines():
            assert len(line) < 400


VARIABLE, ASKED, SAID = r"\$\{([A-Z_]+)\}", r'^: "\$\{([A-Z_]+):\?', r"^export ([A-Z_]+)="


def test_a_script_asks_for_every_variable_that_it_reads_and_for_no_other() -> None:
    met: set[str] = set()
    drafting = Speculation(method="eagle", draft_tokens=3, acceptance=0.6)
    for name in exporters():
        plans = [planned(path) for path in RECIPES[name]]
        if name in ("verl", "nemo-rl", "slime"):
            plans.append(with_speculation(plans[0], drafting))
        if name == "verl":
            actor = plans[0].placement.actor
            served = Layout(zero=0, dp=actor.layout.gpus, recompute="none")
            scored = replace(plans[0].placement, reward=replace(actor, layout=served))
            plans.append(with_workload(replace(plans[0], placement=scored), dynamic_sampling=None))
        for plan in plans:
            files = export(plan, name, frozenset()).files
            script = files["launch.sh"]
            read = set(re.findall(VARIABLE, script))
            assert set(re.findall(ASKED, script, re.M)) == read
            assert set(re.findall(SAID, files["README.md"], re.M)) == read
            met |= read
    assert met >= {"MODEL", "REWARD_MODEL", "DRAFT_MODEL", "REWARD", "NEMO_RL"}


def test_the_command_writes_a_folder_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, planned(RECIPES["verl"][0]))
    asked = ["export", str(plan), "--to", "verl", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli, [*asked, "--json"], catch_exceptions=False)
    data = json.loads(done.output)
    assert {f.name for f in (tmp_path / "run").iterdir()} == {"launch.sh", "README.md", "plan.json"}
    assert (tmp_path / "run/launch.sh").stat().st_mode & 0o111
    assert (tmp_path / "run/plan.json").read_bytes() == plan.read_bytes()
    text = (tmp_path / "run/launch.sh").read_text()
    assert all(row["key"] in text for row in data["settings"])
    assert any(row["why"] for row in data["settings"])
    with pytest.raises(RlhfsimError, match="holds something already"):
        CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".run")]


def test_a_plan_that_the_framework_does_not_run_is_refused_with_all_that_it_lacks(tmp_path: Path) -> None:
    megatron = next(p for p in RECIPES["verl"] if planned(p).placement.backend == "megatron")
    with pytest.raises(RlhfsimError, match="TRL does not run training by Megatron"):
        export(planned(megatron), "trl", frozenset())
    with pytest.raises(RlhfsimError, match="AMD GPUs"):
        export(planned(RECIPES["openrlhf"][0]), "openrlhf", frozenset({"amd"}))
    plan = tmp_path / "plan.json"
    write_plan(plan, planned(megatron))
    asked = ["export", str(plan), "--to", "verl", "--version", "0.2", "--out", str(tmp_path / "x")]
    with pytest.raises(RlhfsimError, match=r"0\.2 are not known"):
        CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert not (tmp_path / "x").exists()


def test_a_pack_shorter_than_the_longest_sample_is_raised_for_verl_and_said() -> None:
    path = next(p for p in RECIPES["verl"] if planned(p).placement.actor.layout.pack_tokens)
    plan = planned(path)
    layout = replace(plan.placement.actor.layout, pack_tokens=64, score_pack_tokens=None)
    short = replace(
        plan, placement=replace(plan.placement, actor=replace(plan.placement.actor, layout=layout))
    )
    found = export(short, "verl", frozenset()).written
    longest = plan.workload.prompt_len.maximum + plan.workload.response_len.maximum
    limit = found.values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert isinstance(limit, int)
    assert limit * layout.cp >= longest
    assert any("packs of 64 tokens" in unsaid.what for unsaid in found.unsaid)


def test_trl_files_are_yaml_and_name_the_ranks() -> None:
    found = written("trl", RECIPES["trl"][0])
    accelerate = yaml.safe_load(found.files["accelerate.yaml"])
    assert accelerate["num_processes"] == found.written.values["num_processes"]
    assert (
        yaml.safe_load(found.files["grpo.yaml"])["num_generations"]
        == planned(RECIPES["trl"][0]).workload.samples
    )


def test_versions_are_those_of_the_tables() -> None:
    assert {name: exporter(name).version for name in exporters()} == {
        "areal": "1.0.4",
        "nemo-rl": "7ea279a",
        "openrlhf": "0.11.2",
        "slime": "624b824",
        "skyrl": "0.4.0",
        "trl": "1.16.0",
        "verl": "0.9.1",
    }


WRITTEN_OR_REFUSED = {
    Workload: "algorithm critic custom dynamic_sampling environment epochs gradients kl lora mini_batches model "
    "old_logprobs optimizer oversampling packing prompt_len prompts reference response_len reward "
    "rollout_precision samples seed train_precision router_replay teacher_top rollout_bf16_attention kv_precision rollout_bf16_layers "
    "speculation",
    Layout: "cp dp ep etp micro_batch offload_optimizer offload_params pack_tokens pp recompute "
    "score_micro_batch score_pack_tokens sequence_parallel tp vp zero shards offload_fraction dispatcher ep_overlap",
    RolloutLayout: "attention_dp cuda_graphs dp ep kv_precision max_batched_tokens max_num_seqs "
    "memory_utilization pp precision tp speculation prefill engine bf16_layers bf16_attention dispatcher",
    Schedule: "double_buffered overlapped_sync partial_rollout queue staleness streaming late lend",
    RolePlacement: "layout offload_between pool residency",
}
"""What exporters write, say that they cannot, or leave to the table of what the framework runs."""


@pytest.mark.parametrize("spec", WRITTEN_OR_REFUSED, ids=lambda spec: spec.__name__)
def test_no_field_of_a_plan_is_unknown_to_exporters(spec: type) -> None:
    assert {field.name for field in fields(spec)} == set(WRITTEN_OR_REFUSED[spec].split())


@pytest.mark.parametrize(
    ("dispatcher", "keys"), [("deepep", ("flex", "deepep")), ("alltoall", ("alltoall", None))]
)
def test_a_dispatcher_is_written_for_nemo_rl_and_read_back(
    dispatcher: Dispatcher, keys: tuple[str, str]
) -> None:
    layout, group = Layout(tp=2, dp=4, ep=8, dispatcher=dispatcher, ep_overlap=True), "policy.megatron_cfg"
    asked = planned(RECIPES["nemo-rl"][0])
    asked = with_placement(asked, actor=replace(asked.placement.actor, layout=layout), backend="megatron")
    settings = (setting for section in NEMO_RL.write(asked) for setting in section.settings)
    values = {setting.key.lstrip("+"): setting.value for setting in settings}
    named = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
    assert tuple(values[f"{group}.{name}"] for name in named) == keys
    assert NEMO_RL.read(FrameworkSettings(values, "written"))["actor.dispatcher"] == dispatcher
    other = {f"{group}.enabled": True, f"{group}.expert_model_parallel_size": 8}
    deepep = FrameworkSettings({**other, f"{group}.moe_enable_deepep": True}, "other")
    assert NEMO_RL.read(deepep)["actor.dispatcher"] is None


def test_what_no_key_says_of_the_experts_exchange_is_said() -> None:
    plan = planned(RECIPES["verl"][0])
    actor = plan.placement.actor
    layout = replace(actor.layout, dispatcher="deepep", ep_overlap=True)
    named = replace(plan, placement=replace(plan.placement, actor=replace(actor, layout=layout)))
    what = [unsaid.what for unsaid in export(named, "verl", frozenset()).written.unsaid]
    assert "dispatcher deepep and overlap of the experts' exchange" in what
    assert not any("exchange" in u.what for u in export(plan, "verl", frozenset()).written.unsaid)


def test_dynamic_sampling_and_gradients_are_written() -> None:
    asked = {"verl": "filter_groups.enable", "openrlhf": "dynamic_filtering_enable", "nemo-rl": "use_dynamic"}
    asked |= {"slime": "sampling-filter-path"}
    for name, key in asked.items():
        plan = planned(next(p for p in RECIPES[name] if "-dpo-" not in p.stem))
        sampling = DynamicSampling(kept=0.5, gen_prompts=3 * plan.workload.prompts, max_gen_batches=4)
        filtered = replace(plan, workload=replace(plan.workload, dynamic_sampling=sampling))
        values = export(filtered, name, frozenset()).written.values
        assert any(key in k and v not in (False, None) for k, v in values.items())
        assert {3 * plan.workload.prompts, 3.0} & set(values.values())


def test_verls_trainer_limits_no_generation_batches_and_filters_before_a_shared_reward_model() -> None:
    plan, key = planned(RECIPES["verl"][0]), "algorithm.filter_groups.max_num_gen_batches"
    sampling = DynamicSampling(kept=0.5, max_gen_batches=4)
    filtered = with_workload(plan, dynamic_sampling=sampling)
    found = export(filtered, "verl", frozenset()).written
    assert key not in found.values
    [said] = [unsaid for unsaid in found.unsaid if "generation batches" in unsaid.what]
    assert said.instead == "no limit"
    served = Layout(zero=0, dp=plan.placement.actor.layout.gpus, recompute="none")
    own = replace(plan.placement.actor, layout=served)
    shared = with_placement(filtered, reward=replace(own, residency="offloaded"))
    with pytest.raises(RlhfsimError, match="it filters groups before they are scored"):
        export(shared, "verl", frozenset())


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, True),
        ({"reward.reward_model.enable_resource_pool": True}, False),
        ({"trainer.use_v1": False}, False),
        ({"verl_version": "0.8"}, False),
        ({"algorithm.filter_groups.enable": False}, False),
    ],
)
def test_filters_of_verls_v1_trainer_are_refused_beside_a_reward_model_on_its_gpus(
    more: dict[str, Any], refused: bool
) -> None:
    reward = {f"reward.reward_model.{name}": v for name, v in {"enable": True, "model_path": "q"}.items()}
    said = {"algorithm.filter_groups.enable": True, "algorithm.adv_estimator": "grpo"} | reward
    values = said | {"actor_rollout_ref.model.path": "qwen2.5-7b"} | more
    refusal = pytest.raises(RlhfsimError, match="verl refuses to start") if refused else nullcontext()
    with refusal:
        assert VERL.read(FrameworkSettings(values, "run.sh")).all()["workload.reward.model"] == "q"


@pytest.mark.parametrize(("more", "most"), [({}, None), ({"verl_version": "0.8"}, 10)])
def test_verls_limit_of_generation_batches_is_read_where_it_holds(
    more: dict[str, str], most: int | None
) -> None:
    group = "algorithm.filter_groups"
    said = {f"{group}.enable": True, f"{group}.max_num_gen_batches": 10, "algorithm.adv_estimator": "grpo"}
    values = said | {"actor_rollout_ref.model.path": "qwen2.5-7b"} | more
    found = VERL.read(FrameworkSettings(values, "run.sh")).all()["workload.dynamic_sampling"]
    assert found.max_gen_batches == most


def test_design_for_a_framework_names_the_export(tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    asked = ["design", "--gpus", "2", "--model", "qwen2.5-0.5b", "--algorithm", "grpo", "--samples", "4"]
    done = CliRunner().invoke(cli, [*asked, "--framework", "verl", "--out", out], catch_exceptions=False)
    assert f"rlhfsim export {out} --to verl" in " ".join(done.output.split())
    told = CliRunner().invoke(
        cli, ["export", out, "--to", "verl", "--out", str(tmp_path / "run")], catch_exceptions=False
    )
    assert "bash launch.sh" in told.output
    assert "[" not in told.output


def test_a_rollout_on_the_references_gpus_is_no_launch_of_openrlhf(tmp_path: Path) -> None:
    """Its flags would ask for GPUs of the rollout besides: 24 of a cluster of 16."""
    question = "--gpus 16 --model qwen2.5-7b --algorithm grpo --prompts 64 --samples 8 --rules workers=64"
    choice = "--framework openrlhf --architecture disaggregated --fastest"
    out = tmp_path / "plan.json"
    CliRunner().invoke(cli, ["design", *question.split(), *choice.split(), "--out", str(out)])
    plan = read_plan(out)
    assert plan.placement.role("reference") is not None
    assert plan.placement.rollout is not None
    assert plan.placement.role("reference").pool == plan.placement.actor.pool  # design knows
    moved = replace(plan.placement.role("reference"), pool=plan.placement.rollout.pool)
    shared = replace(plan, placement=replace(plan.placement, reference=moved))
    with pytest.raises(RlhfsimError, match="the rollout shares GPUs with some of the roles"):
        exporter("openrlhf").write(shared)


def with_speculation(plan: Plan, drafted: Speculation) -> Plan:
    assert plan.placement.rollout is not None
    layout = replace(plan.placement.rollout.layout, speculation=drafted)
    rollout = replace(plan.placement.rollout, layout=layout)
    return replace(plan, placement=replace(plan.placement, rollout=rollout))


def test_drafted_tokens_and_shards_are_written() -> None:
    drafted = Speculation(method="ngram", draft_tokens=3, acceptance=0.6)
    for name, key, number in (
        ("verl", "num_speculative_tokens", 3),
        ("nemo-rl", "num_speculative_tokens", 3),
        ("slime", "--sglang-speculative-num-draft-tokens", 4),
    ):
        plan = planned(next(p for p in RECIPES[name] if "-dpo-" not in p.stem))
        values = export(with_speculation(plan, drafted), name, frozenset()).written.values
        assert next(v for k, v in values.items() if k.endswith(key)) == number
    plan = next(p for p in map(planned, RECIPES["verl"]) if p.placement.actor.layout.dp >= 4)
    layout = replace(plan.placement.actor.layout, shards=2)
    placement = replace(plan.placement, actor=replace(plan.placement.actor, layout=layout))
    values = export(replace(plan, placement=placement), "verl", frozenset()).written.values
    assert values["actor_rollout_ref.actor.fsdp_config.fsdp_size"] == 2


@pytest.mark.parametrize("name", ["verl", "nemo-rl", "slime"])
def test_a_share_of_the_optimizer_on_the_host_is_written(name: str) -> None:
    plans = (planned(p) for p in RECIPES[name] if "-dpo-" not in p.stem)
    plan = next(p for p in plans if p.placement.backend == "megatron")
    actor = plan.placement.actor
    half = replace(actor.layout, recompute="none", offload_optimizer="cpu", offload_fraction=0.5)
    changed = replace(plan, placement=replace(plan.placement, actor=replace(actor, layout=half)))
    values = export(changed, name, frozenset()).written.values
    assert [
        v for k, v in values.items() if k.endswith(("optimizer_offload_fraction", "offload-fraction"))
    ] == [0.5]


def price(plan: Plan) -> Prediction:
    return estimate(plan.placement, plan.workload, cluster_of(plan)).prediction


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_what_is_written_instead_can_be_told(name: str, path: Path) -> None:
    for unsaid in written(name, path).written.unsaid:
        if unsaid.nearest is not None:
            assert unsaid.nearest != planned(path)
            again = export(unsaid.nearest, name, frozenset()).written.unsaid
            assert unsaid.what not in [other.what for other in again]


def test_what_is_written_instead_has_its_cost_on_the_page_and_in_the_answer(tmp_path: Path) -> None:
    path = ROOT / "scenarios/recipes/skyrl-async-1.5b.yaml"
    found = export(planned(path), "skyrl", frozenset(), price)
    (swapped,) = found.written.unsaid
    assert swapped.nearest is not None
    assert swapped.nearest.placement.actor.residency == "offloaded"
    now, then = planned(path).prediction, price(swapped.nearest)
    assert then.step_s > now.step_s
    assert f"{(then.step_s - now.step_s) / now.step_s:+.1%}" in swapped.cost
    assert "of host memory" in swapped.cost
    assert swapped.cost in found.files["README.md"]
    write_plan(tmp_path / "plan.json", planned(path))
    asked = ["export", str(tmp_path / "plan.json"), "--to", "skyrl", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert [x["cost"] for x in json.loads(done.output)["cannot_say"]] == [swapped.cost]


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("openrlhf", {"max_num_seqs": 32}, "max_num_seqs 32 of the rollout"),
        ("openrlhf", {"sleep": 2}, "a rollout that drops its weights (sleep 2)"),
    ],
)
def test_limits_that_a_framework_has_no_key_for_are_priced(name: str, changes: dict, what: str) -> None:
    plan = planned(next(p for p in RECIPES[name] if planned(p).placement.architecture == "hybrid"))
    assert plan.placement.rollout is not None
    asked = with_rollout(plan, plan.placement.rollout, **changes)
    said = {u.what: u for u in export(asked, name, frozenset(), price).written.unsaid}
    assert said[what].nearest is not None
    assert said[what].cost


@pytest.mark.parametrize(
    ("name", "what", "changed"),
    [
        ("verl", "a rollout on GPUs of its own that waits for every update", "a step"),
        ("nemo-rl", "a policy that stays on the GPUs during a rollout", "of host memory"),
        ("slime", "old log-probs from a pass of their own", "a step"),
        ("areal", "a policy that stays beside the rollout", "of host memory"),
    ],
)
def test_what_a_framework_does_instead_is_priced(name: str, what: str, changed: str) -> None:
    work = workload("grpo", mini_batches=1)
    backend = "megatron" if name == "slime" else "fsdp2"
    layout = {"tp": 2, "dp": 4, "zero": 1} if backend == "megatron" else {"dp": 8, "zero": 3}
    drawn = drawn_plan(work, backend, layout, {"tp": 2, "dp": 4}, 8 if name == "verl" else 0)
    if name == "areal":
        drawn = with_placement(drawn, weight_path="disk")
    said = export(drawn, name, frozenset(), price).written.unsaid
    (cost,) = (u.cost for u in said if u.what.startswith(what))
    assert changed in cost


def test_who_pads_is_designed_for_with_padding(tmp_path: Path) -> None:
    asked = ["design", "--gpus", "8", "--model", "qwen2.5-0.5b", "--algorithm", "grpo", "--samples", "8"]
    asked += ["--rules", "workers=8", "--prompts", "16", "--out", str(tmp_path / "plan.json"), "--framework"]
    for name, packs in (("trl", False), ("openrlhf", True)):
        assert CliRunner().invoke(cli, [*asked, name], catch_exceptions=False).exit_code == 0
        assert read_plan(tmp_path / "plan.json").workload.packing is packs


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_preferences_are_written_in_keys_of_nemo_rl_s_dpo_and_read_back(
    backend: Backend, tmp_path: Path
) -> None:
    layout = {"tp": 2, "dp": 8, "zero": 3 if backend == "fsdp2" else 1, "micro_batch": 4, "recompute": "full"}
    role = RolePlacement(pool="all", layout=Layout(**layout))
    work = Workload(algorithm="dpo", model="llama-3.1-8b", prompts=128, packing=False, **LENGTHS)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=16),),
        actor=role,
        reference=replace(role, residency="swapped"),
        backend=backend,
    )
    asked = replace(estimate(placement, work, parse_cluster(16, "h100")), framework="nemo-rl")
    found = export(asked, "nemo-rl", frozenset())
    assert "run_dpo.py --config examples/configs/dpo.yaml" in found.files["launch.sh"]
    values = found.written.values
    assert {key for key in values if not key.startswith("++")} <= known_keys("nemo-rl-dpo")
    assert (values["policy.train_global_batch_size"], values["policy.train_micro_batch_size"]) == (128, 2)
    (tmp_path / "launch.sh").write_text(found.files["launch.sh"])
    configuration, settings = read_configuration([tmp_path], {"MODEL": work.model})
    run = configuration.run(settings)
    again = workload_of(run, Lengths(prompt=1.0, response=1.0, longest=None))
    assert (again.algorithm, again.prompts, again.mini_batches, again.packing) == ("dpo", 128, 1, False)
    placed = placement_of(run, again)
    assert (placed.actor, placed.role("reference"), placed.rollout) == (
        role,
        placement.role("reference"),
        None,
    )
    packed = replace(asked, workload=replace(work, packing=True, mini_batches=2))
    told = {entry.what for entry in export(packed, "nemo-rl", frozenset()).written.unsaid}
    assert told == {"packed micro-batches", "steps of 2 updates"}
