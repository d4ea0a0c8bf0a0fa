"""Why one complete plan is not the answer: what excluded it from a search.

Asked in this order: is it in the space, does it fit, does another option of one role do no worse in
anything, is its bound above the best plan, and if none of these, how much slower is it simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from math import inf
from typing import Any, Literal

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.kernels.devices import interned
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.search.branch_and_bound import EQUAL
from rlhfsim.search.candidates import Candidate, risk, simulated, value
from rlhfsim.search.layouts import layout_refusal
from rlhfsim.search.merging import PoolTable, pool_table
from rlhfsim.search.options import OptionTable, PriceKey, broken_limit
from rlhfsim.search.pools import Subproblem, compared
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.role_rows import ALONE
from rlhfsim.search.space import Partition, Skeleton, partitions, roles_of, splits
from rlhfsim.search.subproblems import Subproblems
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import AnyRolePlacement, Placement
from rlhfsim.specs.workload.roles import ENDS, ROLES
from rlhfsim.step.measured import memory_doubt
from rlhfsim.units import Dimension, format


@frozen
class Exclusion:
    """What happened to one complete plan in a search."""

    kind: Literal["refused", "does_not_fit", "dominated", "bounded", "slower", "chosen"]
    """refused: not in the space; bounded: cannot be better than the best plan; slower: simulated."""
    text: str
    """The reason in one sentence, without a full stop."""
    value: float | None = None
    """Seconds of its step (bytes on a GPU where memory is minimised), bounded or simulated."""
    best: float | None = None
    """The same of the best plan, simulated."""
    instead: Placement | None = None
    """The plan that dominates it."""


def why_excluded(
    request: Request,
    models: Models,
    placement: Placement,
    best: Candidate | None,
    pricer: Pricer | None = None,
) -> Exclusion:
    """What excluded a complete plan from a request (one variant of the workload) whose answer is `best`.

    `best` is None where nothing fits; `pricer` is that of the search, where it is at hand.
    """
    request = replace(request, cluster=interned(request.cluster))
    asked = _Asked(Subproblems(request, models, pricer or Pricer(request, models)), placement)
    if reason := next(asked.refusals(), None):
        return Exclusion(kind="refused", text=reason)
    doubt = memory_doubt(models, request.backend, request.workload, request.cluster)
    memory = ledger(models, asked.placement, request.workload, request.cluster, doubt=doubt)
    if reason := risk(request, memory):
        return Exclusion(kind="does_not_fit", text=_shortfall(memory) + reason)
    bound = asked.bound()
    if best is None or bound == inf:
        return Exclusion(kind="does_not_fit", text="its roles do not fit together")
    least = value(request, best)
    unit: Dimension = "byte" if request.objective == "memory" else "s"
    if asked.placement == best.placement:
        return Exclusion(kind="chosen", text="it is the answer", value=least, best=least)
    against = f"it cannot take less than {format(bound, unit)}, the best plan takes {format(least, unit)}"
    if swap := asked.dominating():
        role, change, plan = swap
        text = f"{role} with {change} is no worse in anything; {against}"
        return Exclusion(kind="dominated", text=text, value=bound, best=least, instead=plan)
    if bound > least * (1 + EQUAL):
        return Exclusion(kind="bounded", text=against, value=bound, best=least)
    reached = value(request, simulated(request, models, asked.placement, memory))
    more = f"{format(reached - least, unit)} ({reached / least - 1:.1%})"
    text = f"simulated, it takes {format(reached, unit)}, {more} more than the best plan"
    return Exclusion(kind="slower", text=text, value=reached, best=least)


class _Asked:
    """One plan in the space of a request."""

    def __init__(self, subproblems: Subproblems, placement: Placement) -> None:
        self.subproblems = subproblems
        self.request, self.models = subproblems.request, subproblems.models
        self.skeleton = skeleton_of(placement)
        self.placement = _renamed(placement, self.skeleton)

    def keys(self) -> dict[str, PriceKey]:
        """Every role with what its price depends on."""
        partition, sizes = self.skeleton.partition, self.skeleton.sizes
        keys = [self.subproblems.keys_of(partition, i, gpus) for i, gpus in enumerate(sizes)]
        return {key.role: key for key in chain(*keys)}

    # --- the space ----------------------------------------------------------------------------------

    def refusals(self) -> Iterator[str]:
        """Why the plan is not in the space, the plainest reason first."""
        request, models, placement = self.request, self.models, self.placement
        if placement.backend != request.backend:
            yield f"the question is about {request.backend}, the plan runs on {placement.backend}"
        if set(placement.roles) != set(roles := roles_of(request, models)):
            yield f"the workload has the roles {', '.join(roles)}, the plan {', '.join(placement.roles)}"
        for role, key in self.keys().items():
            placed = placement.roles[role]
            if replace(placed, pool=ALONE) not in self.subproblems.pricer.every(key):
                limit = broken_limit(request, role, placed)
                yield f"{role}: " + (
                    layout_refusal(
                        request, models.of("actor" if role == "rollout" else role), placed.layout, role
                    )
                    or (
                        f"the question asks for {limit.text}"
                        if limit
                        else f"{placed.layout.label} as given does not compete"
                    )
                )
        yield from self._skeleton_refusals()
        label = placement.architecture
        if label in request.left_out or request.architecture not in (None, label):
            yield f"the question leaves out {label} plans"
        if placement.rollout is not None:
            ends = [(self.keys()[role], placement.roles[role]) for role in ENDS]
            sync = self.subproblems.paths.cost(self.skeleton.partition, *ends)
            if not sync.available:
                yield f"weight path {placement.weight_path}: {sync.why_not}"

    def _skeleton_refusals(self) -> Iterator[str]:
        """Pools, path and schedule that do not compete."""
        mine, left = self.skeleton.partition, list(partitions(self.request, self.models))
        for name, text in (
            ("groups", "its roles do not share pools like this in any plan of the question"),
            ("hardware", "its pools do not sit on these kinds of hardware in any plan of the question"),
            ("path", f"weight path {mine.path} does not compete between these pools"),
            ("schedule", "its schedule does not compete on these pools"),
        ):
            left = [p for p in left if getattr(p, name) == getattr(mine, name)]
            if not left:
                yield text
                return
        if self.skeleton.sizes not in set(map(tuple, splits(self.request, mine).tolist())):
            sizes = ", ".join(f"{p.name} {p.gpus}" for p in self.skeleton.pools())
            yield f"pools of these sizes do not compete ({sizes} GPUs)"

    # --- dominance and bound ------------------------------------------------------------------------

    def pool(self, index: int, free: str | None = None) -> tuple[Subproblem, PoolTable]:
        """A pool with the options of the plan alone, but for those of one role that is left free."""

        def options(key: PriceKey) -> OptionTable:
            table, own = (
                self.subproblems.pricer.table(key),
                replace(self.placement.roles[key.role], pool=ALONE),
            )
            return table if key.role == free else table.only(table.like(own))

        subproblem = self.subproblems.subproblem(self.skeleton, index, options)
        return subproblem, pool_table(subproblem, lambda numbers: np.zeros(len(numbers)), inf)

    def dominating(self) -> tuple[str, str, Placement] | None:
        """A role, how an option of it differs that fits and is no worse in anything, the plan with it."""
        for i, group in enumerate(self.skeleton.partition.groups):
            subproblem, table = self.pool(i)
            (mine,), (my_class,) = compared(subproblem, table.rows, table.numbers, table.held)
            for role in group:
                subproblem, table = self.pool(i, role)
                columns, classes = compared(subproblem, table.rows, table.numbers, table.held)
                for row in np.flatnonzero((columns <= mine).all(axis=1) & (classes == my_class)):
                    at, given = group.index(role), self.placement.roles[role]
                    option = replace(table.tables[at].options[table.rows[row, at]], pool=given.pool)
                    if option != given:
                        changed: Any = {role: option}
                        return role, _changes(given, option), replace(self.placement, **changed)
        return None

    def bound(self) -> float:
        """What the plan does not go below: seconds of a step, or bytes on a GPU."""
        tables = [self.pool(i)[1] for i in range(len(self.skeleton.sizes))]
        if not all(map(len, tables)):
            return inf
        _, bounds, _ = self.subproblems.combined(self.skeleton, tables, inf)
        return float(bounds[0]) if len(bounds) else inf


# --- plans and words ----------------------------------------------------------------------------------


def skeleton_of(placement: Placement) -> Skeleton:
    """The pools of a plan as the space writes them: the actor's first, then by their first role."""
    groups = {
        pool: tuple(r for r in ROLES if r in placement.roles and placement.roles[r].pool == pool.name)
        for pool in placement.pools
    }
    pools = sorted(filter(groups.get, groups), key=lambda pool: ROLES.index(groups[pool][0]))
    partition = Partition(
        groups=tuple(groups[p] for p in pools),
        hardware=tuple(p.hardware for p in pools),
        path=placement.weight_path,
        schedule=placement.schedule,
    )
    return Skeleton(partition=partition, sizes=tuple(p.gpus for p in pools))


