"""slime's own parser takes what it does not know in silence: exports are held to its flags, types and sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.keys import unread
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Exported, Value, export
from rlhfsim.interchange.slime.configuration import CONFIGURATION
from rlhfsim.interchange.slime.keys import CHUNKED, ends
from rlhfsim.memory.logits import head_peak
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.features import workload_features
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Environment
from tests.frameworks.test_accepted import PACKS, plan, workload

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests/data/framework_keys/slime.txt").read_text().splitlines()
TYPES = dict(line.split() for line in LINES if not line.startswith("#"))


def drawn() -> Iterator[Plan]:
    """Dense and MoE, one node to 64, algorithms, shared and own GPUs, micro-batches and packs."""
    layouts: tuple[dict[str, Any], ...] = (
        {"tp": 2, "dp": 4},
        {"tp": 2, "pp": 2, "cp": 2, "dp": 2},
        {"tp": 4, "pp": 2, "vp": 2, "dp": 4, "recompute": "selective"},
        {"pp": 8, "dp": 2},
        {"dp": 8, "offload_optimizer": "cpu", "offload_fraction": 0.5, "recompute": "none"},
    )
    for i, algorithm in enumerate(("grpo", "dr-grpo", "reinforce++", "ppo")):
        for j, layout in enumerate(layouts):
            more = PACKS if (i + j) % 2 else {"micro_batch": 2}
            gpus = 1
            for degree in ("tp", "pp", "cp", "dp"):
                gpus *= layout.get(degree, 1)
            kept = "offloaded" if (i + j) % 3 else "resident"
            given = {"zero": 1} | layout | more
            yield plan(workload(algorithm), "megatron", given, {"tp": 2, "dp": gpus // 2}, residency=kept)
    moe = workload("grpo", model="qwen3-30b-a3b", old_logprobs="rollout", kl=False)
    experts = {"tp": 2, "dp": 8, "ep": 8, "zero": 1} | PACKS
    wide = {"tp": 4, "attention_dp": 2, "ep": 8, "dp": 2, "kv_precision": "fp8"}
    yield plan(moe, "megatron", experts, wide, residency="offloaded")
    yield plan(moe, "megatron", experts, wide, 16, {"staleness": 1})
    yield plan(moe, "megatron", experts, {"tp": 4, "dp": 4}, 16, {"staleness": 3, "partial_rollout": True})
    large = workload("grpo", model="qwen3-235b-a22b", prompts=512, train_precision="fp8")
    layout = {"tp": 4, "pp": 4, "cp": 2, "dp": 16, "ep": 16, "zero": 1} | PACKS
    yield plan(large, "megatron", layout, {"tp": 8, "dp": 64}, residency="offloaded")
    yield plan(workload("grpo"), "megatron", {"tp": 2, "dp": 4, "zero": 1} | PACKS, {"tp": 2, "dp": 4}, 8)


NUMBER_OF_PLANS = 25
PLAIN = {"tp": 2, "dp": 4, "zero": 1} | PACKS


@cache
def plans() -> list[Plan]:
    return list(drawn())


def test_every_plan_is_tried() -> None:
    assert len(plans()) == NUMBER_OF_PLANS


def right(kind: str, value: Value) -> bool:
    """Whether a value is of the type of its flag; the launch ends at once where a variable is not set."""
    if str(value).startswith("${"):
        return kind not in ("flag", "none")
    if kind == "flag":
        return value is True
    if kind in ("int", "float"):
        return isinstance(value, (int, float) if kind == "float" else int) and not isinstance(value, bool)
    return isinstance(value, str) and ("|" not in kind or value in kind.split("|"))


def wrong(found: Exported, asked: Plan) -> list[str]:
    """What slime would take in silence: flags that it lacks, types, and GPUs and batches that do not split."""
    v: Any = found.written.values
    said = [f"{key}={value!r}" for key, value in v.items() if not right(TYPES.get(key, "none"), value)]
    gpus = v["--actor-num-nodes"] * v["--actor-num-gpus-per-node"]
    degrees = ("tensor-model", "pipeline-model", "context")
    each = 1
    for degree in degrees:
        each *= v[f"--{degree}-parallel-size"]
    samples = v["--rollout-batch-size"] * v["--n-samples-per-prompt"]
    engine, batch = v["--rollout-num-gpus-per-engine"], v["--global-batch-size"]
    apart = 0 if v.get("--colocate") else v["--rollout-num-gpus"]
    layers, stages = resolve_model(asked.workload.model).num_layers, v["--pipeline-model-parallel-size"]
    given_ends = [v[k] for end in ("first", "last") if (k := f"--decoder-{end}-pipeline-num-layers") in v]
    inner = layers - sum(given_ends) if all(given_ends) else -1
    rules = {
        "ranks": gpus % each == 0,
        "stages": inner >= 0
        and (inner % (stages - len(given_ends)) == 0 if stages > len(given_ends) else inner == 0),
        "experts": gpus // v["--pipeline-model-parallel-size"] % v["--expert-model-parallel-size"] == 0,
        "engines": v["--rollout-num-gpus"] % engine == 0 and engine % v["--sglang-pp-size"] == 0,
        "attention": engine % v.get("--sglang-dp-size", 1) == 0 and engine % v["--sglang-ep-size"] == 0,
        "updates": samples % batch == 0,
        "micro-batches": batch % (gpus // each * v.get("--micro-batch-size", 1)) == 0,
        "cluster": gpus + apart <= sum(h.gpus for h in asked.hardware),
        "nodes": v["--actor-num-gpus-per-node"] <= v["--num-gpus-per-node"],
        "context": v["--rollout-max-prompt-len"] < v["--rollout-max-context-len"],
        "normalised": "reinforce" not in v["--advantage-estimator"] or v.get("--normalize-advantages"),
        "one of two": not ("--kl-coef" in v and "--kl-loss-coef" in v),
        "virtual stages": v.get("--num-virtual-stages-per-pipeline-rank", 1) == 1
        or v["--pipeline-model-parallel-size"] > 1,
    }
    return said + [name for name, holds in rules.items() if not holds]


@pytest.mark.parametrize("number", range(NUMBER_OF_PLANS))
def test_a_drawn_plan_is_written_in_flags_and_sums_of_slime(number: int) -> None:
    assert wrong(export(plans()[number], "slime", frozenset()), plans()[number]) == []


def test_every_recipe_of_slime_is_written_so() -> None:
    for path in sorted((ROOT / "scenarios/recipes").glob("slime-*.yaml")):
        asked = estimate_file(path)
        found = export(asked, "slime", frozenset())
        assert wrong(found, asked) == []
        assert 'source "${SLIME}/scripts/models/' in found.files["launch.sh"]


def test_the_checks_notice_what_the_parser_takes() -> None:
    found = export(plans()[0], "slime", frozenset())
    sections = found.written.sections
    for key, value, name in (
        ("--nonsense", 1, "--nonsense=1"),
        ("--rollout-num-gpus-per-engine", 3, "engines"),
        ("--global-batch-size", 7, "updates"),
        ("--recompute-granularity", "some", "--recompute-granularity='some'"),
        ("--colocate", False, "cluster"),
    ):
        first = replace(sections[0].settings[0], key=key, value=value)
        spoiled = replace(found.written, sections=(*sections, replace(sections[0], settings=(first,))))
        assert name in wrong(replace(found, written=spoiled), plans()[0])


@pytest.mark.parametrize(("layers", "stages"), [(61, 4), (28, 8), (94, 12), (5, 3), (9, 8), (7, 2), (36, 4)])
def test_stages_that_do_not_split_evenly_hold_all_layers(layers: int, stages: int) -> None:
    found = ends(layers, stages)
    rest = layers - sum(found.values())
    assert all(number > 0 for number in found.values())
    assert rest % (stages - len(found)) == 0
    assert rest > 0


def script(asked: Plan) -> str:
    return export(asked, "slime", frozenset()).files["launch.sh"]


def test_the_schedule_names_the_program() -> None:
    asked = next(p for p in plans() if p.placement.schedule.staleness == 1)
    assert "/train_async.py" in script(asked)
    assert "fully_async" not in script(asked)
    assert "fully_async" in script(next(p for p in plans() if p.placement.schedule.staleness > 1))
    shared = script(plans()[0])
    assert "/train.py" in shared
    assert "--colocate\n" in shared


def test_what_stays_is_said_and_engines_are_counted_whole() -> None:
    values = [export(p, "slime", frozenset()).written.values for p in plans()]
    kept = [p.placement.actor.residency == "resident" for p in plans()]
    apart = ["--colocate" not in v for v in values]
    assert [("--no-offload-train" in v) for v in values] == [
        k and not a for k, a in zip(kept, apart, strict=True)
    ]
    wide = next(v for v in values if v.get("--sglang-enable-dp-attention"))
    assert (wide["--rollout-num-gpus-per-engine"], wide["--sglang-dp-size"]) == (8, 2)
    assert wide["--sglang-max-running-requests"] == 2 * 1024


def given(**changes: Any) -> Any:
    """What is written of the first drawn plan under a change of its workload."""
    asked = replace(plans()[0], workload=replace(plans()[0].workload, **changes))
    return export(asked, "slime", frozenset()).written.values


def test_disk_oversampling_and_environments_have_flags() -> None:
    disk = replace(plans()[0], placement=replace(plans()[0].placement, weight_path="disk"))
    values = export(disk, "slime", frozenset()).written.values
    assert values["--update-weight-disk-dir"] == "${SYNC_DIR}"
    apart = next(p for p in plans() if "--colocate" not in export(p, "slime", frozenset()).written.values)
    changes = replace(apart, placement=replace(apart.placement, weight_path="delta-disk"))
    values |= export(changes, "slime", frozenset()).written.values
    assert values["--update-weight-mode"] == "delta"
    assert values["--update-weight-transport"] == "disk"
    assert values["--update-weight-local-checkpoint-dir"] == "${LOCAL_CHECKPOINT_DIR}"
    assert given(oversampling=0.25)["--over-sampling-batch-size"] == 160
    sampling = DynamicSampling(kept=0.5, gen_prompts=384)
    assert given(dynamic_sampling=sampling)["--over-sampling-batch-size"] == 384
    turns = given(environment=Environment(turns=2))
    assert turns["--custom-generate-function-path"] == "${GENERATE}"


def described(**flags: Any) -> RunDescription:
    """A run of 64 prompts under more flags."""
    base = {"hf_checkpoint": "Qwen/Qwen2.5-7B", "rollout_batch_size": 64, "colocate": True}
    return CONFIGURATION.run(FrameworkSettings({**base, **flags}, "run"))


def test_filters_oversampling_gradients_and_turns_are_read() -> None:
    more = {"over_sampling_batch_size": 96}
    assert described(**more).oversampling == 0.5
    filtered = described(dynamic_sampling_filter_path="a.b", **more, **{"dynamic_sampling.kept": 0.7})
    assert filtered.dynamic_sampling == DynamicSampling(kept=0.7, gen_prompts=96)
    assert filtered.oversampling == 0
    assert described(grad_reduce_in_bf16=True).gradients == "bf16"
    turns = described(custom_generate_function_path="a.b", **{"environment.turns": 3})
    assert turns.environment == Environment(turns=3)
    sent = {
        "colocate": False,
        "rollout_num_gpus": 8,
        "update_weight_transport": "disk",
        "update_weight_mode": "delta",
    }
    assert described(**sent).weight_path == "delta-disk"
    assert described(**sent | {"update_weight_mode": "full"}).weight_path == "disk"
    assert described(rollout_max_prompt_len=1024).max_prompt == 1024


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"algorithm": "rloo"}, "not-run-by-framework"),
        ({"epochs": 2}, "not-run-by-framework"),
        ({"prompts": 127, "samples": 2, "mini_batches": 1}, "batch-not-cut-by-ranks"),
    ],
)
def test_what_slime_cannot_train_is_refused(changes: dict[str, Any], code: str) -> None:
    asked = replace(plans()[0], workload=replace(plans()[0].workload, **changes))
    with pytest.raises(RlhfsimError) as error:
        export(asked, "slime", frozenset())
    assert error.value.code == code


def test_what_slime_cannot_be_told_is_named() -> None:
    stale = replace(plans()[-1].placement, schedule=Schedule(staleness=4, partial_rollout=True, queue=2))
    unsaid = export(replace(plans()[-1], placement=stale), "slime", frozenset()).written.unsaid
    assert {"a limit of 4 policy versions", "a queue of 2 batches", "vLLM, whose speed is priced"} <= {
        entry.what for entry in unsaid
    }


def read_back(asked: Plan, folder: Path) -> RunDescription:
    script = folder / "launch.sh"
    script.write_text(export(asked, "slime", frozenset()).files["launch.sh"])
    configuration, settings = read_configuration([script], {"hf_checkpoint": asked.workload.model})
    assert configuration.name == "slime"
    return configuration.describe(settings)


@pytest.mark.parametrize("number", range(NUMBER_OF_PLANS))
def test_what_is_written_is_read_back(number: int, tmp_path: Path) -> None:
    asked = plans()[number]
    found, work, placement = read_back(asked, tmp_path), asked.workload, asked.placement
    assert placement.rollout is not None
    schedule = placement.schedule
    assert (found.prompts, found.samples, found.mini_batches) == (
        work.prompts,
        work.samples,
        work.mini_batches,
    )
    assert (found.algorithm, found.kl) == (work.algorithm, placement.role("reference") is not None)
    assert (found.layout, found.rollout) == (placement.actor.layout, placement.rollout.layout)
    assert found.weight_path == placement.weight_path
    assert found.sleep == placement.rollout.sleep
    assert found.partial_rollout == schedule.partial_rollout
    assert found.train_precision == work.train_precision
    assert found.staleness == (2 if schedule.partial_rollout else schedule.staleness)
    skips = framework("slime").reuses_logprobs(work) and work.old_logprobs == "recompute"
    assert found.old_logprobs == ("reused" if skips else work.old_logprobs)


RECIPE = """source scripts/models/qwen3-30B-A3B.sh
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} --hf-checkpoint /root/Qwen3-30B-A3B \\
   --ref-load /root/Qwen3-30B-A3B_torch_dist --rollout-batch-size 32 --n-samples-per-prompt 8 \\
   --rollout-max-response-len 8192 --global-batch-size 256 --tensor-model-parallel-size 4 \\
   --sequence-parallel --expert-model-parallel-size 8 --recompute-granularity full \\
   --use-dynamic-batch-size --max-tokens-per-gpu 20480 --use-kl-loss --optimizer-cpu-offload \\
   --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
