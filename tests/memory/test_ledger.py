"""The memory ledger: architectures, residency, the return to the start, and the fast path."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.components import ENGINE, ROLE, engine_components, role_components, stage_rows
from rlhfsim.memory.ledger import ledger
from rlhfsim.memory.residency import engine_in_plan, role_in_plan
from rlhfsim.memory.risk import Item, probability_above
from rlhfsim.memory.role_bytes import role_memory, software_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.software import default_software
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.step.calls import CallSetting, train_cost
from rlhfsim.step.measured import memory_doubt
from rlhfsim.step.prediction import _entries
from rlhfsim.units import GIB

CLUSTER = Cluster(node_groups=(node_group("h100", 16),))
PPO = Workload(model="8b", algorithm="ppo", prompts=256)
GRPO = Workload(model="8b", algorithm="grpo", prompts=64, samples=8, reward=Reward(rules=Rules()))
ZERO3 = Layout(dp=8, zero=3, micro_batch=4)


def _colocated(sleep: int = 2, **options: object) -> Placement:
    role = RolePlacement(pool="all", layout=ZERO3, **options)
    rollout = RolloutPlacement(pool="all", layout=RolloutLayout(dp=8, memory_utilization=0.4), sleep=sleep)
    return Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        critic=role,
        rollout=rollout,
        reference=RolePlacement(pool="all", layout=ZERO3, residency=options.get("residency", "resident")),
        reward=RolePlacement(pool="all", layout=ZERO3),
        weight_path="broadcast",
    )


def _apart(**schedule: float) -> Placement:
    train = RolePlacement(pool="train", layout=ZERO3)
    return Placement(
        pools=(ResourcePool(name="train", gpus=8), ResourcePool(name="rollout", start=8, gpus=8)),
        actor=train,
        critic=train,
        reference=train,
        reward=train,
        weight_path="broadcast",
        rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(dp=8), sleep=0),
        schedule=Schedule(**schedule),
    )


ARCHITECTURES = {
    "naive": _colocated(sleep=0),
    "smart": _colocated(offload_between=True),
    "hybrid": replace(_colocated(offload_between=True), weight_path="ipc"),
    "disaggregated": _apart(),
    "async": _apart(staleness=1),
}


def _ledger(placement: Placement, workload: Workload = PPO, **options):
    return ledger(models_of(workload), placement, workload, CLUSTER, **options)


def _entry(held, phase, component):
    return [e for p in held.phases if p.name == phase for e in p.entries if e.component == component]


def _bytes(found, phase: str, pool: str = "all") -> float:
    return next(p.bytes for p in found.phases if p.name == phase and p.pool == pool)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_ledger_with_a_named_peak(name):
    placement = ARCHITECTURES[name]
    assert placement.architecture == name
    found = _ledger(placement)
    assert {p.pool for p in found.phases} == {p.name for p in placement.pools}
    assert found.peak.bytes == max(p.bytes for p in found.phases)
    assert found.peak_entry in found.peak.entries
    assert found.kv_tokens > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_ledger_returns_to_its_start(name):
    found = _ledger(ARCHITECTURES[name])
    for pool in ARCHITECTURES[name].pools:
        ends = [p for p in found.phases if p.pool == pool.name]
        assert ends[0].name == "start"
        assert ends[-1].name == "end"
        assert ends[0].entries == ends[-1].entries


def test_freeing_memory_between_phases_lowers_the_peak_of_the_naive_architecture():
    assert _ledger(ARCHITECTURES["smart"]).peak.bytes < _ledger(ARCHITECTURES["naive"]).peak.bytes


def test_a_sleeping_engine_leaves_training_only_its_context():
    naive, smart = (_ledger(ARCHITECTURES[n]) for n in ("naive", "smart"))
    engine = [e for e in smart.phases[-5].entries if e.role == "rollout"]
    components = {
        e.component for p in smart.phases if p.name == "actor.train" for e in p.entries if e.role == "rollout"
    }
    assert "kv_cache" not in components
    assert "weights" not in components
    assert _bytes(naive, "actor.train") > _bytes(smart, "actor.train") + 20 * GIB
    assert engine


def test_weights_of_trainer_and_engine_stand_side_by_side_in_the_sync():
    found = _ledger(ARCHITECTURES["hybrid"])
    sync = next(p for p in found.phases if p.name == "actor.sync")
    sizes = {(e.role, e.component): e.bytes for e in sync.entries}
    assert sizes["actor", "weights"] > 0
    assert sizes["rollout", "weights"] > 14 * GIB
    assert sizes["actor", "sync_buffers"] >= load_profile("h100")["sync_bucket_bytes"]
    assert ("rollout", "kv_cache") not in sizes


def test_training_states_of_eight_b_on_eight_gpus_are_sixteen_bytes_a_parameter():
    found = _ledger(ARCHITECTURES["naive"])
    train = next(p for p in found.phases if p.name == "actor.train")
    states = sum(
        e.bytes
        for e in train.entries
        if e.role == "actor" and e.component in ("weights", "gradients", "optimizer")
    )
    assert states == pytest.approx(16 * 8.03e9 / 8, rel=0.01)


def test_an_offloaded_role_keeps_no_states_on_the_gpu_but_on_the_host():
    resident, away = _ledger(_colocated()), _ledger(_colocated(residency="offloaded"))
    assert _bytes(away, "start") < _bytes(resident, "start")
    assert away.host_peak_bytes > resident.host_peak_bytes + 8 * 14e9 / 8 * 2


def test_sleep_level_one_keeps_the_weights_on_the_host():
    one, two = _ledger(_colocated(sleep=1)), _ledger(_colocated(sleep=2))
    assert one.host_peak_bytes - two.host_peak_bytes == pytest.approx(8 * 16.06e9, rel=0.01)


def test_a_recreated_role_leaves_nothing_behind():
    found = _ledger(_colocated(residency="recreated"))
    start = next(p for p in found.phases if p.name == "start")
    assert not any(e.role in ("actor", "critic") for e in start.entries)


def test_longer_responses_never_need_less_memory():
    peaks = [
        _ledger(_colocated(), replace(PPO, response_len=Fixed(value=n))).peak.bytes for n in (512, 2048, 8192)
    ]
    assert peaks == sorted(peaks)


def test_packed_micro_batches_are_sized_for_their_expected_tokens():
    law = LogNormal(mean=500, sigma=0.5, max=8192)
    packed = batch_lengths(replace(GRPO, response_len=law))
    padded = batch_lengths(replace(GRPO, response_len=law, packing=False))
    one, many = Layout(), Layout(micro_batch=16)
    assert packed.tokens(one) == padded.tokens(one) == 1024 + 8192
    assert packed.tokens(many) < padded.tokens(many) == 16 * (1024 + 8192)


def test_lora_shares_the_base_with_the_reference():
    workload = replace(GRPO, lora=Lora(rank=32))
    role = RolePlacement(pool="all", layout=ZERO3)
    placement = replace(_colocated(), critic=None, reward=None, reference=role, backend="fsdp2")
    found = _ledger(placement, workload)
    assert not any(
        e.role == "reference" and e.component == "weights" for p in found.phases for e in p.entries
    )
    full = _ledger(placement, GRPO)
    assert _bytes(found, "actor.train") < _bytes(full, "actor.train") - 10e9


def test_a_reference_without_adapters_finds_its_base_though_the_actor_was_offloaded():
    workload = replace(GRPO, lora=Lora(rank=32))
    role = RolePlacement(pool="all", layout=ZERO3, residency="offloaded")
    placement = replace(_colocated(), actor=role, critic=None, reward=None, backend="fsdp2")
    found = _ledger(placement, workload)
    scoring = next(p for p in found.phases if p.name == "reference.logprob")
    weights = sum(e.bytes for e in scoring.entries if e.component == "weights" and e.role != "rollout")
    assert weights > 2 * models_of(workload).actor.num_params / 8


def test_logits_of_a_plan_are_those_that_its_framework_holds():
    placement = replace(_colocated(), critic=None, reward=None, backend="fsdp2")

    def train(framework: str | None) -> float:
        cluster = replace(CLUSTER, framework=framework)
        return _bytes(ledger(models_of(GRPO), placement, GRPO, cluster), "actor.train")

    logits = 4 * 2048 * models_of(GRPO).actor.vocab
    assert train("rlhfsim") == train(None) <= train("verl")
    assert 6 * logits < train("nemo-rl") - train("verl") < 1.1 * 12 * logits


def test_host_memory_is_that_of_the_fullest_pipeline_stage():
    layout = Layout(tp=1, pp=16, dp=4, ep=4, zero=1)
    role = RolePlacement(pool="all", layout=layout, residency="offloaded")
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=64),), actor=role, critic=role, backend="megatron"
    )
    workload = replace(PPO, model="deepseek-v3", kl=False, reward=Reward(rules=Rules()))
    cluster = Cluster(node_groups=(node_group("h100", 64),))
    found = ledger(models_of(workload), placement, workload, cluster)
    trained = 2 * models_of(workload).actor.num_params
    # BF16 weights, FP32 master and moments of both lie on 8 nodes; the first stages are light
    assert found.host_peak_bytes > 14 * trained / 8


def test_a_pipeline_ledger_takes_the_fuller_end():
    layout = Layout(tp=2, pp=4, zero=1, micro_batch=1, recompute="none")
    role = RolePlacement(pool="all", layout=layout)
    placement = replace(
        _colocated(), actor=role, critic=None, reward=None, reference=None, backend="megatron"
    )
    workload = replace(GRPO, kl=False)
    found = _ledger(placement, workload)
    stages = [
        role_in_plan(models_of(workload), placement, workload, load_profile("h100"), "actor", stage).training
        for stage in ("first", "last")
    ]
    train = next(p for p in found.phases if p.name == "actor.train")
    mine = sum(e.bytes for e in train.entries if e.role == "actor" and e.component != "sync_buffers")
    nccl = load_profile("h100")["nccl_bytes"]  # of the weight-sync group
    assert mine == pytest.approx(max(stages) + nccl)


def test_an_engine_that_cannot_start_is_rejected_with_probability_one():
    rollout = RolloutPlacement(pool="all", layout=RolloutLayout(dp=8, memory_utilization=0.2))
    found = _ledger(replace(_colocated(), rollout=rollout))
    assert not found.fits
    assert "KV cache" in found.rejected_by
    assert found.probability_out_of_memory > 0.9


def test_seventy_b_on_eight_gpus_is_rejected_with_its_phase_and_component():
    found = _ledger(_colocated(), replace(PPO, model="70b"))
    assert "actor.generate needs" in found.rejected_by
    assert "rollout weights" in found.rejected_by
    assert found.probability_out_of_memory > 0.99


def test_fast_path_agrees_with_the_ledger():
    profile, models = load_profile("h100"), models_of(PPO)
    placement = ARCHITECTURES["naive"]
    found = _ledger(placement)
    names = ("actor", "critic", "reference", "reward")
    parts = {r: role_in_plan(models, placement, PPO, profile, r) for r in names}
    rows = {r: np.array([part], dtype=ROLE) for r, part in parts.items()}
    engine = np.array([engine_in_plan(models, placement, PPO, profile)], dtype=ENGINE)

    def held(role, state):
        components = engine_components if role is engine else role_components
        return sum(components(role, state).values())[0]

    group = 2 * profile["nccl_bytes"]  # the weight-sync group, on both sides
    idle = sum(held(r, "idle") for r in (*rows.values(), engine)) + group
    actor, reward = rows["actor"], rows["reward"]
    assert held(actor, "train") == pytest.approx(parts["actor"].training)
    assert _bytes(found, "start") == pytest.approx(idle)
    assert _bytes(found, "actor.train") == pytest.approx(idle - held(actor, "idle") + held(actor, "train"))
    assert _bytes(found, "reward.score") == pytest.approx(
        idle - held(reward, "idle") + held(reward, "forward")
    )
    assert _bytes(found, "actor.generate") == pytest.approx(
        idle - held(engine, "idle") + held(engine, "running")
    )


def test_a_framework_with_small_gradients_needs_less():
    lean = replace(default_software("deepspeed"), gradient_bytes=1.0)
    small = _ledger(replace(_colocated(), software=lean))
    assert _bytes(small, "actor.train") < _bytes(_ledger(_colocated()), "actor.train")


def test_a_framework_that_frees_gradients_has_room_while_roles_score():
    frees = replace(default_software("deepspeed"), frees_gradients=True)
    kept, freed = _ledger(_colocated()), _ledger(replace(_colocated(), software=frees))
    assert _bytes(freed, "reference.logprob") < _bytes(kept, "reference.logprob")
    trained = [e.bytes for e in _entry(freed, "actor.train", "gradients")]
    assert trained == [e.bytes for e in _entry(kept, "actor.train", "gradients") if e.role == "actor"]


def test_nemo_rl_frees_the_gradient_buffers_of_megatron():
    assert software_of(None, "nemo-rl", "megatron").frees_gradients
    assert not software_of(None, "verl", "megatron").frees_gradients


def test_a_plan_has_one_record_per_entry():
    found = _ledger(ARCHITECTURES["hybrid"])
    records = _entries(found)
    assert len(records) == sum(len(p.entries) for p in found.phases)
    assert set(asdict(records[0])) == {
        "phase",
        "pool",
        "role",
        "component",
        "bytes",
        "low_bytes",
        "high_bytes",
    }


def test_probability_of_a_certain_sum_is_zero_or_one():
    items = [Item(value=4.0, low=4.0, high=4.0)] * 2
    assert probability_above(items, 9.0) == 0.0
    assert probability_above(items, 7.0) == 1.0


def test_probability_at_the_ninetieth_percentile_is_a_tenth():
    assert probability_above([Item(value=2.0, low=1.0, high=4.0)], 4.0) == pytest.approx(0.1)


def test_a_spread_that_no_item_knows_of_leaves_an_even_chance_and_takes_certainty_from_exact_sums():
    exact = [Item(value=5.0, low=5.0, high=5.0)]
    unsure = [Item(value=2.0, low=1.0, high=4.0)]
    assert probability_above(exact, 5.0 * math.exp(0.3), spread=0.3) == pytest.approx(0.1587, abs=1e-4)
    assert probability_above(unsure, 2.0, spread=0.3) == pytest.approx(0.5)
    assert 0.1 < probability_above(unsure, 4.0, spread=0.3) < 0.5


def test_probability_falls_with_the_limit():
    items = [Item(value=2.0, low=1.5, high=3.0), Item(value=5.0, low=4.0, high=6.0)]
    chances = [probability_above(items, limit) for limit in (5.0, 7.0, 9.0, 12.0)]
    assert chances == sorted(chances, reverse=True)


def test_gradients_in_bf16_take_two_bytes_less_and_half_the_wire():
    layout = Layout(tp=4, dp=4, zero=1, micro_batch=1)
    role = RolePlacement(pool="all", layout=layout)
    pools = (ResourcePool(name="all", gpus=16),)
    placement = Placement(pools=pools, actor=role, reference=role, backend="megatron")
    workload = replace(GRPO, algorithm="dpo")
    less = replace(workload, gradients="bf16")
    usual, found = (_bytes(_ledger(placement, w), "actor.train") for w in (workload, less))
    assert usual - found == pytest.approx(2 * models_of(GRPO).actor.num_params / 4, rel=0.01)
    seconds = [
        train_cost(
            CallSetting(models=models_of(w), placement=placement, workload=w, cluster=CLUSTER), "actor", role
        ).seconds
        for w in (workload, less)
    ]
    assert seconds[1] < seconds[0]


def _doubt(model: str, gpus: int, length: float, profile: str = "h100") -> float:
    work = Workload(algorithm="kto", model=model, prompt_len=Fixed(value=length), response_len=Fixed(value=1))
    cluster = Cluster(node_groups=(node_group(profile, gpus),))
    return memory_doubt(models_of(work), "fsdp2", work, cluster)


def test_bytes_are_less_sure_far_from_measured_peaks():
    assert _doubt("8b", 8, 4096) == 1
    far = _doubt("kimi-k2", 8192, 1_000_000, "mi300x")
    assert far > 1
    assert _doubt("kimi-k2", 65536, 8_000_000, "mi300x") > max(1.05, far)


def test_a_doubtful_plan_that_fits_is_likelier_to_run_out():
    work, placement = PPO, _colocated()
    sure, unsure = (ledger(models_of(work), placement, work, CLUSTER, doubt=d) for d in (1.0, 3.0))
    assert sure.peak.bytes == unsure.peak.bytes
    assert 0 < sure.probability_out_of_memory < 0.5
    assert sure.probability_out_of_memory < unsure.probability_out_of_memory


def _swapped(**changes: object) -> Placement:
    """A GRPO plan of one pool, TP2 x DP4 of Megatron, with a reference in place of the actor."""
    actor = RolePlacement(pool="all", layout=Layout(tp=2, dp=4), offload_between=True)
    given: dict[str, object] = {
        "pools": (ResourcePool(name="all", gpus=8),),
        "actor": actor,
        "reference": RolePlacement(pool="all", layout=Layout(tp=2, dp=4, zero=0), residency="swapped"),
        "rollout": RolloutPlacement(pool="all", layout=RolloutLayout(dp=8, memory_utilization=0.4)),
        "weight_path": "ipc",
        "backend": "megatron",
    }
    return Placement(**(given | changes))


def test_a_swapped_reference_holds_two_shards_on_the_host_and_no_weights_on_a_gpu():
    plan, model = _swapped(), models_of(GRPO).actor
    found, without = _ledger(plan, GRPO), _ledger(replace(plan, reference=None), replace(GRPO, kl=False))
    entries = [e for p in found.phases for e in p.entries if e.role == "reference"]
    assert entries
    assert {e.component for e in entries} <= {"activations", "logits", "fragmentation", "gathered"}
    shard = model.num_params / 2 * 2  # BF16 over tp 2, the same on every dp rank
    assert found.host_bytes["all"] - without.host_bytes["all"] == pytest.approx(8 * 2 * shard, rel=1e-3)
    resident = _ledger(replace(plan, reference=replace(plan.role("reference"), residency="resident")), GRPO)
    saved = _bytes(resident, "reference.logprob") - _bytes(found, "reference.logprob")
    assert saved > 0.99 * shard  # and its communicators


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"reference": {"layout": Layout(tp=4, dp=2)}}, "swapped-layout-differs"),
        ({"actor": {"residency": "offloaded"}}, "swapped-without-actor"),
        ({"actor": {"residency": "swapped"}}, "only-references-are-swapped"),
        ({"rollout": {"residency": "swapped"}}, "only-references-are-swapped"),
    ],
)
def test_only_a_reference_is_swapped_and_only_where_the_actor_lies(changes, code):
    plan = _swapped()
    with pytest.raises(RlhfsimError) as refused:
        replace(plan, **{role: replace(plan.roles[role], **fields) for role, fields in changes.items()})
    assert refused.value.code == code


@pytest.mark.parametrize("backend", ["deepspeed", "megatron", "fsdp2"])
@pytest.mark.parametrize("swapped", [False, True])
def test_many_layouts_at_once_hold_what_each_alone_holds(backend: Any, *, swapped: bool) -> None:
    work = replace(GRPO, model="qwen3-30b-a3b", response_len=LogNormal(mean=800, sigma=0.6, max=4096))
    role = "reference" if swapped else "actor"
    profile = CLUSTER.node_group.profile
    memory = role_memory(models_of(work), role, work, backend=backend, profile=profile)
    shapes = [{"dp": 16}, {"dp": 4, "pp": 4}, {"dp": 4, "tp": 2, "pp": 2}, {"dp": 8, "cp": 2, "zero": 3}]
    shapes += [{"dp": 4, "tp": 4, "ep": 8}, {"dp": 2, "pp": 8, "vp": 2, "recompute": "full"}]
    sizes = [{"micro_batch": 1}, {"micro_batch": 4}, {"pack_tokens": 8192}, {"pack_tokens": 9000}]
    layouts = [Layout(**shape, **size) for shape in shapes for size in sizes]  # of 16 GPUs
    residency = "swapped" if swapped else "resident"
    rows = stage_rows(memory, columns_of(layouts), swapped=swapped)
    for layout, both in zip(layouts, rows, strict=True):
        for stage, row in zip(("first", "last"), both, strict=True):
            alone = memory.of(RolePlacement(pool="all", layout=layout, residency=residency), stage)
            for name in ("states", "score", "train", "framework", "nccl"):
                assert row[name].item() == getattr(alone, name), (layout, name)
