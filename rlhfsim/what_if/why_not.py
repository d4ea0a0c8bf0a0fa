"""Why not something else: the best plan under a choice that the user names, and what makes the difference.

The alternative is searched as exactly as the answer itself, with the choice as one more constraint;
roles that the choice leaves alone keep their prices. Where nothing fits, the search is repeated on
GPUs (and hosts) with ever more memory until something does, and the ledger of that plan on the real
GPUs names the byte that is in the way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate, risk
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.explain import Term, terms
from rlhfsim.search.planning import plan_of
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import SWITCHES, Limit, Request, switched
from rlhfsim.search.space import Partition
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.what_if.break_evens import with_memory
from rlhfsim.what_if.gains import TOUCHED

ROOMIER = (1.3, 2.0, 4.0, 16.0)
"""Factors of memory at which the nearest plan is looked for."""
NARROWING = 3
"""Halvings between the last that did not suffice and the first that did."""
FORBID_PREFIX = "no-"
ROLES = ("colocated", "split", "standalone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A choice that is compared with the answer."""

    text: str
    """As the user names it."""
    request: Request
    """The question with this choice made."""
    only: Callable[[Partition], bool] | None = None
    """Skeletons that have it, where the request cannot say so."""
    role: str | None = None
    """The role that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The byte that does not fit."""

    phase: str
    pool: str
    role: str
    component: str
    """The largest entry of that role and moment."""
    bytes: float
    """On the fullest GPU (of a node for host memory) at that moment."""
    component_bytes: float
    capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """An alternative against the answer."""

    choice: str
    plan: Plan | None
    """The best plan with this choice; None when nothing fits."""
    same: bool
    """Whether that is the answer itself."""
    terms: tuple[Term, ...]
    """Seconds by call of the answer and of this plan, the largest difference first."""
    certificate: Certificate
    missing: Missing | None = None
    """Where nothing fits: what the nearest plan lacks."""
    nearest: Placement | None = None
    """That plan."""
    reason: str | None = None
    """Where nothing fits, in words."""


# --- the choice as a request ------------------------------------------------------------------------


def alternative(request: Request, text: str, limit: Limit | None = None) -> Alternative:
    """The request under a named choice: a limit on a role, an architecture, a path, a switch, ...

    Raises:
        RlhfsimError: the choice contradicts the workload.
    """
    if limit is not None:
        return Alternative(text=text, request=_limited(request, limit), role=limit.role)
    name = text.strip().lower()
    free = replace(request, forbid=request.forbid - {name}, architecture=None)
    if name == "async":
        return Alternative(text=text, request=replace(free, allow=request.allow | {name}, architecture=name))
    if name in SWITCHES:
        work = switched(request.workload, frozenset({name}))
        return Alternative(
            text=text,
            request=replace(request, forbid=free.forbid, allow=request.allow | {name}, workload=work),
        )
    if name in ("naive", "smart", "hybrid", "disaggregated"):
        return Alternative(text=text, request=replace(free, architecture=name, weight_path=None))
    if name in ROLES:
        return Alternative(
            text=text, request=replace(request, forbid=free.forbid), only=lambda f: f.role_placement == name
        )
    if name == "streaming":
        return Alternative(text=text, request=free, only=lambda f: f.schedule.streaming)
    if name in BACKENDS:
        return Alternative(
            text=text, request=replace(request, backend=name, fix={}, limits=request.hardware_limits)
        )
    if name.startswith(FORBID_PREFIX):
        return Alternative(
            text=text, request=replace(request, forbid=request.forbid | {name.removeprefix(FORBID_PREFIX)})
        )
    return _path(free, text, name)


def _path(request: Request, text: str, name: str) -> Alternative:
    if name == "lora" and request.workload.lora is None:
        raise RlhfsimError(
            "missing-lora",
            "weight path lora moves adapters only, and no adapters are trained",
            help="--why-not lora compares training adapters",
        )
    return Alternative(text=text, request=replace(request, weight_path=name))  # type: ignore[arg-type]  # a path: checked where options are read


def _limited(request: Request, limit: Limit) -> Request:
    """The limit in place of what is said about the same field; `=` on a degree is tried as such."""
    kept = tuple(x for x in request.limits if (x.role, x.field) != (limit.role, limit.field))
    fields = {k: v for k, v in request.fix.get(limit.role, {}).items() if k != limit.field}
    fix = {**request.fix, limit.role: fields}
    if limit.relation == "=" and limit.field in DEGREES.get(limit.role, ROLE_DEGREES):
        fix[limit.role] = {**fields, limit.field: limit.value}
        return replace(request, fix={k: v for k, v in fix.items() if v}, limits=kept)
    return replace(request, fix={k: v for k, v in fix.items() if v}, limits=(*kept, limit))


