"""Branch and bound over the whole space: skeletons by their bound, pools by their numbers, then simulation.

Every plan of the space ends in exactly one line of the certificate. The bound of a skeleton holds for
all its plans whose roles fit by themselves; the bound of a combination is `search.bound`; what is
left is simulated in the order of its bound, until no bound is better than the best simulated plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen
from rlhfsim.kernels.devices import interned
from rlhfsim.search import clock
from rlhfsim.search.branches import (
    Branch,
    Entry,
    Frontier,
    Queue,
    bounded,
    fit_alone,
    fitting_of,
    least_of,
    totals,
)
from rlhfsim.search.candidates import Candidate, judged, lent_moves, streaming_seconds, value
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.dominance import LENT_GAP, Beside
from rlhfsim.search.merging import PoolTable, counted, counted_empty
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.progress import Progress, tell
from rlhfsim.search.request import Request
from rlhfsim.search.scope import WHOLE, Scope, Steps
from rlhfsim.search.space import Partition, Skeleton, competing, may_carry
from rlhfsim.search.subproblems import Subproblems
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.iteration import Known

WARM_STARTS = 2
"""Skeletons of a kind of plan that the warm start tries."""
RIVAL = 1.25
"""A kind of plan whose bound is further above the best plan is not looked at."""
EQUAL = 1e-9
"""Relative difference below which two step times are the same."""
ABOVE = ((1.003, 1.006, 1.01, 1.015, 1.02, 1.025, 1.03, 1.04, 1.06, 1.1), (1.15, 1.2), (inf,))
"""Times its bound: how far a skeleton is looked at before more of it is; by rounds through all skeletons."""
MOST_OPENED, FEW = 200, 1_000_000
"""In a part of the space: skeletons that are opened, and plans of one that is opened whatever its bound."""
WORK, PART_WORK, FIRST_WORK = 300_000, 50_000, 150_000
"""Options priced, or as much other work, after which a search ends unproven: of a question, of a part of its
space, and of one that asks for any plan."""
UNPROVEN_WORK = 10_000
"""The same of a part of a space whose own search ended unproven."""
OPENING = 500
"""Options whose prices take as long as opening a skeleton."""
ROLLOUT_OPENING = 100
"""The same (1 ms) of one whose rollout alone is looked at."""
TOGETHER = 1_000_000
"""Combinations of all pools of a skeleton that a quick look puts together."""
REFUSED, STALE = 200, 2_500
"""Options whose prices take as long (12 us each) as the ledger of a plan that may not run, and as the
simulation of one with stale samples."""
SMALL = 64
"""GPUs of a pool up to which its options are so few that all roles are priced at once, on all cores."""
SIMPLEST = 4
"""Simple skeletons of a number of pools that are tried before promising ones where any plan will do."""
AT_ONCE = ((inf,),)
"""The same where any plan will do."""


@frozen
class SearchResult:
    """The best plan and how a search knows."""

    best: Candidate | None
    rivals: tuple[Candidate, ...]
    """The best plan of every other kind that was met; simulated, not proven."""
    certificate: Certificate
    pricer: Pricer
    refused: Counter[str]
    """Layouts outside the space, by reason."""
    nearest: tuple[Skeleton, str, float] | None
    """When nothing fits: the skeleton and pool that miss memory by least, and the bytes."""
    search: Search
    """For searches over a part of the same space."""


class _Part(NamedTuple):
    """A part of a space that was searched, with what is known about it."""

    subproblems: Subproblems
    branches: Sequence[Branch]
    start: Candidate | None
    """The best plan of the part that was met."""
    work: float
    """Options that its search may price."""


class Search:
    """One search over one request; `run` does it all."""

    def __init__(
        self,
        request: Request,
        models: Models,
        pricer: Pricer | None = None,
        scope: Scope = WHOLE,
        part: _Part | None = None,
    ) -> None:
        """Nothing is priced yet, unless a pricer of a like request is given.

        `part`: of a space that was searched, which proves no more than is cheap.
        """
        self.scope, self._part = scope, part
        self.steps: Steps = {} if scope.steps is None else scope.steps
        """See `judged`."""
        self._gives_up = False
        """Whether it may end before it met a plan."""
        self._any = False
        """Whether the first plan that it meets is enough."""
        self._reach, self._warm_starts = (RIVAL, WARM_STARTS) if scope.rivals else (1.0, 1)
        self.request, self.models = replace(request, cluster=interned(request.cluster)), models
        self.pricer = pricer or Pricer(self.request, models)
        self.subproblems = part.subproblems if part else Subproblems(self.request, models, self.pricer)
        self.best: Candidate | None = part and part.start
        self._reached: tuple[Candidate | None, float] = None, scope.below
        self.kinds: dict[tuple[str, str], Candidate] = {}
        self.counts: Counter[str] = Counter()
        self.nearest: tuple[Skeleton, str, float] | None = None
        self._seen: dict[Placement, Candidate | None] = {}
        self._continuous: dict[object, list[Beside]] = {}
        """Simulated plans whose rollout never drains, by their rollout."""
        self._opened = 0
        self._proven = False

    @property
    def _ended(self) -> bool:
        """Whether time is up, and a plan was met or need not be; or one was met, and any will do."""
        if self._any and self.best is not None:
            return True
        return clock.over() and (self.limit < inf or self._gives_up)

    @property
    def limit(self) -> float:
        """The value that a plan must beat."""
        if self.best is None:
            return self.scope.below
        if self._reached[0] is not self.best:  # asked for more often than plans are met
            self._reached = self.best, value(self.request, self.best)
        return self._reached[1]

    @property
    def threshold(self) -> float:
        """Bounds above it cannot win; nor one that equals the best, once that is simulated."""
        if self.scope.tolerance:
            return self.limit * (1 - self.scope.tolerance)
        return self.limit * (1 - EQUAL if self.counts["simulated"] else 1 + EQUAL)

    def first(self, *, insists: bool = False) -> Candidate | None:
        """Some plan that fits, the best that the warm start finds; None where nothing does, or where time or
        `FIRST_WORK` was not enough to meet one. Where someone `insists`, the first that is met after that,
        if as much work is enough."""
        self._gives_up, work = True, min(FIRST_WORK, self.scope.work)
        with clock.worth(work):
            branches = self._branches()
            self._warm_start(branches)
            if self.best is None:
                self._prove(branches, AT_ONCE)
            insists &= clock.over()
        if self.best is None and insists:
            self._meet_one(branches, work)
        return self.best

    @cached_property
    def frontier(self) -> Frontier:
        """Every partition with its splits and their bounds, see `search.branches`."""
        if self._part is not None:
            return Frontier(self.subproblems, self._part.branches)
        wanted, sizes = self._competing
        keys = sorted(set(self.subproblems.keys(wanted, sizes)))
        if all(key.gpus <= SMALL for key in keys):
            self.pricer.prepare(keys)
        return Frontier(self.subproblems, bounded(self.request, self.subproblems, wanted, sizes))

    @property
    def _competing(self) -> tuple[list[Partition], list[NDArray[np.int64]]]:
        return competing(self.request, self.models, self.scope.only, self.scope.sizes)

    def _branches(self) -> Sequence[Branch]:
        return self.frontier.branches

    def may_stay(self, below: float) -> bool:
        """Whether bounds leave room for a plan below a value; known early where a role fits nowhere."""
        if not fit_alone(self.subproblems, *self._competing):
            return False
        nearest = Queue(self.frontier, self._branches()).up_to(lambda: math.nextafter(below, 0.0))
        return below == inf or next(nearest, None) is not None

    def part(
        self,
        architecture: str | None,
        only: Callable[[Partition], bool],
        *,
        start: Candidate | None,
        below: float,
        tolerance: float,
    ) -> SearchResult:
        """The best plan of a part of the space that was searched, with all that is known about it."""
        request = replace(self.request, architecture=architecture or self.request.architecture)
        branches = [b for b in self._branches() if only(b.partition) and may_carry(request, b.partition)]
        part = _Part(
            self.subproblems.of(request), branches, start, PART_WORK if self._proven else UNPROVEN_WORK
        )
        scope = Scope(below=below, tolerance=tolerance, steps=self.steps)
        return Search(request, self.models, self.pricer, scope, part).run()

    def run(self) -> SearchResult:
        """Price all roles, search a warm start for a good plan, then prove that there is no better one.

        Where time is up, or without a time limit `WORK` is done, the best plan that was met, with its gap;
        where none was, the first that is met.
        """
        work = min(self._part.work if self._part else WORK, self.scope.work)
        with clock.within(self.request.time_limit), clock.worth(None if self.request.time_limit else work):
            return self._run()

    def _run(self) -> SearchResult:
        branches = self._branches()
        self._warm_start(branches)
        if clock.over() and self.limit == inf and not self._part:
            self._meet_one(branches, None)
        left, gap = self._near(branches) if self._part else self._prove(branches)
        self._proven = gap == 0.0
        others = [c for c in self.kinds.values() if c is not self.best]
        return SearchResult(
            best=self.best,
            rivals=tuple(sorted(others, key=lambda c: c.seconds)),
            certificate=self._certificate(branches, left, gap),
            pricer=self.pricer,
            refused=self.pricer.refused,
            nearest=self.nearest,
            search=self,
        )

    # --- a first good plan ----------------------------------------------------------------------

    def _warm_start(self, branches: Sequence[Branch]) -> None:
        """The most promising skeletons of every kind, with a beam instead of a proof: a plan to beat."""
        kinds: dict[tuple[object, ...], list[Branch]] = {}
        priced = all(branch.priced.all() for branch in branches)  # else more kinds cost prices of their own
        for branch in branches:
            like = branch.partition
            # rollouts that never drain come last: bounds are far below, and simulations are long
            last = priced and like.pace == "continuous"
            kinds.setdefault((last, like.labels, like.role_placement), []).append(branch)
        while kinds:
            most, least = self._reach * self.limit, {kind: least_of(of) for kind, of in kinds.items()}
            kind = min(least, key=lambda kind: (least[kind] > most, kind[0], least[kind]))
            if least[kind] > most or least[kind] == inf:
                return
            near = self.frontier.promising(kinds[kind], most, self._warm_starts)
            if least_of(kinds[kind]) > least[kind] or self.frontier.price_more(near):
                continue  # bounds have risen
            del kinds[kind]
            skeletons = [e.branch.skeleton(e.row) for e in near if e.priced]
            for skeleton in sorted(skeletons, key=lambda s: float(self.subproblems.bound(s)))[
                : self._warm_starts
            ]:
                if self._ended:
                    return
                self._look(skeleton)

    def _look(self, skeleton: Skeleton) -> None:
        """The first plan of a skeleton that runs, of a beam through its pools: as many combinations of each
        as make `TOGETHER`."""
        pools = self._pools(skeleton)
        if len(pools[-1]):
            self._simulate(skeleton, [pool.only(round(TOGETHER ** (1 / len(pools)))) for pool in pools])

    def _meet_one(self, branches: Sequence[Branch], work: float | None) -> None:
        """The first plan that a warm start or a proof meets, however long that takes; nothing is counted.

        `work`: options that it may price; None: any number.
        """
        self._any = True
        with clock.lifted(), clock.worth(work):
            for meet in (self._meet_simplest, self._warm_start, partial(self._prove, rounds=AT_ONCE)):
                if self.best is None:
                    meet(branches)
        self._any, self._opened = False, 0
        self.counts.clear()

    def _meet_simplest(self, branches: Sequence[Branch]) -> None:
        """A simple skeleton of fewest pools, and where rivals are wanted one of one pool more: few sizes are
        priced."""
        for pools in sorted({len(branch.partition.groups) for branch in branches})[: self._warm_starts]:
            some = [branch for branch in branches if len(branch.partition.groups) == pools]
            fitting = filter(self.frontier.price_whole, islice(self.frontier.simplest(some), SIMPLEST))
            for entry in islice(fitting, 1):
                self._look(entry.branch.skeleton(entry.row))

    # --- proof ------------------------------------------------------------------------------------

    def _near(self, branches: Sequence[Branch]) -> tuple[int, float]:
        """Open skeletons as far as it is cheap; (plans left, gap)."""
        if self.limit == inf:
            return totals(branches)[1], 1.0
        return self._prove(branches, most=MOST_OPENED)

    def _prove(
        self, branches: Sequence[Branch], rounds: Sequence[Sequence[float]] = ABOVE, most: float = inf
    ) -> tuple[int, float]:
        """Open every skeleton whose bound is better than the best plan; (plans left, gap) where that ends
        early: at a time limit, after `most` skeletons, or where the rest of one would take too long."""
        if not branches:
            return 0, 0.0
        queue, opened, looked_at = Queue(self.frontier, branches), 0, 0
        order: Iterator[Entry] = queue.up_to(lambda: self.threshold)
        for factors in rounds:
            later: list[Entry] = []
            for entry in order:
                if entry.bound > self.threshold:
                    break
                whole, looked_at = factors[-1] == inf, looked_at + 1
                fitting = entry.branch.fitting_in(entry.row)
                closes = fitting <= FEW if whole else entry.bound * factors[-1] >= self.threshold
                if most < inf and factors is not rounds[0] and not closes:
                    later.append(entry)
                    continue
                opened += 1
                least = min(entry.bound, *(e.bound * rounds[0][-1] for e in later[:1]), inf)
                self._tell(min(looked_at, len(queue)), len(queue), least)
                ended = opened > most or self._ended
                closed = None if ended else self._open(entry.branch, entry.row, factors)
                if closed is None:
                    begun, below = factors is rounds[0], self.threshold
                    left, least = queue.rest(below) if begun else (0, inf)
                    seen = [e for e in (*later, entry, *(() if begun else order)) if e.bound <= below]
                    least = min(least, *(e.bound for e in seen), inf)
                    return left + fitting_of(seen), _gap(least, self.limit) if self.best else 1.0
                if not closed:
                    later.append(entry)
            order = iter(later)
        rest = [
            e for e in later if e.bound * rounds[0][-1] <= self.threshold
        ]  # below that all were looked at
        left = fitting_of(rest)
        least = min((e.bound * rounds[0][-1] for e in rest), default=self.limit)
        return left, _gap(least, self.limit) if rest else 0.0

    def _tell(self, done: int, total: int, least: float) -> None:
        """How far the proof has come; `least`: the least bound that is left."""
        best_s = self.best.seconds if self.best else None
        gap = _gap(least, self.limit) if self.best else None
        tell(Progress("looking at plans", done, total, "ways to share the GPUs", best_s, gap))

    def _open(self, branch: Branch, row: int, factors: Sequence[float]) -> bool | None:
        """Every plan of a skeleton, counted, and True; None where time ended before.

        First those little above the bound of the skeleton, then more, until the best plan is no worse
        than what was looked at: the better the plan to beat, the fewer combinations there are. Where the last
        of `factors` is not enough, nothing is counted, and the skeleton waits for what others bring. What
        stays closed is counted at the end.
        """
        skeleton, fitting = branch.skeleton(row), branch.fitting_in(row)
        clock.spend(ROLLOUT_OPENING if self._by_pace(skeleton) else OPENING)
        least, before = float(self.subproblems.bound(skeleton)), self.counts.copy()
        if least > self.threshold:
            return True
        close = self.threshold < inf and skeleton.partition.pace != "continuous"  # whose bound is far below
        for above in factors if close else (inf,):
            limit = min(self.threshold, least * above)
            try:
                self._open_up_to(limit, skeleton, fitting)
            except clock.OutOfTime:
                self.counts = before
                return None if self._ended else False
            if self.threshold <= limit:
                self._opened += fitting
                return True
            self.counts = before.copy()
        return False

    def _open_up_to(self, limit: float, skeleton: Skeleton, fitting: int) -> None:
        """The plans of a skeleton with a bound up to `limit`."""
        before = self.counts["simulated"] + self.counts["refused"]
        pools = self._pools(skeleton, limit)
        fitting_alone = self.subproblems.fitting_alone(skeleton)
        self.counts["infeasible"] += fitting - fitting_alone  # of roles that were priced only now
        if not len(pools[-1]):
            self.counts.update(counted_empty(fitting_alone, pools[-1]))
            return
        unfit, beaten = self._simulate(skeleton, pools, limit)
        simulated = self.counts["simulated"] + self.counts["refused"] - before
        self.counts.update(counted(fitting_alone, pools, unfit, beaten, simulated))

    def _pools(self, skeleton: Skeleton, limit: float | None = None) -> list[PoolTable]:
        """The combinations of each pool, or those of one that has none; some of them without `limit`."""
        proves = limit is not None
        order, continuous = [*range(len(skeleton.sizes))], proves and self._by_pace(skeleton)
        if continuous:  # what was simulated may leave nothing of it
            order.sort(key=lambda i: "rollout" not in skeleton.partition.groups[i])
        pools: dict[int, PoolTable] = {}
        for i in order:
            if limit is None:
                pools[i] = self.subproblems.beam(skeleton, i)
            else:
                pools[i] = self.subproblems.pool(skeleton, i, limit)
            if continuous and i == order[0]:
                pools[i] = self._promising(skeleton, pools[i])
            if not len(pools[i]):
                lacking = pools[i].shortfall
                if pools[i].infeasible and (self.nearest is None or lacking < self.nearest[2]):
                    self.nearest = skeleton, skeleton.pools()[i].name, lacking
                return [pools[i]]
            if continuous and i == order[0]:
                clock.spend(OPENING - ROLLOUT_OPENING)
        return [pools[i] for i in sorted(pools)]

    def _simulate(
        self, skeleton: Skeleton, pools: list[PoolTable], limit: float | None = None
    ) -> tuple[int, int]:
        """Judge combinations of a skeleton, best bound first, while they may win; (unfit, beaten) ones.

        Without `limit`, until one of them runs.
        """
        if self._by_pace(skeleton):
            return self._simulate_by_pace(skeleton, pools, limit)
        proves, prices = limit is not None, Known()
        rows, bounds, unfit = self.subproblems.combined(skeleton, pools, inf if limit is None else limit)
        for choice, bound in zip(rows, bounds.tolist(), strict=True):
            if proves and self.limit < inf:
                clock.check()
            if proves and bound > self.threshold:
                break
            placement = self.subproblems.placement(skeleton, pools, choice)
            if proves and streaming_seconds(self.request, self.models, placement, prices) > self.threshold:
                continue
            if self._judge(placement, proves=proves) and not proves:
                break
        return unfit, 0

    # --- rollouts that never drain ----------------------------------------------------------------

    def _by_pace(self, skeleton: Skeleton) -> bool:
        """Whether bounds are far below the steps of a skeleton: its rollout never drains."""
        return skeleton.partition.pace == "continuous" and self.request.objective != "memory"

    def _simulate_by_pace(
        self, skeleton: Skeleton, pools: list[PoolTable], limit: float | None
    ) -> tuple[int, int]:
        """The same, the fastest learners first, which say most of the others with their rollout."""
        proves, lends = limit is not None, skeleton.partition.schedule.lend
        rows, bounds, unfit = self.subproblems.combined(skeleton, pools, inf if limit is None else limit)
        learners = self.subproblems.beside(skeleton, pools, rows)
        rollout = skeleton.partition.pool_of("rollout")
        assert rollout is not None
        ran, beaten = self._ran(skeleton, pools[rollout]), 0
        for i in np.lexsort((bounds, learners[:, 0])).tolist():
            learner, *moves = learners[i].tolist()
            others = ran[rows[i, rollout]]
            if proves and self.limit < inf:
                clock.check()
            if proves and bounds[i] > self.threshold:
                continue
            if proves and not lends and any(x.excludes(learner, moves, self._slower) for x in others):
                beaten += 1
                continue
            placement = self.subproblems.placement(skeleton, pools, rows[i])
            moves += lent_moves(self.request, self.models, placement)
            slower = any(x.beats(learner, moves, self.threshold) for x in others)
            if proves and slower and placement not in self._seen:
                beaten += 1
            elif plan := self._judge(placement, proves=proves):
                others.append(Beside(learner, moves, value(self.request, plan)))
                if not proves:
                    break
        return unfit, beaten

    def _promising(self, skeleton: Skeleton, rollouts: PoolTable) -> PoolTable:
        """The engines of a skeleton that were not simulated with learners as fast as its fastest, or were
        no slower than the best plan."""
        learner, sync = self.subproblems.least_beside(skeleton)
        moves = [sync, 0.0, 0.0] if skeleton.partition.schedule.lend else [sync]
        out = (
            any(x.excludes(learner, moves, self._slower) for x in of) for of in self._ran(skeleton, rollouts)
        )
        return rollouts.without(np.fromiter(out, dtype=np.bool_, count=len(rollouts)))

    @property
    def _slower(self) -> float:
        """Seconds of a step above which it is not that of the best plan."""
        return self.limit * (1 + 2 * EQUAL)

    def _ran(self, skeleton: Skeleton, rollouts: PoolTable) -> list[list[Beside]]:
        """Simulated plans with each engine of a table, whatever ran at the same time."""
        partition, sizes = skeleton.partition, skeleton.sizes
        rollout, actor = partition.pool_of("rollout"), partition.pool_of("actor")
        assert rollout is not None
        assert actor is not None
        schedule, [table] = partition.schedule, rollouts.tables
        hosts = sizes[actor] if schedule.lend else None
        pool = partition.hardware[rollout], sizes[rollout], schedule, partition.adapters_only, hosts
        options = (table.options[row] for row in rollouts.rows[:, 0].tolist())
        return [self._continuous.setdefault((option, pool), []) for option in options]

    # --- counting ---------------------------------------------------------------------------------

    def _certificate(self, branches: Sequence[Branch], left: int, gap: float) -> Certificate:
        """Where every plan went; roles that do not fit alone make a plan infeasible."""
        space, fitting = totals(branches)
        if self.counts["dominated"] and any(branch.partition.schedule.lend for branch in branches):
            gap = max(gap, LENT_GAP)
        return Certificate(
            space=space,
            infeasible=space - fitting + self.counts["infeasible"] + self.counts["refused"],
            dominated=self.counts["dominated"],
            simulated=self.counts["simulated"],
            bounded=fitting - self._opened - left + self.counts["bounded"],
            unexplored=left,
            gap=gap,
        )

    def _judge(self, placement: Placement, *, proves: bool) -> Candidate | None:
        """The simulated plan; simulated once, even if the warm start met it first."""
        if placement not in self._seen:
            limit, steps = self.limit, self.steps
            self._seen[placement] = judged(self.request, self.models, placement, cutoff=limit, steps=steps)
            if self._seen[placement] is None:
                clock.spend(REFUSED)
            elif placement.schedule.asynchronous:
                clock.spend(STALE)
        candidate = self._seen[placement]
        label, wanted = placement.architecture, self.request.architecture
        if label in self.request.left_out or wanted not in (None, label):
            candidate = None
        if proves:
            self.counts["simulated" if candidate else "refused"] += 1
        if candidate is None:
            return None
        kind = placement.architecture, placement.role_placement
        if kind not in self.kinds or candidate.seconds < self.kinds[kind].seconds:
            self.kinds[kind] = candidate
        reached = value(self.request, candidate)
        if reached < self.limit or (proves and reached <= self.limit * (1 + EQUAL)):
            self.best = candidate
        return candidate


def _gap(least: float, best: float) -> float:
    """Share of the best value by which a plan that was not looked at could be better; `least`: its bound.

    A bound that equals the best value may round above it.
    """
    return max(0.0, 1 - least / best)
