"""One plan for a whole run, or another one from some step on, whichever ends sooner.

    cost[p, k] = steps of stretch k x step of plan p there + its evaluations there; inf where p does not fit
    total      = min over paths p_0 .. p_K of  sum_k cost[p_k, k] + R x changes of plan       (shortest path)
    bound      = sum_k min_p cost[p, k]        no plan and no change of plans is faster

R is what a change of plan costs: checkpoint, restart, warm-up. The path counts `WORTH` of the bound as well,
so that a run stops only for what is worth it; it is never slower than the best single plan. What competes:
the proven best of every stretch, and whatever its search met that a single plan could need: one that beats
`total` has in every stretch  cost[p, k] < total - bound + min cost[., k]; others are not priced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, judged, risk
from rlhfsim.search.parallel import mapped
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.specs.model.context import check_context
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.what_if.engine import Question, answer
from rlhfsim.what_if.estimate import estimate, memory_of, priced_placement
from rlhfsim.what_if.long_run.document import LengthCurve, LongRun, RunStretch, stretches, workload_at
from rlhfsim.what_if.points import edge
from rlhfsim.what_if.remedies import shortage

WORTH = 0.01
"""Share of the run that a change of plan must save; for less nobody stops a run."""
Costs = NDArray[np.float64]
"""(plans, stretches) seconds."""
Prices = Callable[[Request, Placement], Candidate | None]
"""The step of a placement under a request; None where it does not fit."""


@frozen
class PlannedStretch:
    """A stretch with the plan that runs it."""

    stretch: RunStretch
    plan: Plan
    """Priced at the mean lengths of the stretch."""
    low_s: float
    """Seconds of its step at the P10 of the mean length."""
    high_s: float
    """At the P90."""
    evaluations: int
    evaluation_s: float
    """Seconds of each."""

    @property
    def seconds(self) -> float:
        """All steps and evaluations, no failures."""
        return self.stretch.steps * self.plan.prediction.step_s + self.evaluations * self.evaluation_s


@frozen
class RunPlan:
    """The answer: which plan runs which steps."""

    request: Request
    run: LongRun
    curve: LengthCurve
    stretches: tuple[PlannedStretch, ...]
    """Empty where nothing fits."""
    fixed: tuple[PlannedStretch, ...] = ()
    """The best single plan for all steps; empty where none fits them all."""
    bound_s: float = 0.0
    """No plan, and no change of plans, is faster."""
    out_of_memory: int | None = None
    """First step at which the plan that is best at the start does not fit; None: it always does."""
    unfit: RunStretch | None = None
    """Where nothing fits: the stretch."""
    shortage: str | None = None

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps from which another plan runs."""
        return tuple(
            after.stretch.start
            for before, after in zip(self.stretches, self.stretches[1:], strict=False)
            if _of_age(before.plan.placement, None) != _of_age(after.plan.placement, None)
        )

    @property
    def work_s(self) -> float:
        """Steps, evaluations and changes of plan; no failures."""
        return sum(s.seconds for s in self.stretches) + len(self.changes) * self.run.replan_s

    @property
    def fixed_s(self) -> float | None:
        """The same of the best single plan; None where none fits."""
        return sum(s.seconds for s in self.fixed) if self.fixed else None

    @property
    def gap(self) -> float:
        """Share by which another choice of plans could still be faster."""
        return 1 - self.bound_s / self.work_s


# --- the shortest path --------------------------------------------------------------------------------


def shortest(costs: Costs, change_s: float) -> tuple[list[int], float]:
    """Row of each column, and the sum, where each change of row costs `change_s`; ties keep the row."""
    total, came = costs[:, 0].copy(), []
    for column in costs.T[1:]:
        other = int(np.argmin(total))
        moved = total[other] + change_s < total
        came.append(np.where(moved, other, np.arange(len(total))))
        total = np.where(moved, total[other] + change_s, total) + column
    rows = [int(np.argmin(total))]
    for back in reversed(came):
        rows.append(int(back[rows[-1]]))
    return rows[::-1], float(total.min())


# --- candidates and their costs -----------------------------------------------------------------------