ROLE_DEGREES = ("tp", "pp", "dp", "cp", "ep", "vp", "zero", "micro_batch", "recompute")
"""Fields of a layout that may be fixed to values which do not compete by themselves."""
DEGREES = {"rollout": ("tp", "pp", "ep")}


# --- the search --------------------------------------------------------------------------------------


def why_not(asked: Alternative, chosen: Plan, base: Request, pricer: Pricer) -> WhyNot:
    """The best plan of an alternative against the chosen plan of `base`, whose prices are at hand."""
    request = asked.request
    models = models_of(request.workload)
    search = Search(request, models, _prices(base, request, models, pricer), only=asked.only)
    found = search.run()
    if found.best is None:
        return _nothing(asked, models, found.certificate, _refusal(asked, found.pricer))
    plan = _plan(request, models, found.best)
    return WhyNot(
        choice=asked.text,
        plan=plan,
        same=plan.input_hash == chosen.input_hash,
        terms=tuple(terms(chosen, plan)),
        certificate=found.certificate,
    )


def _plan(request: Request, models: Models, best: Candidate) -> Plan:
    return plan_of(best, request.workload, models, request.cluster, request.price)


def _prices(base: Request, other: Request, models: Models, pricer: Pricer) -> Pricer:
    """Prices of the roles that a choice leaves alone."""
    if (
        base.backend != other.backend
        or base.max_oom != other.max_oom
        or (base.forbid ^ other.forbid) & {"offload", "recompute"}
    ):
        return Pricer(other, models)
    touched: frozenset[str] = frozenset()
    if base.workload != other.workload:
        switches = [n for n in TOUCHED if switched(base.workload, frozenset({n})) == other.workload]
        if not switches:
            return Pricer(other, models)
        touched = TOUCHED[switches[0]]
    roles = {"rollout", "actor", "critic", "reference", "reward"}
    changed = {
        s
        for s in roles
        if base.fix.get(s, {}) != other.fix.get(s, {}) or _limits(base, s) != _limits(other, s)
    }
    return pricer.again(other, models, touched | changed)


def _limits(request: Request, role: str) -> tuple[Limit, ...]:
    return tuple(x for x in request.limits if x.role == role and x.field not in ("gpus", "hardware"))


def _refusal(asked: Alternative, pricer: Pricer) -> str:
    """Why no plan has a choice: the rule that drops most layouts of the fixed role."""
    role = asked.role
    if role is None:
        return "no way to share these GPUs allows it"
    counts = sum((t.refused for t in pricer.tables(role)), Counter[str]())
    if asked.request.fix.get(role) and counts:
        return counts.most_common(1)[0][0]
    return f"no layout of the {role} on these GPUs is like that"


# --- when nothing fits -------------------------------------------------------------------------------


def _nothing(asked: Alternative, models: Models, certificate: Certificate, refusal: str) -> WhyNot:
    empty = WhyNot(choice=asked.text, plan=None, same=False, terms=(), certificate=certificate)
    if not certificate.space:
        return replace(empty, reason=f"no plan of the space has it: {refusal}")
    near = nearest(asked.request, models, only=asked.only)
    if near is None:
        return replace(empty, reason=f"nothing fits, not even with {ROOMIER[-1]:g} times the memory")
    memory = ledger(models, near, asked.request.workload, asked.request.cluster)
    return replace(
        empty,
        nearest=near,
        missing=missing(asked.request, models, near),
        reason=memory.rejected_by or risk(asked.request, memory),
    )


def nearest(
    request: Request, models: Models, *, only: Callable[[Partition], bool] | None = None
) -> Placement | None:
    """A plan that fits with about the least more memory; None where `ROOMIER` does not suffice."""

    def first(factor: float) -> Placement | None:
        cluster = with_memory(request.cluster, factor, hosts=True)
        roomy = replace(request, cluster=cluster, max_memory=None)
        found = Search(roomy, models, only=only).first()
        return found.placement if found is not None else None

    low = 1.0
    for high in ROOMIER:
        if best := first(high):
            break
        low = high
    else:
        return None
    for _ in range(NARROWING):
        middle = math.sqrt(low * high)
        if found := first(middle):
            best, high = found, middle
        else:
            low = middle
    return best


def missing(request: Request, models: Models, placement: Placement) -> Missing | None:
    """The moment, role and component that exceed a GPU; None where it is the host, engine or risk."""
    memory = ledger(models, placement, request.workload, request.cluster)
    peak, entry = memory.peak, memory.peak_entry
    if peak.bytes <= peak.capacity:
        return None
    return Missing(
        phase=peak.name,
        pool=peak.pool,
        role=entry.role,
        component=entry.component,
        bytes=peak.bytes,
        component_bytes=entry.bytes,
        capacity=peak.capacity,
    )
