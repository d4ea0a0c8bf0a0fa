"""Copies of a checkpoint that is written beside the steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.memory.checkpoints import beside, copied_bytes
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Lora, Workload

PROFILE = load_profile("h100-sxm")
WORK = Workload(algorithm="grpo", model="qwen2.5-7b")
PARAMS = models_of(WORK).actor.num_params


def copies(zero: int, workload: Workload = WORK, **layout: str) -> float:
    actor = RolePlacement(pool="all", layout=Layout(dp=8, zero=zero, **layout))  # type: ignore[arg-type]
    placement = Placement(
        pools=(ResourcePool(name="all", start=0, gpus=8),),
        actor=actor,
        critic=actor if workload.has_critic else None,
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(dp=8), sleep=1),
        reference=RolePlacement(pool="all", layout=Layout(dp=8, zero=3)),
        weight_path="ipc",
    )
    return copied_bytes(models_of(workload), placement, workload, PROFILE, 8)


def test_each_rank_copies_what_it_holds_and_rank_0_the_weights() -> None:
    # ZeRO-3: 2 B of weights and 12 B of masters and moments once a node, 2 B for users
    assert copies(3) == pytest.approx(16 * PARAMS, rel=0.01)
    # ZeRO-1: weights on every rank
    assert copies(1) == pytest.approx((8 * 2 + 12 + 2) * PARAMS, rel=0.01)
    assert copies(0) == pytest.approx((8 * 14 + 2) * PARAMS, rel=0.01)


def test_states_on_the_host_are_copied_as_well_and_adapters_are_small() -> None:
    assert copies(3, offload_optimizer="cpu") >= copies(3)
    assert copies(3, replace(WORK, lora=Lora(rank=16))) < 0.3 * copies(3)


def test_a_critic_is_saved_as_well() -> None:
    assert copies(3, replace(WORK, algorithm="ppo", samples=1)) == pytest.approx(2 * copies(3), rel=0.05), (
        "without the head"
    )


def test_copies_are_made_in_half_of_what_is_free() -> None:
    assert beside(50.0, held=100.0, capacity=200.0)
    assert not beside(51.0, held=100.0, capacity=200.0)
    assert not beside(1.0, held=300.0, capacity=200.0)
