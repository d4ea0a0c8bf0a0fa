"""Every field of a plan that changes its price is written by an export, named unsaid, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.interchange.export import AS_READ, exporters, in_keys
from rlhfsim.interchange.refusal import lacks_of
from rlhfsim.specs.frameworks.runs import framework
from tests.frameworks.drawn import drawn_plans, estimated
from tests.frameworks.silent import silent

LEFT: Mapping[str, Collection[str]] = {
    "slime": {"rollout.layout.engine"}  # no choice: SGLang generates, priced as vLLM or as itself
}
"""Framework -> fields that its export does not yet name, or whose unsaid says no field."""


def gaps(name: str, count: int, seed: int) -> set[str]:
    found = {line.split(":")[0] for plan in drawn_plans(name, count, seed) for line in silent(plan, name)}
    return found - set(LEFT.get(name, ()))


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


def test_what_no_row_names_is_named_by_reading_the_keys_again() -> None:
    left = next(
        plan
        for plan in drawn_plans("openrlhf", 40, 1)
        if plan.placement.actor.residency == "offloaded"
        and not plan.workload.has_critic
        and any(u.instead.endswith(AS_READ) for u in in_keys(plan, "openrlhf").unsaid)
    )
    [named] = [u for u in in_keys(left, "openrlhf").unsaid if u.instead.endswith(AS_READ)]
    assert named.what == "residency offloaded of the actor"
    assert named.instead == "residency resident, as its keys are read"
    assert named.of == ("actor.residency",)
    assert named.nearest is not None
    assert named.nearest.placement.actor.residency == "resident"


def test_a_schedule_that_the_entry_point_says_is_not_named() -> None:
    plan = estimate_file("scenarios/recipes/skyrl-async-1.5b.yaml")
    assert plan.placement.schedule.one_step_off
    assert not [u for u in in_keys(plan, "skyrl").unsaid if "schedule" in u.of]


def test_a_reward_model_that_no_key_says_has_its_cost() -> None:
    scored = next(plan for plan in drawn_plans("nemo-rl", 40, 1) if plan.placement.role("reward") is not None)
    [named] = [u for u in in_keys(scored, "nemo-rl").unsaid if u.what == "a reward model"]
    assert named.nearest is not None
    assert not named.nearest.workload.has_reward_model
    assert named.nearest.placement.role("reward") is None
