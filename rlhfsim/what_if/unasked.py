"""What a plan would save by what nobody asked for: only changes of its weights sent, its trainer lent.

The search takes neither unless it is named, since what decides is not known before a run. Here one formula a
path, or one simulation of the same layouts (`--allow lend`), says when naming it is worth a try.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, judged
from rlhfsim.search.request import Request
from rlhfsim.simulation.asynchronous.run import WAIT
from rlhfsim.specs.frameworks.runs import LENDS
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.specs.scenario import check_placement
from rlhfsim.step.calls import CallSetting, planned_sync
from rlhfsim.step.timetable import SYNC

WORTH = 0.1
"""Least share of the step that is saved."""


@frozen
class SentChanges:
    """A weight path of changes, compared with the plan's own."""

    path: WeightPath
    seconds: float
    """Seconds of the sync along it."""
    planned_s: float
    """Seconds of the plan's own sync."""
    saved: float
    """Share of the step."""


def sent_changes(plan: Plan, request: Request) -> SentChanges | None:
    """The fastest path of changes that the framework runs; None where it saves less than a tenth."""
    placement, runs = plan.placement, request.runs
    rules = WEIGHT_PATHS[placement.weight_path]
    planned = sum(phase.seconds for phase in plan.prediction.phases if phase.name == SYNC)
    step = plan.prediction.step_s
    if placement.rollout is None or rules.pools == "one" or rules.changes_only or planned < WORTH * step:
        return None
    if plan.workload.lora is not None:
        return None
    setting = CallSetting(
        models=models_of(plan.workload), placement=placement, workload=plan.workload, cluster=request.cluster
    )
    usable: dict[WeightPath, float] = {}
    for path, rules in WEIGHT_PATHS.items():
        run = runs is None or not runs.lacks_path(path, plan.topology)
        if rules.changes_only and run and path not in request.left_out:
            cost = planned_sync(replace(setting, placement=replace(placement, weight_path=path)))
            usable |= {path: cost.cost.seconds} if cost.available else {}
    if not usable:
        return None
    path = min(usable, key=lambda name: usable[name])
    if placement.schedule.overlapped_sync:  # it only delays what waits for it
        sent = replace(placement, weight_path=path)
        found = judged(replace(request, workload=plan.workload), setting.models, sent)
        saved = 1 - found.seconds / step if found else 0.0
    else:
        saved = (planned - usable[path]) / step
    if saved < WORTH:
        return None
    return SentChanges(path=path, seconds=usable[path], planned_s=planned, saved=saved)


def lent_trainer(plan: Plan, request: Request) -> Candidate | None:
    """The plan with its trainer's GPUs lent; None where it cannot be, or saves less than a tenth."""
    request = replace(request, workload=plan.workload)
    waiting_s = sum(phase.seconds for phase in plan.prediction.phases if phase.name == WAIT)
    return lent(plan.placement, waiting_s, plan.prediction.step_s, request)


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
