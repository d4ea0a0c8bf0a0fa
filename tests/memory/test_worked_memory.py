"""The memory figures of docs/worked_figures.md: the founding ones, and the ledger's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, Offload, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    Residency,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
)
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.units import GB, TB

SMALL = Workload(
    model="llama-2-7b",
    algorithm="ppo",
    prompts=64,
    prompt_len=Fixed(value=512),
    response_len=Fixed(value=512),
)
LARGE = Workload(model="70b", algorithm="ppo", prompts=256)


def _held(workload: Workload, placement: Placement, gpus: int) -> Ledger:
    cluster = Cluster(node_groups=(node_group("h100", gpus),))
    return ledger(models_of(workload), placement, workload, cluster)


def _one_gpu() -> Placement:
    role = RolePlacement(pool="all", layout=Layout(dp=1, zero=0))
    engine = RolloutLayout(memory_utilization=0.2, max_num_seqs=64, max_batched_tokens=2048)
    return Placement(
        pools=(ResourcePool(name="all", gpus=1),),
        actor=role,
        critic=role,
        reference=role,
        reward=role,
        rollout=RolloutPlacement(pool="all", layout=engine, sleep=1),
        weight_path="none",
    )


def _node(residency: Residency, adam: Offload, *, sleep: int) -> Placement:
    away = residency == "offloaded"
    trained = RolePlacement(
        pool="all",
        layout=Layout(dp=8, zero=3, offload_optimizer=adam),
        residency=residency,
        offload_between=away,
    )
    frozen = RolePlacement(pool="all", layout=Layout(dp=8, zero=3), residency=residency)
    engine = RolloutLayout(tp=8, memory_utilization=0.6, max_num_seqs=256)
    return Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=trained,
        critic=trained,
        reference=frozen,
        reward=frozen,
        weight_path="ipc",
        rollout=RolloutPlacement(pool="all", layout=engine, sleep=sleep),
    )


def _four_nodes(offload_between: bool) -> Placement:
    role = RolePlacement(pool="train", layout=Layout(dp=24, zero=3))
    trained = replace(role, offload_between=offload_between)
    return Placement(
        pools=(ResourcePool(name="train", gpus=24), ResourcePool(name="rollout", start=24, gpus=8)),
        actor=trained,
        critic=trained,
        reference=role,
        reward=role,
        weight_path="broadcast",
        rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(tp=8), sleep=0),
    )


def _peak(found: Ledger, pool: str) -> float:
    return max(p.bytes for p in found.phases if p.pool == pool)


def _rows(found: Ledger, phase: str) -> dict[tuple[str, str], float]:
    entries = next(p for p in found.phases if p.name == phase).entries
    return {(e.role, e.component): e.bytes / GB for e in entries}


def test_seventy_b_in_bf16_is_141_gb_a_model_and_564_gb_for_four():
    weights = 2 * resolve_model("70b").num_params
    assert weights / GB == pytest.approx(140, rel=0.01)
    assert 4 * weights / GB == pytest.approx(560, rel=0.01)


def test_training_states_of_a_70b_actor_and_critic_are_2_2_to_2_5_tb():
    params = 2 * resolve_model("70b").num_params
    assert 16 * params / TB == pytest.approx(2.26, abs=0.01)
    assert 18 * params / TB == pytest.approx(2.54, abs=0.01)


def test_seven_b_ppo_on_one_gpu_needs_258_gb_not_92():
    found = _held(SMALL, _one_gpu(), 1)
    rows = _rows(found, "actor.train")
    assert found.peak.name == "actor.train"
    assert rows["actor", "weights"] == pytest.approx(13.5, abs=0.1)
    assert rows["actor", "gradients"] == pytest.approx(13.5, abs=0.1)
    assert rows["actor", "optimizer"] == pytest.approx(80.9, abs=0.1)
    assert rows["critic", "optimizer"] == pytest.approx(79.3, abs=0.1)
    assert rows["reference", "weights"] + rows["reward", "weights"] == pytest.approx(26.7, abs=0.1)
    assert found.peak.bytes / GB == pytest.approx(258, abs=3)
    assert not found.fits


def test_lora_grpo_variant_fits_in_less_than_the_founding_30_gb():
    workload = replace(
        SMALL,
        algorithm="grpo",
        prompts=16,
        samples=4,
        reward=Reward(model="tinyllama-1.1b"),
        lora=Lora(rank=32),
        optimizer="adam8bit",
    )
    placement = replace(_one_gpu(), critic=None, backend="fsdp2")
    found = _held(workload, placement, 1)
    rows = _rows(found, "actor.train")
    assert ("reference", "weights") not in rows
    assert rows["actor", "weights"] == pytest.approx(13.8, abs=0.1)
    assert rows["actor", "optimizer"] < 0.25
    assert rows["reward", "weights"] == pytest.approx(2.1, abs=0.1)
    assert found.fits
    assert found.peak.bytes / GB == pytest.approx(22, abs=2)


def test_seventy_b_all_resident_on_eight_gpus_needs_five_times_the_memory():
    found = _held(LARGE, _node("resident", "none", sleep=0), 8)
    assert found.peak.bytes / GB == pytest.approx(382, abs=5)
    assert not found.fits


def test_seventy_b_on_eight_gpus_needs_159_gb_even_when_one_role_at_a_time_is_in_memory():
    found = _held(LARGE, _node("offloaded", "none", sleep=2), 8)
    assert found.peak.bytes / GB == pytest.approx(159, abs=1)
    assert "optimizer" in found.rejected_by


def test_seventy_b_on_eight_gpus_fits_the_gpus_with_adam_on_the_host_but_not_the_host():
    found = _held(LARGE, _node("offloaded", "cpu", sleep=2), 8)
    assert found.peak.bytes < found.peak.capacity
    assert "host memory" in found.rejected_by
    assert found.host_peak_bytes / TB == pytest.approx(2.97, abs=0.05)


def test_seventy_b_on_32_gpus_fits_when_one_optimizer_at_a_time_is_in_memory():
    assert not _held(LARGE, _four_nodes(offload_between=False), 32).fits
    found = _held(LARGE, _four_nodes(offload_between=True), 32)
    assert found.fits
    assert _peak(found, "train") / GB == pytest.approx(81, abs=2)
    assert _peak(found, "rollout") / GB == pytest.approx(80.5, abs=2)


def test_the_guideline_of_16_gpus_for_a_70b_actor_and_critic_needs_offload():
    trained = RolePlacement(pool="all", layout=Layout(tp=8, pp=2, dp=1, zero=1))
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=16),),
        actor=trained,
        critic=trained,
        backend="megatron",
        rollout=None,
        weight_path="none",
    )
    workload = replace(LARGE, reference="none", kl=False, reward=Reward(rules=Rules()))
    found = _held(workload, placement, 16)
    states = sum(
        size
        for (_, what), size in _rows(found, "actor.train").items()
        if what in ("weights", "gradients", "optimizer")
    )
    assert states == pytest.approx(2 * 18 * 70.6 / 16, rel=0.02)  # 159 GB a GPU
    assert not found.fits
