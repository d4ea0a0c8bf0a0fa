"""The rollout of a plan with stale samples, priced without a clock: its replicas, and bounds on its steps.

`run` simulates these replicas; a search asks for the bounds of plans that it need not simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rlhfsim.rollout.schedule import Requests, known_lengths
from rlhfsim.simulation.asynchronous.bounds import ReplicaFloor, floor_of
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine, engine_of
from rlhfsim.specs.placement.placement import Placement, Schedule
from rlhfsim.step.calls import CallSetting, bias_of, requests_of
from rlhfsim.step.timetable import Step, learner_steps, timetable

PLAIN = Schedule()


def rollout_engine(setting: CallSetting, kv_tokens: float | None, longest: float) -> ReplicaEngine:
    """One priced replica of the plan."""
    role, schedule = setting.placement.rollout, setting.placement.schedule
    assert role is not None
    requests = requests_of(setting)
    layout = replace(role.layout, memory_utilization=1.0) if kv_tokens else role.layout
    admitted = requests.sequences * (schedule.staleness + 1.0)
    device, model = setting.generator(role), setting.models.actor
    engine = engine_of(device, model, layout, requests, kv_tokens, longest, admitted)
    return engine.slower(bias_of(setting, "actor.generate"))


def lent_replicas(placement: Placement) -> int:
    """Replicas on the trainer's GPUs."""
    rollout = placement.lent.rollout if placement.schedule.lend else None
    return rollout.layout.dp if rollout else 0


# --- bounds -----------------------------------------------------------------------------------------


def continuous_bound(setting: CallSetting, kv_tokens: float | None) -> float:
    """Seconds per batch that a pool of replicas which never drains does not go below: W / R."""
    floor, replicas = floor_and_replicas(setting, kv_tokens)
    return floor.work / replicas


def least_seconds(setting: CallSetting, kv_tokens: float | None, steps: Sequence[Step]) -> float:
    """Seconds that no step with stale samples goes below: its trainer's calls, and its rollout's work.

    `steps`: its priced calls.
    Replicas on the trainer's GPUs work while its calls do not (`search.bound`).
    """
    calls, _ = timetable(learner_steps(steps), PLAIN)
    learned = max(call.end for call in calls)
    if not setting.placement.schedule.continuous:
        return learned
    floor, replicas = floor_and_replicas(setting, kv_tokens)
    return max(learned, (floor.work + lent_replicas(setting.placement) * learned) / replicas)


def floor_and_replicas(setting: CallSetting, kv_tokens: float | None) -> tuple[ReplicaFloor, int]:
    """The least that a batch costs a replica, and the number of replicas."""
    requests = requests_of(setting)
    engine = rollout_engine(setting, kv_tokens, float(known_lengths(requests, setting.drawn).max()))
    assert setting.placement.rollout is not None
    known = _known_floor(engine, requests, setting.drawn)
    return known, setting.placement.rollout.layout.dp + lent_replicas(setting.placement)


@lru_cache(maxsize=1024)
def _known_floor(engine: ReplicaEngine, requests: Requests, drawn: tuple[float, ...] | None) -> ReplicaFloor:
    return floor_of(engine, known_lengths(requests, drawn), requests.prompts)