"""


def test_a_recipe_in_the_form_of_slime_is_recognised_and_read() -> None:
    configuration, settings = read_configuration(RECIPE, {})
    found = configuration.run(settings)
    assert configuration.name == "slime"
    assert (found.layout.tp, found.layout.ep, found.layout.etp, found.layout.dp) == (4, 8, 4, 2)
    assert (found.layout.pack_tokens, found.layout.offload_optimizer) == (20480, "cpu")
    assert (found.rollout.tp, found.rollout.max_num_seqs, found.sleep) == (8, 512, 2)
    assert found.actor_residency == "offloaded"
    assert found.old_logprobs == "reused"  # one update a rollout: taken from the training pass


def test_the_only_update_of_a_rollout_reuses_its_log_probs_and_no_pass_is_priced() -> None:
    cluster = parse_cluster(8, "h100")
    work = workload("grpo", mini_batches=1)
    asked = Request(cluster=cluster, workload=work, backend="megatron", framework="slime")
    assert asked.workload == replace(work, old_logprobs="reused")
    assert "actor.logprob" not in {call.name for call in dataflow(asked.workload)}
    assert "old log-probs of the training pass" in set(workload_features(asked.workload))
    several = replace(work, mini_batches=4)
    assert replace(asked, workload=several).workload == several
    assert Request(cluster=cluster, workload=work, backend="megatron", framework="verl").workload == work
    with pytest.raises(RlhfsimError, match="a step has 4"):
        replace(asked.workload, mini_batches=4)
    ppo = plan(
        replace(workload("reinforce++", mini_batches=1), old_logprobs="reused"),
        "megatron",
        PLAIN,
        {"tp": 2, "dp": 4},
    )
    told = {entry.what: entry for entry in export(ppo, "slime", frozenset()).written.unsaid}
    assert told["old log-probs of the training pass"].nearest is not None


def test_log_probs_in_chunks_are_read_and_written(tmp_path: Path) -> None:
    chunks = RECIPE.rstrip() + " \\\n   --log-probs-chunk-size 1024\n"
    configuration, settings = read_configuration(chunks, {})
    software = configuration.run(settings).software
    assert software is not None
    assert software.head == CHUNKED
    whole, cut = (
        head_peak(resolve_model("qwen2.5-7b"), Layout(), "megatron", 8192.0, head) for head in (None, CHUNKED)
    )
    assert cut < whole
    asked = plans()[0]
    chunked = replace(asked, placement=replace(asked.placement, software=software))
    assert export(chunked, "slime", frozenset()).written.values["--log-probs-chunk-size"] == 1024
    assert read_back(chunked, tmp_path).software == software


SCRIPT = """#!/bin/bash
ray stop --force
CONTEXT=32768
CP=2
CKPT_ARGS=(
   --hf-checkpoint /root/{checkpoint}/
)
PERF_ARGS=(
   --context-parallel-size ${{CP}}
   --max-tokens-per-gpu $((CONTEXT / CP))
   --use-dynamic-batch-size
)
ray start --head --num-gpus 8 --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{{}}" -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-batch-size 32 \\
   --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-num-gpus-per-engine 2 \\
   ${{CKPT_ARGS[@]}} ${{PERF_ARGS[@]}} --colocat