@frozen
class _Searched:
    """What one stretch's search came to."""

    best: Placement | None
    seconds: Mapping[Placement, float]
    """Every plan that was met, with its step there."""
    shortage: str | None


def planned_run(
    request: Request, run: LongRun, curve: LengthCurve, *, price: Prices | None = None
) -> RunPlan:
    """The plan or plans of a run that end it soonest.

    Raises:
        RlhfsimError: switches that change what is learnt, or lengths beyond the model's context.
    """
    if switches := request.switches - {"async"}:
        raise RlhfsimError(
            "switch-within-run",
            f"{sorted(switches)[0]} changes what is learnt and cannot come and go within a run",
            help="with --run only async may be allowed",
        )
    parts = stretches(run, curve, request.workload.speculation)
    asked = [
        replace(request, workload=workload_at(request.workload, run, s.stage, s.mean, s.middle))
        for s in parts
    ]
    for one in asked:
        check_context(one.workload)
    searched = mapped(_searched, asked)
    missing = next((i for i in reversed(range(len(parts))) if searched[i].best is None), None)
    empty = RunPlan(request=request, run=run, curve=curve, stretches=())
    if missing is not None:
        return replace(empty, unfit=parts[missing], shortage=searched[missing].shortage)
    table = _Table(run, parts, asked, price or _judged)
    chosen, single, bound = _chosen(table, searched, run.replan_s)
    first = searched[0].best
    assert first is not None
    return replace(
        empty,
        stretches=tuple(table.planned(p, k) for k, p in enumerate(chosen)),
        fixed=tuple(table.planned(single, k) for k in range(len(parts))) if single else (),
        bound_s=bound,
        out_of_memory=_first_misfit(table, request, curve, first),
    )


def _searched(request: Request) -> _Searched:
    found = answer(Question(request=request))
    met = {
        _of_age(placement, None): iteration.seconds
        for placement, (iteration, cutoff) in found.search.steps.items()
        if cutoff == math.inf
    }
    return _Searched(
        best=_of_age(found.best.placement, None) if found.best else None,
        seconds=met,
        shortage=None if found.best else shortage(found),
    )


def _judged(request: Request, placement: Placement) -> Candidate | None:
    return judged(request, models_of(request.workload), _of_age(placement, request.workload.speculation))


def _of_age(placement: Placement, drafts: Speculation | None) -> Placement:
    """The plan with its draft, where it has one, as old as another; fresh for None."""
    role = placement.rollout
    mine = role.layout.speculation if role else None
    if role is None or mine is None:
        return placement
    mine = replace(mine, age=drafts.age if drafts else 0)
    return placement.having(rollout=replace(role, layout=replace(role.layout, speculation=mine)))


