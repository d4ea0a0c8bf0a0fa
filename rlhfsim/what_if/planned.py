"""One priced plan of a question; where it does not fit, why, and the smallest change with which one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import OWN, framework
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.search.fixed_layouts import ranks
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.dataflow import TRAINED
from rlhfsim.step.region import warnings
from rlhfsim.what_if.design import design
from rlhfsim.what_if.engine import Change, Question, first_that, setting
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.remedies import nearest_change, remedy

MAX_RELEASED = 3
"""Fixed values that are tried one by one when nothing fits; each costs a search."""
_GENTLE = (
    *("score_pack_tokens", "pack_tokens", "micro_batch", "recompute"),
    *("shards", "zero", "vp", "cp", "ep", "dp", "pp", "tp"),
)
"""Order in which fixed values are released."""
_PATH: dict[str, WeightPath] = {
    "naive": "host",
    "smart": "host",
    "hybrid": "ipc",
    "disaggregated": "broadcast",
    "async": "broadcast",
}
OPEN: dict[str, Any] = {"request.fix": {}, "request.architecture": None}
"""Layouts and architecture left open."""
NOT_FOUND = "more GPUs, a GPU with more memory, or a smaller model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One priced plan and whether it can run."""

    plan: Plan | None
    """None when nothing fits and no example could be priced."""
    rejected_by: str | None = None
    """What does not fit, in words; None when all does."""
    remedy: str | None = None
    """The smallest change that would fit."""
    notes: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    """Phases far from the runs that their profile was calibrated on."""
    cluster: Cluster | None = None
    """What the plan was priced on."""

    @property
    def fits(self) -> bool:
        """Whether the plan can run."""
        return self.rejected_by is None


def checked_plan(plan: Plan, cluster: Cluster, notes: tuple[str, ...] = ()) -> Planned:
    """A given plan with the verdict of its ledger."""
    reason = ledger(models_of(plan.workload), plan.placement, plan.workload, cluster).rejected_by
    return Planned(
        plan=plan,
        rejected_by=reason,
        remedy=reason and fitting_change(plan, cluster),
        notes=(*notes, *not_launched(plan, cluster)),
        far=_far(plan, cluster),
        cluster=cluster,
    )


