"""AReaL: allocations, pools and what its parser does not add up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.areal.allocations import allocation
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import Exported, export
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.workload.workload import Environment
from tests.frameworks.test_accepted import for_areal, on_disk, plan, workload
from tests.frameworks.test_slime import right

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests/data/framework_keys/areal.txt").read_text().splitlines()
TYPES = dict(line.split() for line in LINES if not line.startswith("#"))
NUMBER_OF_PLANS = 26


@cache
def plans() -> list[Plan]:
    return list(for_areal())


def test_every_plan_is_tried() -> None:
    assert len(plans()) == NUMBER_OF_PLANS


def right_type(kind: str, value: Any) -> bool:
    """Whether a value is of the type of its key; an interpolation may be of any."""
    if value is None or (isinstance(value, str) and "${" in value):
        return True
    if kind in ("bool", "list"):
        return isinstance(value, bool) if kind == "bool" else str(value).startswith("[")
    return right(kind, value)


def size(backend: str) -> int:
    """GPUs of an allocation: those of attention where experts are cut apart."""
    spelled = re.split(r"[|)]", backend.partition(":")[2].replace("(attn:", ""))[0]
    gpus = 1
    for number in re.findall(r"[dptc](\d+)", spelled):
        gpus *= int(number)
    return gpus


def wrong(found: Exported, asked: Plan) -> list[str]:
    """Keys and types that AReaL does not know, and GPUs and batches that do not add up."""
    v: Any = found.written.values
    given = {key: value for key, value in v.items() if value != "???" or key not in TYPES}  # the script's
    said = [
        f"{key}={value!r}" for key, value in given.items() if not right_type(TYPES.get(key, "none"), value)
    ]
    roles = [role for role in ("actor", "ref", "critic", "rollout") if f"{role}.backend" in v]
    apart = [r for r in roles if v.get(f"{r}.scheduling_strategy.type") != "colocation"]
    used = sum(size(v[f"{role}.backend"]) for role in apart)
    rules = {
        "cluster": used == v["cluster.n_nodes"] * v["cluster.n_gpus_per_node"],
        "hardware": used <= sum(h.gpus for h in asked.hardware),
        "shared by disk": "rollout" in apart or v["actor.weight_update_mode"] == "disk",
        "offload allowed": v["enable_offload"] or not any(v.get(f"{r}.offload") for r in roles),
        "updates": v["train_dataset.batch_size"] * v["gconfig.n_samples"] % v["actor.ppo_n_minibatches"] == 0,
        "under way": v["rollout.max_concurrent_rollouts"] >= v["train_dataset.batch_size"],
    }
    return said + [name for name, holds in rules.items() if not holds]


@pytest.mark.parametrize("number", range(NUMBER_OF_PLANS))
def test_a_plan_is_written_in_keys_and_sums_of_areal(number: int) -> None:
    found = export(plans()[number], "areal", frozenset())
    assert wrong(found, plans()[number]) == []
    written: Any = yaml.safe_load(found.files["config.yaml"])
    for key, value in found.written.values.items():
        at = written
        for part in key.split("."):
            at = at[part]
        assert at == (yaml.safe_load(value) if str(value).startswith("[") else value)


def test_the_checks_notice_what_the_parser_takes() -> None:
    found = export(plans()[-1], "areal", frozenset())
    first = found.written.sections[0]
    for key, value, name in (
        ("actor.nonsense", 1, "actor.nonsense=1"),
        ("rollout.backend", "vllm:d3", "cluster"),
        ("actor.ppo_n_minibatches", 7, "updates"),
        ("actor.weight_update_mode", "awex", "actor.weight_update_mode='awex'"),
    ):
        section = replace(first, settings=(replace(first.settings[0], key=key, value=value),))
        spoiled = replace(found.written, sections=(*found.written.sections, section))
        assert name in wrong(replace(found, written=spoiled), plans()[-1])


@pytest.mark.parametrize(
    ("layout", "megatron", "spelled"),
    [
        (Layout(dp=8), False, "fsdp:d8"),
        (Layout(dp=2, tp=2, cp=2), False, "fsdp:d2t2c2"),
        (Layout(dp=4, tp=4, pp=12, ep=4), True, "megatron:d4p12t4e4"),
        (Layout(dp=4, tp=4, ep=4, etp=2), True, "megatron:(attn:d4t4|ffn:d2t2e4)"),
    ],
)
def test_layouts_are_spelled_as_allocations(layout: Layout, megatron: bool, spelled: str) -> None:
    assert allocation(layout, megatron=megatron) == spelled


def test_shared_gpus_take_weights_from_disk_or_are_refused() -> None:
    shared = plan(workload("grpo"), "fsdp2", {"dp": 8, "zero": 3}, {"dp": 8}, residency="offloaded")
    with pytest.raises(RlhfsimError, match="weight path ipc"):
        export(shared, "areal", frozenset())
    values = export(on_disk(shared), "areal", frozenset()).written.values
    assert values["actor.weight_update_mode"] == "disk"
    assert values["rollout.scheduling_strategy.target"] == "actor"
    assert values["enable_offload"] is True


def test_micro_batches_are_a_number_and_packs_count_all_context_ranks() -> None:
    values = [export(p, "areal", frozenset()).written.values for p in plans()]
    for asked, v in zip(plans(), values, strict=True):
        layout, work = asked.placement.actor.layout, asked.workload
        if layout.pack_tokens is None:
            samples = work.num_sequences // work.mini_batches
            assert v["actor.mb_spec.n_mbs"] == samples // (layout.dp * layout.micro_batch)
        else:
            assert v["actor.mb_spec.max_tokens_per_mb"] == layout.pack_tokens * layout.cp


def test_a_reference_of_its_own_is_apart() -> None:
    asked = next(
        p for p in plans() if p.placement.role("reference") is not None and p.placement.rollout is not None
    )
    values = export(asked, "areal", frozenset()).written.values
    assert values["ref.scheduling_strategy.target"] == "actor"
    pools = (*asked.placement.pools, replace(asked.placement.pools[-1], name="own"))
    assert asked.placement.role("reference") is not None
    reference = replace(asked.placement.role("reference"), pool="own")
    moved = replace(asked, placement=replace(asked.placement, pools=pools, reference=reference))
    assert "ref.scheduling_strategy.type" not in export(moved, "areal", frozenset()).written.values


def named(asked: Plan) -> Iterator[str]:
    return (entry.what for entry in export(asked, "areal", frozenset()).written.unsaid)


def test_what_areal_cannot_be_told_is_named() -> None:
    last = plans()[-1]
    assert "a rollout that ends before every update" in set(named(last))
    queued = replace(last.placement, schedule=Schedule(staleness=2, partial_rollout=True, queue=2))
    assert "a queue of 2 batches" in set(named(replace(last, placement=queued)))
    turns = replace(last, workload=replace(last.workload, environment=Environment(turns=2)))
    assert "an environment" in set(named(turns))
    epochs = replace(last, workload=replace(last.workload, epochs=2))
    with pytest.raises(RlhfsimError, match="2 epochs"):
        export(epochs, "areal", frozenset())


def test_recipes_of_areal_are_asynchronous_with_their_staleness() -> None:
    for path in sorted((ROOT / "scenarios/recipes").glob("areal-*.yaml")):
        asked = estimate_file(path)
        values = export(asked, "areal", frozenset()).written.values
        assert values["rollout.max_head_offpolicyness"] == asked.placement.schedule.staleness


def same_run(asked: Plan, folder: Path) -> None:
    """The configuration as written, read back."""
    found = export(asked, "areal", frozenset())
    for name, text in found.files.items():
        (folder / name).write_text(text)
    configuration, settings = read_configuration(
        [folder / "launch.sh"], {"actor.path": asked.workload.model, "cluster.fileroot": "/shared"}
    )
    assert configuration.name == "areal"
    run = configuration.run(settings)
    work, placement = asked.workload, asked.placement
    assert placement.rollout is not None
    assert (run.algorithm, run.kl, run.old_logprobs) == (
        work.algorithm,
        work.has_reference,
        work.old_logprobs,
    )
    assert (run.prompts, run.samples, run.mini_batches) == (work.prompts, work.samples, work.mini_batches)
    assert (run.backend, run.weight_path) == (placement.backend, placement.weight_path)
    scored = {"score_pack_tokens": None, "score_micro_batch": None}
    assert replace(run.layout, **scored) == replace(placement.actor.layout, sequence_parallel=True, **scored)
    if run.layout.pack_tokens is None and work.old_logprobs == "recompute":
        assert run.layout.sequences(scoring=True) == run.layout.micro_batch * work.mini_batches
    assert replace(run.rollout, max_batched_tokens=0) == replace(
        placement.rollout.layout, max_batched_tokens=0
    )
    assert run.staleness == placement.schedule.staleness
    apart = placement.rollout.pool != placement.actor.pool
    assert run.rollout_gpus == (placement.pool(placement.rollout.pool).gpus if apart else None)
    assert run.lora_rank == (work.lora.rank if work.lora else 0)
    assert (run.gradients == "bf16") == (work.gradients == "bf16")


@pytest.mark.parametrize("number", range(NUMBER_OF_PLANS))
def test_what_is_written_is_read_as_the_same_run(number: int, tmp_path: Path) -> None:
    same_run(plans()[number], tmp_path)


def test_one_line_for_both_allocations_is_read_and_another_is_refused() -> None:
    text = "python3 -m areal.launcher.local train.py allocation_mode={} actor.path=Qwen/Qwen2.5-7B"
    configuration, settings = read_configuration(text.format("sglang.d4p1t2+d8p1t1"), {})
    run = configuration.run(settings)
    assert (run.gpus, run.rollout_gpus, run.rollout.tp, run.backend) == (8, 8, 2, "fsdp2")
    with pytest.raises(RlhfsimError, match="no allocation"):
        configuration.run(
            settings.with_values({"actor.backend": "megatron:x4", "rollout.backend": "vllm:d4"})
        )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_learning_rates_are_demanded_because_the_default_is_a_thousand_times_too_high(algorithm: str) -> None:
    work = workload(algorithm)
    asked = plan(work, "fsdp2", {"dp": 8, "zero": 3, "micro_batch": 2}, {"dp": 8}, 8, {"staleness": 1})
    script = export(asked, "areal", frozenset()).files["launch.sh"]
    assert 'actor.optimizer.lr="${LR}"' in script
    assert ': "${LR:?' in script
    assert (
        (': "${CRITIC_LR:?' in script)
        == ('critic.optimizer.lr="${CRITIC_LR}"' in script)
        == (algorithm == "ppo")
    )


OLDER = """# Compatible with GRPOConfig, single-GPU setup
cluster: {n_nodes: 1, n_gpus_per_node: 8}
allocation_mode: sglang:d4+d4
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor: {path: Qwen/Qwen2.5-1.5B-Instruct, kl_ctl: %s, mb_spec: {max_tokens_per_mb: 10240}}
ref: {path: "${actor.path}", scheduling_strategy: {type: colocation, target: actor}}
train_dataset: {batch_size: 64, type: rl, max_length: 512}
"""


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_one_allocation_says_where_the_reference_is_which_a_kl_term_alone_asks_for(weight: float) -> None:
    configuration, settings = read_configuration(OLDER % weight, {})
    assert configuration.name == "areal", "a comment that names another's class starts nothing"
    run = configuration.run(settings)
    assert run.kl == (weight > 0)
    assert [role.layout.dp for role in run.roles.values()] == [4] * (weight > 0)


@pytest.mark.parametrize("spelled", ["archon:d4", "archon:d2p2"])
def test_an_engine_that_is_not_priced_is_refused(spelled: str) -> None:
    """It was read as FSDP, or refused for a pipeline that FSDP has not."""
    said = yaml.safe_dump(
        {
            "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
            "rollout": {"backend": "sglang:d4"},
            "gconfig": {"n_samples": 4, "max_new_tokens": 1024},
            "actor": {"backend": spelled, "path": "Qwen/Qwen3-8B", "mb_spec": {"max_tokens_per_mb": 10240}},
            "train_dataset": {"batch_size": 256, "path": "openai/gsm8k", "type": "rl"},
        }
    )
    configuration, settings = read_configuration(said, {}, "areal")
    with pytest.raises(RlhfsimError, match="how archon shards is not known") as refused:
        configuration.run(settings)
    assert refused.value.code == "engine-not-read"
    priced = settings.with_values({"actor.backend": "fsdp:d4"})
    assert configuration.run(priced).backend == "fsdp2"