class _Table:
    """Costs of plans in stretches, each priced once."""

    def __init__(
        self, run: LongRun, parts: Sequence[RunStretch], asked: Sequence[Request], price: Prices
    ) -> None:
        self.run, self.parts, self.asked, self._price = run, parts, asked, price
        self._known: dict[tuple[Placement, int], Candidate | None] = {}
        self._evaluation: dict[tuple[Placement, int], float] = {}

    def candidate(self, placement: Placement, k: int) -> Candidate | None:
        """The plan in a stretch; None where it does not fit."""
        key = placement, k
        if key not in self._known:
            self._known[key] = self._price(self.asked[k], placement)
        return self._known[key]

    def cost(self, placement: Placement, k: int) -> float:
        """Seconds of a stretch with a plan; inf where it does not fit."""
        found = self.candidate(placement, k)
        if found is None:
            return math.inf
        return self.parts[k].steps * found.seconds + self.evaluations(k) * self.evaluation_s(placement, k)

    def evaluations(self, k: int) -> int:
        """Evaluations that fall into a stretch: after steps that `every` divides."""
        asked, part = self.run.evaluation, self.parts[k]
        return part.end // asked.every - part.start // asked.every if asked else 0

    def evaluation_s(self, placement: Placement, k: int) -> float:
        """Seconds of one evaluation, or of the generation of its prompts."""
        asked, key = self.run.evaluation, (placement, k)
        if asked is None or asked.takes is not None or not self.evaluations(k):
            return asked.takes or 0.0 if asked else 0.0
        if key not in self._evaluation:
            request = self.asked[k]
            batch: dict[str, Any] = {"prompts": asked.prompts, "samples": asked.samples}
            alone = replace(
                request.workload, **batch, epochs=1, mini_batches=1, oversampling=0.0, dynamic_sampling=None
            )
            phases = estimate(placement, alone, request.cluster).prediction.phases
            self._evaluation[key] = sum(p.work_s or p.seconds for p in phases if p.name == "actor.generate")
        return self._evaluation[key]

    def costs(self, placements: Sequence[Placement]) -> Costs:
        """(plans, stretches) seconds."""
        columns = range(len(self.parts))
        return np.array([[self.cost(p, k) for k in columns] for p in placements])

    def planned(self, placement: Placement, k: int) -> PlannedStretch:
        """A stretch with its plan, also at both ends of its range of lengths."""
        request, part = self.asked[k], self.parts[k]
        found = self.candidate(placement, k)
        assert found is not None
        plan = plan_for(request, found)
        step = plan.prediction.step_s
        now = low = high = step
        if part.low < part.high:
            ends = (part.mean, part.low, part.high)
            now, low, high = (self._closed_form(placement, k, mean) for mean in ends)
        return PlannedStretch(
            stretch=part,
            plan=plan,
            low_s=step * min(low / now, 1.0),
            high_s=step * max(high / now, 1.0),
            evaluations=self.evaluations(k),
            evaluation_s=self.evaluation_s(placement, k),
        )

    def _closed_form(self, placement: Placement, k: int, mean: float) -> float:
        """Seconds of a step with other lengths, whether or not they fit."""
        request = self.asked[k]
        work = workload_at(request.workload, self.run, self.parts[k].stage, mean)
        placement = _of_age(placement, work.speculation)
        return priced_placement(placement, work, request.cluster).iteration.seconds


def _chosen(
    table: _Table, searched: Sequence[_Searched], change_s: float
) -> tuple[list[Placement], Placement | None, float]:
    """The plan of each stretch, the best single plan, and the bound."""
    bests = list(dict.fromkeys(s.best for s in searched if s.best is not None))
    costs = table.costs(bests)
    bound = float(costs.min(axis=0).sum())
    total = shortest(costs, change_s)[1]
    others = [
        p
        for p in dict.fromkeys(_could_win(table, searched, costs.min(axis=0), total - bound))
        if p not in bests
    ]
    plans = [*bests, *others]
    if others:
        costs = np.vstack([costs, table.costs(others)])
    rows, _ = shortest(costs, change_s + WORTH * bound)
    alone = costs.sum(axis=1)
    single = plans[int(np.argmin(alone))] if np.isfinite(alone.min()) else None
    return [plans[row] for row in rows], single, bound


def _could_win(
    table: _Table, searched: Sequence[_Searched], least: Costs, slack: float
) -> Iterator[Placement]:
    """Plans that were met and are close enough to the best of their stretch to beat the total alone."""
    for k, one in enumerate(searched):
        for placement, seconds in one.seconds.items():
            if table.parts[k].steps * seconds < least[k] + slack:
                yield placement


def _first_misfit(table: _Table, request: Request, curve: LengthCurve, first: Placement) -> int | None:
    """The first step at which a plan may not run; lengths within a stretch move one way."""
    wrong = next((k for k in range(len(table.parts)) if table.candidate(first, k) is None), None)
    if wrong is None:
        return None
    part = table.parts[wrong]

    def fits(step: int) -> bool:
        mean = float(min(curve.at(np.array([step]))[0], part.stage.max))
        work = workload_at(request.workload, table.run, part.stage, mean)
        asked = replace(request, workload=work)
        return risk(asked, memory_of(first, work, request.cluster)) is None

    if not fits(part.start):
        return part.start
    return int(edge(part.start, part.end - 1, lambda step: not fits(int(step)), lambda a, b: (a + b) // 2))
