"""The answer to a design question: the chosen plan, its rivals, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, Found, search
from rlhfsim.search.explain import Flip, Gain, flips, gains, nearest_change, reasons
from rlhfsim.search.options import Tally
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request, switched
from rlhfsim.specs.models import models_of
from rlhfsim.specs.placement import Placement
from rlhfsim.specs.workload import Workload

RUNNERS_UP = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """A ranked, explained answer."""

    request: Request
    chosen: Plan | None
    """None when nothing fits."""
    runners_up: tuple[Plan, ...]
    """The best plan of every other kind, then further plans of the best kind."""
    reasons: tuple[str, ...]
    """Why the chosen plan won."""
    flips: tuple[Flip, ...]
    """Single changes that would make another plan the best."""
    gains: tuple[Gain, ...]
    """What each choice that is not allowed would bring."""
    considered: Tally
    rejected: dict[str, int] = field(default_factory=dict)
    """Why plans failed the full memory check -> how many."""
    remedy: str | None = None
    """When nothing fits: the smallest change that would."""


def design(request: Request, *, explain: bool = True) -> Design:
    """The best plan of a request, with what was considered and why it won.

    Raises:
        RlhfsimError: unknown model, or a request that contradicts itself.
    """
    variants = [(w, models_of(w)) for w in _workloads(request)]
    searched = [(w, m, search(replace(request, workload=w), m)) for w, m in variants]
    ranked = sorted(
        ((c, w, m) for w, m, found in searched for c in found.ranked),
        key=lambda x: _key(request, x[0]),
    )
    tally = _total([found for _, _, found in searched])
    rejected = _counted([reason for _, _, found in searched for reason in found.rejected])
    if not ranked:
        return Design(
            request=request, chosen=None, runners_up=(), reasons=(), flips=(), gains=(), considered=tally, rejected=rejected,
            remedy=nearest_change(request, variants[0][1]) if explain else None,
        )  # fmt: skip
    best, workload, models = ranked[0]
    rivals = _rivals(
        [c for c, w, _ in ranked if w == workload]
        if len(searched) == 1
        else [c for c, _, _ in ranked]
    )
    owner = {id(c): (w, m) for c, w, m in ranked}
    plans = [plan_of(c, *owner[id(c)], request.cluster, request.price) for c in rivals]
    base = replace(request, workload=workload)
    return Design(
        request=request, chosen=plans[0], runners_up=tuple(plans[1:]),
        reasons=tuple(reasons(plans[0], plans[1:])) if explain else (),
        flips=tuple(flips(base, models, rivals)) if explain else (),
        gains=tuple(gains(base, models, searched[0][2], best)) if explain else (),
        considered=tally, rejected=rejected,
    )  # fmt: skip


def _key(request: Request, candidate: Candidate) -> tuple[float, float]:
    if request.objective == "memory":
        return candidate.ledger.peak_bytes, candidate.seconds
    return candidate.seconds, candidate.ledger.peak_bytes


def _workloads(request: Request) -> Iterator[Workload]:
    """The workload as asked, and with each allowed switch and all of them."""
    yield request.workload
    switches = sorted(request.switches - {"async"})
    sizes = {1, len(switches)} if switches else set()
    for size in sorted(sizes):
        for chosen in combinations(switches, size):
            yield switched(request.workload, frozenset(chosen))


def _rivals(ranked: list[Candidate]) -> list[Candidate]:
    """The winner, the best of every other kind, then plans with another actor or rollout layout."""
    kinds: dict[tuple[object, ...], Candidate] = {}
    layouts: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        placement = candidate.placement
        kinds.setdefault((placement.architecture, placement.role_placement), candidate)
        layouts.setdefault(_main_layouts(placement), candidate)
    leaders = list(kinds.values())
    shown = {_main_layouts(c.placement) for c in leaders}
    return (leaders + [c for key, c in layouts.items() if key not in shown])[: RUNNERS_UP + 1]


def _main_layouts(placement: Placement) -> tuple[object, ...]:
    """What tells two plans apart at a glance."""
    rollout = placement.rollout.layout.label if placement.rollout else None
    return placement.architecture, placement.pools, placement.actor.layout.label, rollout


def _total(found: list[Found]) -> Tally:
    total = Tally()
    for each in found:
        total = total.plus(each.pricer.tally)
    return total


def _counted(reasons_: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons_:
        counts[reason] = counts.get(reason, 0) + 1
    return counts
