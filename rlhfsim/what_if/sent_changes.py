"""What sending only the changed elements of the weights would save, where a plan waits long for its sync.

The search takes such a path only where it is named, since how much changes is not known before the run: here
one formula a path says when naming it is worth a try.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.plan import Plan
from rlhfsim.search.candidates import judged
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.step.calls import CallSetting, planned_sync
from rlhfsim.step.timetable import SYNC

WORTH = 0.1
"""Least share of the step that is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChanges:
    """A weight path of changes beside the plan's own."""

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