def not_launched(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What of a plan `rlhfsim launch` would refuse."""
    lacking = framework(OWN).lacks(
        plan.placement,
        plan.workload,
        plan.topology,
        one_node=plan.replicas_in_one_node,
        vendors=cluster.vendors,
    )
    return tuple(f"rlhfsim launch does not run {lacks.what}: {lacks.remedy}" for lacks in lacking)


def fitting_change(plan: Plan, cluster: Cluster) -> str:
    """The smallest change with which a given plan fits, or what else would help."""
    return remedy(plan.placement, plan.workload, cluster) or NOT_FOUND


def _far(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    return warnings(plan, [pool.profile for pool in cluster.node_groups])


def best_of(request: Request) -> Planned:
    """The best plan that keeps what is fixed; or, when nothing fits, an example of what does not."""
    answer = design(request, explain=False)
    if answer.chosen is not None:
        far = _far(answer.chosen, request.cluster)
        notes = not_launched(answer.chosen, request.cluster)
        return Planned(plan=answer.chosen, far=far, notes=notes, cluster=request.cluster)
    example = _example(request)
    if example is None:
        refused = max(answer.refused, key=lambda reason: answer.refused[reason], default=None)
        reason: str | None = answer.shortage or refused or "no way to share these GPUs is left"
    else:
        models = models_of(request.workload)
        reason = ledger(models, example.placement, request.workload, request.cluster).rejected_by
        reason = reason or answer.shortage or "no plan with these choices fits"
    remedy = _released(request) or _relaxed(request)
    return Planned(plan=example, rejected_by=reason, remedy=remedy, cluster=request.cluster)


def _chosen(question: Question) -> Plan | None:
    return design(question.request, explain=False, simple=False).best


def _released(request: Request) -> str | None:
    """The first single fixed value whose release lets something fit, and what it then becomes."""
    question = Question(request=request)
    choices = [(role, name) for role, fields in request.fix.items() for name in fields]
    for role, name in sorted(choices, key=lambda c: _GENTLE.index(c[1]))[:MAX_RELEASED]:
        fields = {k: v for k, v in request.fix[role].items() if k != name}
        release = setting("", {"request.fix": {**request.fix, role: fields}})
        if (plan := _chosen(release.apply(question))) is not None:
            value = getattr(plan.placement.roles[role].layout, name)
            return f"{name}={value} for {role} instead of {request.fix[role][name]}"
    return None


def _relaxed(request: Request) -> str:
    """What lets something fit beyond a single value: layouts or architecture left open, then the rest."""
    opened = first_that(Question(request=request), _opened(request), _chosen)
    if opened and opened[0] == "layouts":
        return f"other layouts, such as {opened[1].placement.actor.layout.label} for the actor"
    if opened:
        return f"--architecture {opened[1].architecture}"
    change = nearest_change(setting("", OPEN).apply(Question(request=request)).request)
    freed = " with layouts and architecture left open" if request.fix or request.architecture else ""
    return f"{change}{freed}" if change else NOT_FOUND


def _opened(request: Request) -> Iterator[Change]:
    if request.fix:
        yield setting("layouts", {"request.fix": {}})
    if request.architecture:
        yield setting("architecture", OPEN)


# --- an example of what does not fit ----------------------------------------------------------------


def _example(request: Request) -> Plan | None:
    """A plan of the wanted architecture with the fixed layouts, to show what does not fit."""
    if len(request.cluster.node_groups) > 1:
        return None
    try:
        placement = _placement(request, models_of(request.workload))
        return estimate(placement, request.workload, request.cluster)
    except RlhfsimError:
        return None


def _placement(request: Request, models: Models) -> Placement:
    """One pool, or halves for rollout and the rest; all that may wait on the host does."""
    total, wanted = request.cluster.node_group.gpus, request.architecture or "hybrid"
    apart = wanted in ("disaggregated", "async") and total > 1
    train = ResourcePool(name="train" if apart else "all", gpus=total - total // 2 if apart else total)
    home = ResourcePool(name="rollout", start=train.gpus, gpus=total // 2) if apart else train
    away = wanted != "naive"

    def role(name: str) -> RolePlacement | None:
        if getattr(models, name) is None:
            return None
        trained = name in TRAINED
        return RolePlacement(
            pool=train.name,
            layout=_layout(request, name, train.gpus),
            offload_between=away and trained,
            residency="offloaded" if away and not trained else "resident",
        )

    rollout = None
    if request.workload.generates:
        fields: dict[str, Any] = {"tp": min(8, home.gpus), **request.fix.get("rollout", {})}
        engine = RolloutLayout(
            **fields, dp=home.gpus // ranks(fields), memory_utilization=0.9 if apart else 0.6
        )
        rollout = RolloutPlacement(pool=home.name, layout=engine, sleep=2 if away and not apart else 0)
    actor = role("actor")
    assert actor is not None
    return Placement(
        pools=(train, home) if apart else (train,),
        actor=actor,
        rollout=rollout,
        backend=request.backend,
        weight_path=_PATH[wanted] if rollout else "none",
        critic=role("critic"),
        reference=role("reference"),
        reward=role("reward"),
        schedule=Schedule(staleness=1 if wanted == "async" else 0),
    )


def _layout(request: Request, name: str, gpus: int) -> Layout:
    """The fixed layout of a role, or the actor's; micro-batch 1 and full sharding where it can be."""
    fields: dict[str, Any] = {**request.fix.get("actor", {}), **request.fix.get(name, {})}
    sharded = request.backend == "fsdp2" or (request.backend == "deepspeed" and ranks(fields) == 1)
    fields.setdefault("micro_batch", 1)
    fields.setdefault("zero", 3 if sharded else 1)
    return Layout(**{**fields, "dp": gpus // ranks(fields)})