"""


def shipped(checkpoint: str, program: str = "train.py") -> tuple[FrameworkSettings, RunDescription]:
    """A script in the form of those that slime ships."""
    text = SCRIPT.format(checkpoint=checkpoint).replace("train.py", program).replace("\\\\", "\\")
    configuration, settings = read_configuration(text, {}, framework="slime")
    return settings, configuration.run(settings)


@pytest.mark.parametrize("program", ["train.py", "train_async.py", '"${REPO_ROOT}/train.py"'])
def test_options_of_other_programs_in_a_shipped_script_are_no_flags_of_slime(program: str) -> None:
    settings, run = shipped("Qwen3-8B", program)
    list(CONFIGURATION.findings(settings, run))
    assert {u.key for u in unread("slime", None, settings) if u.kind == "no such key"} == {"colocat"}
    assert (run.layout.pack_tokens, run.layout.cp) == (16384, 2)


@pytest.mark.parametrize(
    ("checkpoint", "precision", "assumed"),
    [
        ("Qwen3-30B-A3B", "bf16", False),
        ("Qwen3-30B-A3B-FP8", "fp8", False),
        ("Qwen3-30B-A3B-INT4", "mxfp4", True),
        ("DeepSeek-R1", "fp8", True),
        ("DeepSeek-R1-bf16", "bf16", False),
        ("DeepSeek-R1-Distill-Qwen-7B", "bf16", False),
        ("Kimi-K2-Instruct", "fp8", True),
        ("Kimi-K2-Thinking", "mxfp4", True),
        ("MiniMax-M2", "fp8", True),
    ],
)
def test_the_rollout_has_the_precision_of_its_checkpoint(
    checkpoint: str, precision: str, assumed: bool
) -> None:
    settings, run = shipped(checkpoint)
    assert run.rollout.precision == precision
    assert ("hf_checkpoint" in settings.assumed) == assumed
