"""What lending the trainer's GPUs to the rollout would save, where a plan waits long for its samples.

The search never chooses it, since no closed form knows it: one simulation says when it is worth a try.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import LENDS
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.simulation.asynchronous.run import WAIT, simulate
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.scenario import check_placement
from rlhfsim.what_if.estimate import priced_placement

WORTH = 0.1
"""Least share of the step that is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LentTrainer:
    """A plan with `schedule.lend`."""

    step_s: float
    saved: float
    """Share of the step."""


def lent_trainer(plan: Plan, request: Request) -> LentTrainer | None:
    """The plan with its trainer's GPUs lent; None where it cannot be, or saves less than a tenth."""
    step_s, work = plan.prediction.step_s, plan.workload
    waiting_s = sum(phase.seconds for phase in plan.prediction.phases if phase.name == WAIT)
    runs = request.runs is None or LENDS in request.runs.features
    if plan.placement.schedule.lend or not runs or waiting_s < WORTH * step_s:
        return None
    placement = replace(plan.placement, schedule=replace(plan.placement.schedule, lend=True))
    try:
        check_placement(placement, work, models_of(work), request.cluster)
    except RlhfsimError:
        return None
    priced = priced_placement(placement, work, request.cluster)
    if priced.memory.rejected_by is not None:
        return None
    found_s = simulate(priced.setting, priced.kv_tokens).seconds
    saved = 1 - found_s / step_s
    return LentTrainer(step_s=found_s, saved=saved) if saved >= WORTH else None
