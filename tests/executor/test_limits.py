"""Limits of waits follow from the plan's prediction; settings win."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs

from executor.limits import TimeLimits
from executor.settings import Limits
from executor.tasks import tiny
from rlhfsim.plan import Plan
from rlhfsim.units import BILLION, HOUR


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return runs.plan("hybrid", "grpo", tiny.config(tmp_path_factory.mktemp("model")))


def slow(plan: Plan, **p90: float) -> Plan:
    """With other seconds for some phases, by name with `_` for `.`."""
    phases = tuple(
        replace(p, high_s=p90.get(p.name.replace(".", "_"), p.high_s)) for p in plan.prediction.phases
    )
    return replace(plan, prediction=replace(plan.prediction, phases=phases))


def test_a_call_may_take_five_times_its_predicted_p90_within_two_minutes_and_four_hours(plan: Plan) -> None:
    limits = TimeLimits(slow(plan, actor_train=518.0, actor_generate=9e9), Limits())
    assert limits.call("actor.train") == 5 * 518.0
    assert limits.call("actor.sync") == 120.0, "a tiny run keeps the floor"
    assert limits.call("actor.generate") == limits.longest_call == 4 * HOUR
    assert limits.call("actor.unheard.of") == limits.longest_call


def test_a_start_and_a_checkpoint_take_as_long_as_their_bytes(plan: Plan) -> None:
    large = replace(plan, models=tuple(replace(m, params=70 * BILLION) for m in plan.models))
    small, big = TimeLimits(plan, Limits()), TimeLimits(large, Limits())
    assert 600 <= small.start < 601
    assert 600 <= small.checkpoint < 601
    read = 2 * 70e9 * len(plan.models) / 200e6
    assert big.start == pytest.approx(600 + read)
    assert big.checkpoint == pytest.approx(600 + 16 * 70e9 / 200e6)


def test_a_sync_waits_for_the_responses_that_its_engine_ends_first(plan: Plan) -> None:
    """One step off policy, the next batch generates when the trainer has new weights."""
    long = slow(plan, actor_generate=600.0, actor_sync=1.0)

    def sync_s(**schedule: object) -> float:
        placement = replace(long.placement, schedule=replace(long.placement.schedule, **schedule))
        return TimeLimits(replace(long, placement=placement), Limits()).sync

    assert sync_s(staleness=1) == 5 * 600.0 + 120.0
    assert sync_s() == sync_s(staleness=4, partial_rollout=True) == 120.0
    assert sync_s(staleness=1, overlapped_sync=True) == 120.0


def test_a_collective_ends_after_the_call_that_waits_for_it(plan: Plan) -> None:
    limits = TimeLimits(slow(plan, actor_train=518.0), Limits())
    assert limits.collective > max(limits.start, limits.longest_call, limits.checkpoint, limits.sync)


def test_settings_win(plan: Plan) -> None:
    limits = TimeLimits(slow(plan, actor_train=518.0), Limits(start_s=1, call_s=2, sync_s=3, collective_s=4))
    assert (limits.start, limits.call("actor.train"), limits.longest_call) == (1, 2, 2)
    assert (limits.sync, limits.collective) == (3, 4)
