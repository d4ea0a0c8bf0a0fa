"""The order in which plans are called simple, and the words for what one asks more than another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search.complexity import asks_more, complexity
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)


def role(pool: str = "all", **layout: Any) -> RolePlacement:
    return RolePlacement(pool=pool, layout=Layout(**({"dp": 8, "zero": 3} | layout)))


SIMPLE = Placement(
    pools=(ResourcePool(name="all", gpus=8),),
    actor=role(),
    critic=role(),
    reference=role(),
    rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=2, dp=4)),
    weight_path="ipc",
)
APART = replace(
    SIMPLE,
    pools=(ResourcePool(name="train", gpus=4), ResourcePool(name="rollout", start=4, gpus=4)),
    **{name: role("train", dp=4) for name in ("actor", "critic", "reference")},  # type: ignore[arg-type]
    rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(tp=2, dp=2)),
    weight_path="broadcast",
)
PIPED = replace(SIMPLE, critic=role(pp=4, dp=2, zero=1))
CUT = replace(SIMPLE, critic=role(tp=2, dp=4, zero=2))
STAGES = replace(SIMPLE, critic=role(zero=1))
MOVED = replace(SIMPLE, reference=replace(role(), residency="offloaded"))
UNEVEN = replace(SIMPLE, rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=1, dp=3)))


def test_pools_count_most_then_pipelines_layouts_moves_and_uneven_degrees() -> None:
    streaming = replace(APART, schedule=Schedule(streaming=True))
    order = [SIMPLE, UNEVEN, MOVED, STAGES, CUT, PIPED, APART, streaming]
    assert sorted(order, key=complexity) == order
    assert len(set(map(complexity, order))) == len(order)


@pytest.mark.parametrize("moved", ["offload_optimizer", "offload_between", "residency"])
def test_whatever_waits_on_the_host_or_is_made_again_counts_as_a_move(moved: str) -> None:
    placed: dict[str, RolePlacement] = {
        "offload_optimizer": role(offload_optimizer="cpu"),
        "offload_between": replace(role(), offload_between=True),
        "residency": replace(role(), residency="recreated"),
    }
    assert complexity(replace(SIMPLE, actor=placed[moved])) == complexity(MOVED)


def test_a_role_that_only_scores_may_have_any_zero_stage_and_number_of_replicas() -> None:
    scoring = replace(SIMPLE, reference=role(dp=4, zero=0))
    assert complexity(scoring) == complexity(SIMPLE)


def test_what_a_plan_asks_more_is_said_and_only_that() -> None:
    assert list(asks_more(SIMPLE, PIPED)) == []
    assert list(asks_more(PIPED, SIMPLE)) == [
        "PP4 for the critic",
        "2 layouts in place of 1",
        "2 ZeRO stages in place of 1",
    ]
    assert list(asks_more(MOVED, SIMPLE)) == ["1 role partly on the host in place of none"]
    assert (
        next(asks_more(replace(APART, schedule=Schedule(streaming=True)), SIMPLE)) == "2 pools in place of 1"
    )
    assert list(asks_more(UNEVEN, SIMPLE)) == [
        "1 role with a degree that is no power of two in place of none"
    ]