def _renamed(placement: Placement, skeleton: Skeleton) -> Placement:
    """The same plan with the pools of its skeleton."""
    roles: dict[str, Any] = {
        role: replace(placement.roles[role], pool=pool.name)
        for pool, group in zip(skeleton.pools(), skeleton.partition.groups, strict=True)
        for role in group
    }
    return replace(placement, pools=skeleton.pools(), **roles)


def _shortfall(memory: Ledger) -> str:
    """The role that does not even fit by itself at the fullest moment."""
    peak, held = memory.peak, Counter[str]()
    for entry in peak.entries:
        held[entry.role] += entry.bytes  # type: ignore[assignment]  # a Counter of floats
    role, size = held.most_common(1)[0]
    return f"the {role} does not fit alone: " if size > peak.capacity else ""


def _changes(given: AnyRolePlacement, other: AnyRolePlacement) -> str:
    """`tp=2, micro_batch=4 in place of tp=4, micro_batch=1`: the fields in which two options differ."""
    pairs = [
        (f.name, getattr(a, f.name), getattr(b, f.name))
        for a, b in ((given.layout, other.layout), (given, other))
        for f in fields(a)
        if f.name not in ("pool", "layout") and getattr(a, f.name) != getattr(b, f.name)
    ]
    old, new = (", ".join(f"{name}={pair[i]}" for name, *pair in pairs) for i in (0, 1))
    return f"{new} in place of {old}"
