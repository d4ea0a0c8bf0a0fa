"""Every field of a plan that changes its price is written by an export, named unsaid, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from rlhfsim.frameworks.export import exporters, in_keys
from rlhfsim.frameworks.refusal import lacks_of
from rlhfsim.frameworks.runs import framework
from tests.frameworks.drawn import drawn_plans, estimated
from tests.frameworks.silent import silent

LEFT: Mapping[str, Collection[str]] = {
    "areal": {"reference.layout.sequence_parallel", "critic.residency"},
    "nemo-rl": {"actor.layout.etp", "critic.residency", "critic.offload_between"},
    "openrlhf": {"actor.layout.offload_params", "actor.residency", "reference.layout.offload_params"},
    "skyrl": {
        "actor.residency",
        "actor.layout.score_pack_tokens",
        "reference.residency",
        "reference.layout.offload_params",
        "reference.layout.score_pack_tokens",
        "reference.layout.sequence_parallel",
        "schedule.staleness",
    },
    "trl": {
        "actor.layout.etp",
        "reward.layout.zero",
        "reward.layout.micro_batch",
        "reward.layout.score_micro_batch",
    },
    "verl": {"actor.layout.etp", "reference.layout.etp", "reference.layout.offload_params"},
    "slime": {"rollout.layout.engine"},  # no choice: SGLang generates, priced as vLLM or as itself
}
"""Framework -> fields that its export does not yet name, or whose unsaid says no field."""


def gaps(name: str, count: int, seed: int) -> set[str]:
    found = {line.split(":")[0] for plan in drawn_plans(name, count, seed) for line in silent(plan, name)}
    return found - set(LEFT[name])


@pytest.mark.parametrize("name", exporters())
def test_no_field_that_changes_the_price_is_lost_in_silence(name: str) -> None:
    assert gaps(name, 4, seed=1) == set()


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("name", ["nemo-rl", "verl", "trl"])
def test_no_field_of_many_drawn_plans_is_lost_in_silence(name: str) -> None:
    assert gaps(name, 16, seed=2) == set()


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_bf16_gradients_on_fsdp2_are_refused_where_gradients_stay_fp32(name: str) -> None:
    plan = estimated()
    bf16 = replace(plan, workload=replace(plan.workload, gradients="bf16"))
    lacks = list(lacks_of(bf16, framework(name), frozenset()))
    assert [x.what for x in lacks] == ["BF16 gradients with PyTorch FSDP2"]
    assert not list(lacks_of(plan, framework(name), frozenset()))


def test_a_rollout_on_gpus_of_its_own_that_sleeps_is_named() -> None:
    apart = next(
        plan
        for plan in drawn_plans("verl", 40, 3)
        if plan.placement.rollout and plan.placement.rollout.pool != plan.placement.actor.pool
    )
    assert apart.placement.rollout is not None
    asleep = replace(
        apart, placement=replace(apart.placement, rollout=replace(apart.placement.rollout, sleep=2))
    )
    [named] = [u for u in in_keys(asleep, "verl").unsaid if "rollout.sleep" in u.of]
    assert named.instead == "it stays awake: the GPUs are its own"
    assert named.nearest is not None
    assert named.nearest.placement == apart.placement
