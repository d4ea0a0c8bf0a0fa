"""One priced plan of a question; where it does not fit, why, and the smallest change with which one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import OWN, framework, runs_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.step.region import warnings
from rlhfsim.what_if.design import design, unfit
from rlhfsim.what_if.estimate import Planned, estimate
from rlhfsim.what_if.left_open import as_configured
from rlhfsim.what_if.remedies import remedy
from rlhfsim.what_if.usual_trainer import assumed_trainer, trained
from rlhfsim.what_if.verdict import rejection


def checked_plan(plan: Plan, cluster: Cluster, notes: tuple[str, ...] = ()) -> Planned:
    """A given plan with its verdict."""
    reason = rejection(plan, cluster)
    return Planned(
        plan=plan,
        rejected_by=reason,
        remedy=fitting_change(plan, cluster) if reason else None,
        notes=(*notes, *not_launched(plan, cluster)),
        far=_far(plan, cluster),
        cluster=cluster,
    )


def not_launched(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What of a plan `rlhfsim launch` would refuse; in one line where another framework is to run it."""
    lacking = tuple(
        framework(OWN).lacks(
            plan.placement,
            plan.workload,
            plan.topology,
            one_node=plan.replicas_in_one_node,
            vendors=cluster.vendors,
        )
    )
    other = runs_of(plan.framework)
    if lacking and other is not None and other.name != OWN:
        return (f"{other.title} runs this plan (rlhfsim export), rlhfsim launch does not: {lacking[0].what}",)
    return tuple(f"rlhfsim launch does not run {lacks.what}: {lacks.remedy}" for lacks in lacking)


def fitting_change(plan: Plan, cluster: Cluster) -> str | None:
    """The smallest change with which a given plan fits; None where none that is tried does."""
    return remedy(plan.placement, plan.workload, cluster)


def _far(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    return warnings(plan, [pool.profile for pool in cluster.node_groups])


def best_of(request: Request, typed: Mapping[str, str] | None = None) -> Planned:
    """The best plan that keeps what is fixed, with what is left open as its framework has it; or, when
    nothing fits, the one that comes nearest.

    `typed`: see `remedies`.
    """
    request = trained(request)
    answer = design(request, explain=False)
    if answer.chosen is not None:
        chosen = as_configured(answer.chosen, request)
        far, notes = _far(chosen, request.cluster), not_launched(chosen, request.cluster)
        return Planned(plan=chosen, far=far, notes=notes, cluster=request.cluster)
    answer = unfit(answer, typed)
    near = answer.nearest
    cluster = request.cluster
    plan = None
    if near is not None:
        work = answer.nearest_work or request.workload
        plan = replace(estimate(near, work, cluster), assumed=assumed_trainer(request))
    return Planned(plan=plan, rejected_by=answer.rejected_by, remedy=answer.remedy, cluster=cluster)
