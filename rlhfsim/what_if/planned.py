"""One priced plan of a question; where it does not fit, why, and the smallest change with which one does.

What a typed plan leaves open is as its framework's configuration has it: the plan that a search chose is
written in the keys of its framework, without those that answer what was left open; read back, they have the
framework's defaults. What does not fit by its default stays as it was chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import configuration_named, configuration_names
from rlhfsim.interchange.configuration.described import placement_of
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Exporter, Value, exporter, exporters
from rlhfsim.interchange.table import bare
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import EXCHANGE
from rlhfsim.specs.frameworks.runs import OWN, framework, runs_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.roles import MODELS
from rlhfsim.step.region import warnings
from rlhfsim.what_if.design import design, unfit
from rlhfsim.what_if.estimate import Planned, estimate, planned, step_of
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
    near, plan = answer.nearest, None
    if near is not None:
        plan = replace(planned(near, step_of(near), None), assumed=assumed_trainer(request))
    return Planned(plan=plan, rejected_by=answer.rejected_by, remedy=answer.remedy, cluster=request.cluster)


FIRST = 2
"""Fields of `left_open` that are chosen in every combination before others join them."""
MODEL = ("${MODEL}", "???")
"""What exports write where the weights are to be named."""
SAME_QUESTION = {"actor.pack_tokens": "micro_batch"}
"""Field -> another by which a question answers it."""


def as_configured(plan: Plan, request: Request) -> Plan:
    """The plan with the framework's defaults where `request` fixes nothing; itself where it has none."""
    plan, way = _as_typed(plan, request), _way(request)
    if way is None or not plan.workload.generates:
        return plan
    written = {bare(key): value for key, value in way.write(plan).values.items()}
    written = {k: plan.workload.model if v in MODEL else v for k, v in written.items()}
    for left in _tried([field for field in way.left_open if not _said(field, request)]):
        keys = {key for field in left for key in way.left_open[field]}
        if (found := _read(plan, request, way, written, keys)) is not None:
            return replace(found, assumed=(*plan.assumed, *found.assumed))
    return plan


def _as_typed(plan: Plan, request: Request) -> Plan:
    """The plan with the dispatchers that a question names alone: those that a search chose, nobody typed."""
    kept, fix = plan.placement, request.fix
    for role, placed in plan.placement.roles.items():
        named = {"dispatcher"} & {*fix.get(role, {}), *(fix.get("actor", {}) if role != "rollout" else {})}
        layout: Any = getattr(placed, "layout", None)
        if not named and layout is not None and layout.dispatcher is not None:
            open_layout: Any = replace(placed, layout=replace(layout, dispatcher=None))
            kept = replace(kept, **{role: open_layout})
    if kept == plan.placement:
        return plan
    found = estimate(kept, plan.workload, request.cluster, price=request.price)
    return replace(found, assumed=plan.assumed)


def _way(request: Request) -> Exporter | None:
    """How plans are written for the framework of a question; None where nothing is left to its defaults."""
    runs = request.runs
    if runs is None or runs.name not in exporters() or runs.name not in configuration_names():
        return None
    way = exporter(runs.name)
    return way if way.left_open else None


def _said(field: str, request: Request) -> bool:
    """Whether the question fixes a field."""
    role, _, name = field.partition(".")
    return bool({name, SAME_QUESTION.get(field)} & set(request.fix.get(role, {})))


def _tried(fields: list[str]) -> Iterator[Collection[str]]:
    """Fields that have their defaults: all; all but some of the first; then fewer, one by one."""
    first = fields[:FIRST]
    for chosen in chain.from_iterable(combinations(first, n) for n in range(len(first) + 1)):
        yield [field for field in fields if field not in chosen]
    for i in range(FIRST + 1, len(fields)):
        yield fields[i:]


def _with_typed(read: Placement, chosen: Placement, request: Request) -> Placement:
    """A placement as read, with all that the question fixes, be there a key for it or not."""
    roles = {}
    for role in MODELS:
        now, before = read.role(role), chosen.role(role)
        if now is not None and before is not None:
            names = {*EXCHANGE, *request.fix.get(role, {})}
            said = {name: getattr(before.layout, name) for name in names}
            roles[role] = replace(now, layout=replace(now.layout, **said))
    return read.having(**roles)


def _read(
    plan: Plan, request: Request, way: Exporter, written: Mapping[str, Value], keys: Collection[str]
) -> Plan | None:
    """The plan as its framework reads it without `keys`; None where it does not fit."""
    assert request.runs is not None
    own = way.usual(plan)
    usual = {key: value for key, value in own.items() if key in keys and key in written}
    always = {key: value for key, value in own.items() if key not in chain(*way.left_open.values())}
    values = {key: value for key, value in written.items() if key not in keys} | usual | always
    settings = FrameworkSettings(values, "typed")
    cluster = request.cluster
    try:
        run = configuration_named(request.runs.name).run(settings)
        placement = placement_of(run, plan.workload, two_kinds=len(cluster.node_groups) > 1)
        placement = _with_typed(placement, plan.placement, request)
        found = estimate(placement, plan.workload, cluster, price=request.price)
    except RlhfsimError:
        return None
    if rejection(found, cluster) is not None:
        return None
    read = settings.assumed.items()
    taken = {key: v for key, v in read if key in keys and (v or key in written)} | usual
    shown = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in taken.items())
    return replace(found, assumed=(f"as {request.runs.title} has it: {shown}",)) if shown else found
