"""Plans between which only taste decides: time, memory, staleness and the risk of running out of memory.

The front is walked by the epsilon-constraint method (Haimes et al. 1971, IEEE Trans. SMC 1(3), 296-297):
the fastest plan, then the fastest with a tenth less memory than that one, and so on, for each staleness
that is allowed and once with a small risk only. Each point is an exact search, so no plan of the space
with the same staleness is faster in less memory; between two points of the walk there may be more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search import clock, dominance
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate, most_bytes
from rlhfsim.search.planning import plan_for
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import STALE, Request
from rlhfsim.specs.model.roles import Models, models_of

SHRINK = 0.9
"""Share of the last plan's bytes that the next one may use."""
POINTS = 6
"""Most plans of one walk."""
RISK_DIGITS = 3
SAFE = 0.01
"""Risk of running out of memory of the walk that avoids it."""


@frozen
class FrontPoint:
    """A plan that no other one of the front beats in everything."""

    plan: Plan
    seconds: float
    bytes: float
    """On the fullest GPU."""
    staleness: float
    risk: float
    """Probability of running out of memory."""

    @property
    def values(self) -> tuple[float, ...]:
        """What is minimised; risks that differ by less than a part in a thousand are the same."""
        return self.seconds, self.bytes, self.staleness, round(self.risk, RISK_DIGITS)


def front(request: Request) -> tuple[FrontPoint, ...]:
    """The non-dominated plans that the walks meet, the fastest first."""
    models = models_of(request.workload)
    points = [_point(request, candidate) for walk in _walks(request) for candidate in _walk(walk, models)]
    best = undominated([p.values for p in points])
    return tuple(sorted((points[i] for i in best), key=lambda p: p.values))


def _walks(request: Request) -> Iterator[Request]:
    yield replace(request, allow=request.allow - STALE, objective="time")
    for name in sorted(request.switches & STALE):
        yield replace(request, architecture=name, objective="time")
    if request.max_oom > SAFE:
        yield replace(request, max_oom=SAFE, allow=request.allow - STALE, objective="time")


def _walk(request: Request, models: Models) -> Iterator[Candidate]:
    """The fastest plan under ever smaller caps on the bytes of a GPU."""
    pricer = Pricer(request, models)
    for _ in range(POINTS):
        result = Search(request, models, pricer.again(request, models)).run()
        pricer = result.pricer
        yield from result.rivals
        if result.best is None:
            return
        yield result.best
        if clock.over():
            return
        request = replace(request, max_memory=SHRINK * most_bytes(result.best.ledger))


def _point(request: Request, candidate: Candidate) -> FrontPoint:
    plan = plan_for(request, candidate)
    return FrontPoint(
        plan=plan,
        seconds=candidate.seconds,
        bytes=most_bytes(candidate.ledger),
        staleness=candidate.placement.schedule.staleness,
        risk=candidate.ledger.probability_out_of_memory,
    )


def undominated(values: Sequence[tuple[float, ...]]) -> list[int]:
    """Rows that no other row equals or beats in every column; of equal rows the first."""
    rows = dominance.undominated(np.array(values), np.zeros(len(values), np.int64)) if values else np.empty(0)
    return sorted(map(int, rows))
