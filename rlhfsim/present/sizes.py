"""The same question for other numbers of GPUs: the best plan of each, searched while the page is written.

On one rented cluster money is proportional to time, so only other sizes make a trade of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.basis import Basis, basis
from rlhfsim.search.planning import asked_again
from rlhfsim.search.request import Request
from rlhfsim.units import HOUR
from rlhfsim.what_if.design import what_overturns
from rlhfsim.what_if.sizing import attempt

FACTORS = (1 / 4, 1 / 2, 2.0, 4.0)
"""Sizes that are tried, times the GPUs of the plan."""
LIMIT_S = 15.0
"""Longest search of all of them, shared among those that are left."""
LEAST_S = 0.1
"""Longest search of a size for which nothing is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One number of GPUs with its best plan."""

    gpus: int
    plan: Plan | None
    """None: nothing fits."""
    gap: float = 0.0
    """Share of the step by which an unexplored plan could be shorter; above 0 where time ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What was tried beside the plan's own size, ascending."""

    tried: tuple[Size, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> tuple[Plan, ...]:
        """Plans of the sizes that fit."""
        return tuple(s.plan for s in self.tried if s.plan is not None)


NONE = Sizes()
Step = Callable[[], None]
"""What is called after each size."""


def counts(plan: Plan) -> tuple[int, ...]:
    """Other sizes: whole nodes, or powers of two inside one."""
    if len(plan.hardware) != 1 or plan.choice is None:
        return ()
    gpus, node = plan.hardware[0].gpus, plan.hardware[0].gpus_per_node
    sizes = [round(gpus * f) if gpus * f < node else round(gpus * f / node) * node for f in FACTORS]
    return tuple(sorted({n for n in sizes if n >= 1 and n != gpus}))


def other_sizes(basis: Basis, *, limit_s: float = LIMIT_S, done: Step = lambda: None) -> Sizes:
    """The best plan of every other size; `done` is called after each."""
    plan = basis.plan
    if plan.choice is None:
        return Sizes(
            notes=("the plan was given, not searched, so there is no question to ask for other sizes",)
        )
    if basis.cluster is None or not counts(plan):
        return Sizes(notes=("other sizes are tried for clusters of one known kind of GPU only",))
    base, todo, end = asked_again(plan, basis.cluster), counts(plan), time.monotonic() + limit_s
    tried: list[Size] = []
    for n in todo:  # small clusters take little, and leave the rest to the large ones
        left = (end - time.monotonic()) / (len(todo) - len(tried))
        tried.append(_tried(replace(base, time_limit=max(left, LEAST_S)), n, done))
    return Sizes(tried=tuple(tried), notes=tuple(_notes(tried)))


def with_break_evens(plan: Plan, *, limit_s: float = LIMIT_S) -> Plan:
    """The plan with what would change its choice, searched where `design` did not look for it."""
    cluster = basis(plan).cluster
    if cluster is None or plan.choice is None or plan.choice.break_evens is not None:
        return plan
    found = what_overturns(replace(asked_again(plan, cluster), time_limit=limit_s))
    return replace(plan, choice=replace(plan.choice, break_evens=found))


def _tried(base: Request, gpus: int, done: Step) -> Size:
    group = base.cluster.node_group
    group = replace(group, gpus=gpus, gpus_per_node=min(gpus, group.gpus_per_node))
    request = replace(base, cluster=replace(base.cluster, node_groups=(group,)))
    try:
        trial = attempt(request)
    except RlhfsimError:  # what was fixed cannot be at this size
        trial = None
    done()
    gap = trial.certificate.gap if trial and trial.certificate else 0.0
    return Size(gpus=gpus, plan=trial.plan if trial else None, gap=gap)


def _notes(tried: Sequence[Size]) -> list[str]:
    nothing = [f"{s.gpus:,} GPUs: nothing fits" for s in tried if s.plan is None]
    return nothing + [
        f"{s.gpus:,} GPUs: its search ended early; a plan could be up to {s.gap:.1%} shorter"
        for s in tried
        if s.gap > 0 and s.plan
    ]


def cost_of(plan: Plan) -> float:
    """USD of a step; GPU-hours where no price is known."""
    p = plan.prediction
    return words.gpus(plan) * p.step_s / HOUR if p.usd_per_step is None else p.usd_per_step
