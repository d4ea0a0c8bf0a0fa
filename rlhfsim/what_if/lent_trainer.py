"""What lending the trainer's GPUs to the rollout would save, where a plan waits long for its samples.

One simulation of the same layouts says when it is worth a search of its own (`--allow lend`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, judged
from rlhfsim.search.request import Request
from rlhfsim.simulation.asynchronous.run import WAIT
from rlhfsim.specs.frameworks.runs import LENDS
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import check_placement

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
    step_s = plan.prediction.step_s
    request = replace(request, workload=plan.workload)
    waiting_s = sum(phase.seconds for phase in plan.prediction.phases if phase.name == WAIT)
    if (found := lent(plan.placement, waiting_s, step_s, request)) is None:
        return None
    return LentTrainer(step_s=found.seconds, saved=1 - found.seconds / step_s)


def lent(placement: Placement, waiting_s: float, step_s: float, request: Request) -> Candidate | None:
    """A plan with its trainer's GPUs lent; None where that cannot be, or saves too little.

    `waiting_s`: seconds of its step in which the trainer waits for samples.
    """
    models = models_of(request.workload)
    runs = request.runs is None or LENDS in request.runs.features
    searched = "lend" in request.allow | request.forbid
    if placement.schedule.lend or not runs or searched or waiting_s < WORTH * step_s:
        return None
    placement = replace(placement, schedule=replace(placement.schedule, lend=True))
    try:
        check_placement(placement, request.workload, models, request.cluster)
    except RlhfsimError:
        return None
    found = judged(request, models, placement)
    return found if found and found.seconds <= (1 - WORTH) * step_s else None
