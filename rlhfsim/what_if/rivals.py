"""The best plan of every other kind, each searched in its part of the space from the best that was met.

Kinds: each other architecture, however its roles share the GPUs; the architecture of the best plan with roles
that share them otherwise; and the best plan of each other workload that the allowed switches make. What a
part may still hold is known: `TOLERANCE` where its search ended, more where a time limit ended it.

The best plan may have a part that nobody has run: one of parts that ran takes its place where it is
little slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import get_args

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search import clock
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.candidates import Candidate, judged, value
from rlhfsim.search.options import Wish
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Scope
from rlhfsim.search.space import Partition
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Architecture
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.engine import Prices, Question, answer, variants

TOLERANCE = 0.01
"""Share by which the best plan of a kind may be better than the one that is shown."""
ARCHITECTURES = get_args(Architecture)
ROLE_PLACEMENTS = ("colocated", "split", "standalone")


@frozen
class Rival:
    """The best plan of a kind."""

    workload: Workload
    candidate: Candidate
    gap: float | None
    """Share by which a plan of its kind could still be better; None: it was met, and nothing is proven."""


@frozen
class PlanKind:
    """A kind of plan."""

    architecture: str | None = None
    role_placement: str | None = None
    workload: Workload | None = None

    def has(self, workload: Workload, candidate: Candidate) -> bool:
        """Whether a plan is of this kind."""
        p = candidate.placement
        return (
            self.architecture in (None, p.architecture)
            and self.role_placement in (None, p.role_placement)
            and self.workload in (None, workload)
        )

    def only(self, partition: Partition) -> bool:
        """Whether a partition has such plans, as far as roles go."""
        return self.role_placement in (None, partition.role_placement)


Searched = tuple[Workload, SearchResult]


@dataclass(slots=True, kw_only=True)
class Rivals:
    """The kinds of one question that was searched for each of its workloads."""

    request: Request
    searches: Sequence[Searched]
    met: dict[Workload, list[Candidate]] = field(default_factory=dict)
    """Plans of each workload that were met, the last ones first."""

    def all(self, workload: Workload, best: Candidate) -> Iterator[Rival]:
        """The best plan of every kind that `best` is not of."""
        for other, result in self.searches:
            self.met[other] = [c for c in (result.best, *result.rivals) if c is not None]
        p = best.placement
        architectures = [None] if self.request.architecture else ARCHITECTURES
        parts = [PlanKind(architecture=name) for name in architectures if name not in (None, p.architecture)]
        parts += [
            PlanKind(architecture=p.architecture, role_placement=name)
            for name in ROLE_PLACEMENTS
            if name != p.role_placement
        ]
        for other, result in self.searches:
            if other == workload:
                continue
            if result.best is not None and result.certificate.proven:  # nothing of it may have been bounded
                yield Rival(workload=other, candidate=result.best, gap=0.0)
            else:
                parts.append(PlanKind(workload=other))
        for part in parts:
            if (rival := self.of(part)) is not None:
                self.met[rival.workload].insert(0, rival.candidate)
                yield rival

    def of(self, part: PlanKind) -> Rival | None:
        """The best plan of a kind over all workloads, up to `TOLERANCE`; None where nothing fits, or where
        time is up and none was met."""
        spaces = [s for s in self.searches if part.workload in (None, s[0])]
        starts = [(w, self._start(part, w, result), result) for w, result in spaces]
        starts.sort(key=lambda s: inf if s[1] is None else value(self.request, s[1]))
        if clock.over():
            met = [(w, start) for w, start, _ in starts[:1] if start is not None]
            return Rival(workload=met[0][0], candidate=met[0][1], gap=None) if met else None
        best: tuple[Workload, Candidate] | None = None
        gap, below = TOLERANCE, inf
        for workload, start, result in starts:
            if start is not None and value(self.request, start) >= below:
                start = None
            found = result.search.part(
                part.architecture, part.only, start=start, below=below, tolerance=TOLERANCE
            )
            if not found.certificate.proven:
                gap = max(gap, found.certificate.gap)
            if found.best is not None:
                best, below = (workload, found.best), value(self.request, found.best)
        return best and Rival(workload=best[0], candidate=best[1], gap=gap)

    def _start(self, part: PlanKind, workload: Workload, result: SearchResult) -> Candidate | None:
        """The best plan of a kind that was met; an asynchronous one simulated to its end."""
        of_kind = [c for c in self.met[workload] if part.has(workload, c)]
        start = min(of_kind, key=lambda c: value(self.request, c), default=None)
        if start is None or not start.placement.schedule.asynchronous:
            return start
        request, steps = replace(self.request, workload=workload), result.search.steps
        return judged(request, models_of(workload), start.placement, steps=steps)


WORTH = 0.1
"""Share of the step, or bytes, that a part which was only written must save to be recommended."""
ONE_STAGE = Scope(
    wishes=(Wish(roles=frozenset({"rollout"}), holds=lambda role: role.layout.pp == 1),), rivals=False
)
"""Plans whose rollout is not pipelined."""


def of_parts_that_ran(request: Request, best: Rival, prices: Prices) -> Rival | None:
    """The best plan whose parts have run; None where `best` is one, or none comes within `WORTH` of it."""
    if not _only_written(request, best):
        return None
    limit, found = value(request, best.candidate) * (1 + WORTH), None
    for workload in variants(request):
        question = Question(request=replace(request, workload=workload), scope=ONE_STAGE)
        candidate = answer(question.scoped(below=math.nextafter(limit, math.inf)), prices).best
        if candidate is None:
            continue
        rival = Rival(workload=workload, candidate=candidate, gap=None)
        if not _only_written(request, rival):
            limit, found = value(request, candidate), rival
    return found


def _only_written(request: Request, rival: Rival) -> tuple[str, ...]:
    return only_written(request, plan_for(replace(request, workload=rival.workload), rival.candidate))


def only_written(request: Request, plan: Plan) -> tuple[str, ...]:
    """Parts of a plan that its framework has, and that nobody has run."""
    if request.runs is None:
        return ()
    known = request.runs.known(
        plan.placement, plan.workload, plan.topology, one_node=plan.replicas_in_one_node
    )
    return tuple(part for part, how in known.items() if how == "written only")
