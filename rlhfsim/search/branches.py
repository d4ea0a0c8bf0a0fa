"""Partitions with the bounds of their skeletons, which rise as roles are priced, in the order of bounds.

Roles are priced only where a bound leaves room for a plan. A bound with the floors of roles that are not
priced is no higher than the one with their prices. So where all roles of the skeleton with the least bound
are priced, no other one has less, whatever its roles are priced at: the order is that of a search that
prices everything first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, prod
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.search import clock
from rlhfsim.search.bound import objective_bound
from rlhfsim.search.columns import Bools, Floats, Ints, Numbers
from rlhfsim.search.least import Least
from rlhfsim.search.merging import MERGE
from rlhfsim.search.options import PriceKey
from rlhfsim.search.parallel import serial
from rlhfsim.search.request import Request
from rlhfsim.search.space import Partition, Skeleton
from rlhfsim.search.subproblems import Subproblems
from rlhfsim.specs.workload.roles import GENERATING, MODELS

ROWS = 20_000
"""Skeletons that are bounded in one go: memory stays small."""


Distinct = tuple[Ints, NDArray[np.int32]]
"""Distinct numbers of GPUs of a pool, and (n,) which of them it has in each skeleton."""


class PoolSizes:
    """One pool of a partition on every number of GPUs that it may have."""

    def __init__(self, subproblems: Subproblems, partition: Partition, index: int, sizes: Distinct) -> None:
        """`sizes`: its numbers of GPUs."""
        self._subproblems, self._partition, self._index = subproblems, partition, index
        gpus, self.at = sizes
        self.gpus: list[int] = gpus.tolist()
        self._places: dict[PriceKey, list[int]] = {}
        """Numbers of GPUs for which a role is priced, by their place."""
        for place, number in enumerate(self.gpus):
            for key in subproblems.keys_of(partition, index, number):
                self._places.setdefault(key, []).append(place)
        self._least = [self._least_of(number) for number in self.gpus]
        self._numbers = np.array([least.numbers.values for least in self._least])
        self._priced = np.array([least.priced for least in self._least], dtype=np.bool_)
        self._old = np.zeros(len(self.gpus), dtype=np.bool_)
        """Numbers of GPUs on which a role was priced since."""

    def _least_of(self, gpus: int) -> Least:
        return self._subproblems.least(self._partition, self._index, gpus)

    def update(self, priced: Collection[PriceKey]) -> Bools | None:
        """(n,) skeletons in which the pool has a role that was priced now; None: none has."""
        places = [place for key in priced for place in self._places.get(key, ()) if not self._priced[place]]
        if not places:
            return None
        changed = np.zeros(len(self.gpus), dtype=np.bool_)
        changed[places] = True
        self._old |= changed
        return np.asarray(changed[self.at])

    def least(self, place: int) -> Least:
        """What it contributes at least on one of its numbers of GPUs."""
        if self._old[place]:
            self._least[place] = found = self._least_of(self.gpus[place])
            self._numbers[place], self._priced[place] = found.numbers.values, found.priced
            self._old[place] = False
        return self._least[place]

    @property
    def every(self) -> list[Least]:
        """The same on each of them."""
        return [self.least(place) for place in range(len(self.gpus))]

    def numbers(self, rows: Ints) -> Numbers:
        """What the pool contributes at least in some skeletons; inf where a role fits nowhere."""
        places = self.at[rows]
        for place in {*places[self._old[places]].tolist()}:
            self.least(place)
        return Numbers(self._numbers[places])

    def priced(self, rows: Ints) -> Bools:
        """Whether all of its roles are, as `numbers` of these skeletons knew."""
        return self._priced[self.at[rows]]


class Bounds:
    """The skeletons of a partition, whatever its weight path, with what no plan of each goes below."""

    def __init__(
        self,
        request: Request,
        subproblems: Subproblems,
        partition: Partition,
        sizes: Ints,
        each: Sequence[Distinct],
    ) -> None:
        """Roles that are not priced have their floors in the bounds. `each`: the sizes of each pool."""
        self._request, self._partition, self.sizes = request, partition, sizes
        self.pools = [PoolSizes(subproblems, partition, i, own) for i, own in enumerate(each)]
        self.bound = np.zeros(len(sizes))
        self.priced = np.zeros(len(sizes), dtype=np.bool_)
        self._stale = np.ones(len(sizes), dtype=np.bool_)
        """Skeletons whose bound may rise with what is priced."""
        self._lowest: dict[tuple[int, float, bool], Ints] = {}
        """What `lowest` said since bounds were last raised."""
        self.raise_up_to(inf)

    @property
    def least(self) -> float:
        """The least bound known for any skeleton."""
        return float(self.bound.min())

    def update(self, priced: Collection[PriceKey]) -> None:
        """Notes which bounds may rise, with roles that are priced now or have closer floors."""
        for pool in self.pools:
            if (changed := pool.update(priced)) is not None:
                self._stale |= changed
                self._lowest.clear()

    def raise_up_to(self, limit: float) -> None:
        """Raises the bounds that are not above `limit` to what is priced."""
        stale = np.flatnonzero(self._stale & (self.bound <= limit))
        if not len(stale):
            return
        for rows in np.split(stale, range(ROWS, len(stale), ROWS)):
            pools = [pool.numbers(rows) for pool in self.pools]
            fits = np.logical_and.reduce([np.isfinite(p.until_free_s) for p in pools])
            bound = objective_bound(self._partition, self._request, pools, np.zeros(len(rows)))
            self.bound[rows] = np.where(fits, bound, inf)
            self.priced[rows] = np.logical_and.reduce([pool.priced(rows) for pool in self.pools])
        self._stale[stale] = False
        self._lowest.clear()

    def lowest(self, count: int, limit: float, *, priced: bool) -> Ints:
        """The `count` skeletons with the least bounds up to `limit`, the least first; `priced` ones alone."""
        name = count, limit, priced
        if name not in self._lowest:
            self.raise_up_to(limit)
            self._lowest[name] = self._least_rows(count, limit, priced=priced)
        return self._lowest[name]

    def _least_rows(self, count: int, limit: float, *, priced: bool) -> Ints:
        bound = np.where(self.priced, self.bound, inf) if priced else self.bound
        last = min(count, len(bound)) - 1
        rows = np.flatnonzero((bound <= min(limit, np.partition(bound, last)[last])) & (bound < inf))
        return rows[np.argsort(bound[rows], kind="stable")][:count]

    def unpriced(self, row: int) -> list[PriceKey]:
        """Roles of a skeleton that are not priced."""
        return [floor.key for pool in self.pools for floor in pool.least(pool.at[row]).unpriced]

    def legal(self, rows: Ints | None = None) -> int:
        """Plans of some skeletons, or of all."""
        return self._plans([[least.legal for least in pool.every] for pool in self.pools], rows)

    def fitting(self, rows: Ints | None = None) -> int:
        """Those whose roles fit by themselves; one that is not priced keeps all options."""
        return self._plans([[least.fitting for least in pool.every] for pool in self.pools], rows)

    def _plans(self, factors: Sequence[Sequence[int]], rows: Ints | None) -> int:
        columns, total = [np.array(of, dtype=object) for of in factors], 0
        rows = np.arange(len(self.sizes)) if rows is None else rows
        for some in np.split(rows, range(ROWS, len(rows), ROWS)):
            each = (column[pool.at[some]] for column, pool in zip(columns, self.pools, strict=True))
            total += int(reduce(mul, each).sum())
        return total


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """A partition with the bounds of its skeletons."""

    partition: Partition
    bounds: Bounds
    """Shared by partitions that differ in the weight path, which adds nothing yet."""

    @property
    def sizes(self) -> Ints:
        """(n, groups) GPUs."""
        return self.bounds.sizes

    @property
    def bound(self) -> Floats:
        """Least value of each skeleton; inf where a role fits nowhere."""
        return self.bounds.bound

    @property
    def priced(self) -> Bools:
        """Skeletons all roles of which are priced; one that is not has its floor in the bound."""
        return self.bounds.priced

    def fitting_in(self, row: int) -> int:
        """Plans of a skeleton whose roles fit by themselves; one that is not priced keeps all options."""
        return prod(pool.least(pool.at[row]).fitting for pool in self.bounds.pools)

    def skeleton(self, row: int) -> Skeleton:
        """One of them."""
        return Skeleton(partition=self.partition, sizes=tuple(self.sizes[row].tolist()))


def bounded(
    request: Request, subproblems: Subproblems, wanted: Sequence[Partition], sizes: Sequence[Ints]
) -> list[Branch]:
    """Every partition with its splits."""
    known: dict[tuple[object, ...], Branch] = {}
    pools: dict[tuple[object, ...], list[Distinct]] = {}
    branches = []
    for partition, rows in zip(wanted, sizes, strict=True):
        if len(rows):
            shape = partition.groups, partition.hardware  # schedules share their splits
            if shape not in pools:
                pools[shape] = [_numbered(column) for column in rows.T]
            name = *shape, partition.schedule, partition.adapters_only
            if name not in known:
                bounds = Bounds(request, subproblems, partition, rows, pools[shape])
                known[name] = Branch(partition=partition, bounds=bounds)
            branches.append(replace(known[name], partition=partition))
    return branches


def _numbered(gpus: Ints) -> Distinct:
    distinct, at = np.unique(gpus, return_inverse=True)
    return distinct, at.astype(np.int32)


def least_of(branches: Sequence[Branch]) -> float:
    """The least bound of their skeletons."""
    return min(bounds.least for bounds in {branch.bounds for branch in branches})


def totals(branches: Sequence[Branch]) -> tuple[int, int]:
    """Plans of all skeletons, and those whose roles fit by themselves."""
    times: dict[Bounds, int] = {}
    for branch in branches:
        times[branch.bounds] = times.get(branch.bounds, 0) + 1
    legal = sum(count * bounds.legal() for bounds, count in times.items())
    return legal, sum(count * bounds.fitting() for bounds, count in times.items())


def fit_alone(subproblems: Subproblems, wanted: Sequence[Partition], sizes: Sequence[Ints]) -> bool:
    """Whether every role has an option somewhere; looked for on most GPUs first, until one is found, or time
    is up."""
    keys = sorted(subproblems.keys(wanted, sizes), key=lambda key: -key.gpus)
    for role in sorted({key.role for key in keys}, key=MERGE.index):
        of_role = (key for key in keys if key.role == role)
        if not any(subproblems.pricer.fits(key) for key in of_role if not clock.over()):
            return False
    return True


AHEAD = 4
"""Skeletons of which a role is priced in one go, those with the least bounds."""
SORTED = 4_000
"""Skeletons that are put in order at a time."""
CHEAPEST = (*GENERATING, *reversed(MODELS))
"""Order in which the roles of a skeleton are priced: a rollout has no floor, trained roles most options."""


class Entry(NamedTuple):
    """A skeleton with its bound."""

    bound: float
    branch: Branch
    row: int

    @property
    def priced(self) -> bool:
        """Whether all of its roles are."""
        return bool(self.branch.priced[self.row])


@dataclass(frozen=True, slots=True)
class Frontier:
    """The skeletons of a search."""

    subproblems: Subproblems
    branches: Sequence[Branch]

    def price_more(self, entries: Sequence[Entry]) -> bool:
        """Prices one role more of each skeleton that has some left, after their floors were raised once.

        Whether there was one, and time.
        """
        left = [e.branch.bounds.unpriced(e.row) for e in entries if not e.priced]
        if loose := self.subproblems.tightened(key for of in left[:AHEAD] for key in of):
            self._update(loose)
            return not clock.over()
        keys = {min(of, key=lambda key: CHEAPEST.index(key.role)) for of in left[:AHEAD]}
        with serial():  # tables that are sent between processes cost as much time as they save, and memory
            return bool(keys) and not clock.over() and self._price(sorted(keys))

    @staticmethod
    def simplest(branches: Sequence[Branch]) -> Iterator[Entry]:
        """Skeletons with as many pools: those on most GPUs first, then those whose sizes are sums of fewest
        powers of two, which most layouts divide, then those with the least bounds."""
        rows = [(branch, row) for branch in branches for row in range(len(branch.sizes))]
        sizes = np.concatenate([branch.sizes for branch in branches])
        powers = np.bitwise_count(sizes).sum(axis=1)
        bound = np.concatenate([branch.bound for branch in branches])
        for index in np.lexsort((bound, powers, -sizes.sum(axis=1))).tolist():
            branch, row = rows[index]
            if branch.bound[row] < inf:
                yield Entry(float(branch.bound[row]), branch, row)

    def price_whole(self, entry: Entry) -> bool:
        """Prices all roles of a skeleton, until one fits nowhere; whether each fits by itself."""
        bounds = entry.branch.bounds
        for key in sorted(bounds.unpriced(entry.row), key=lambda key: CHEAPEST.index(key.role)):
            with serial():
                self._price([key])
            bounds.raise_up_to(inf)
            if bounds.bound[entry.row] == inf:
                return False
        return True

    def _price(self, keys: Sequence[PriceKey]) -> bool:
        """Whether there was time for all."""
        enough = self.subproblems.pricer.prepare(keys)
        self._update({key for key in keys if self.subproblems.pricer.has(key)})
        return enough

    def _update(self, keys: Collection[PriceKey]) -> None:
        """Bounds may rise where these roles are."""
        for bounds in {id(b.bounds): b.bounds for b in self.branches}.values():
            bounds.update(keys)

    def promising(self, branches: Sequence[Branch], limit: float, count: int) -> list[Entry]:
        """The best skeletons with bounds up to `limit`, at most `count` of a branch and twice as many in all;
        without time those alone that are priced."""
        rows: dict[Bounds, list[int]] = {}
        met: list[float] = []
        for bounds in sorted(dict.fromkeys(branch.bounds for branch in branches), key=lambda of: of.least):
            if len(met) >= 2 * count and bounds.least > sorted(met)[2 * count - 1]:
                break  # bounds only rise
            rows[bounds] = bounds.lowest(count, limit, priced=clock.over()).tolist()
            met += bounds.bound[rows[bounds]].tolist()
        entries = [
            Entry(float(branch.bound[row]), branch, row)
            for branch in branches
            for row in rows.get(branch.bounds, ())
        ]
        return sorted(entries, key=lambda entry: entry.bound)[: 2 * count]


class Queue:
    """Skeletons of some branches, the least bound first."""

    def __init__(self, frontier: Frontier, branches: Sequence[Branch]) -> None:
        """None of them was taken yet."""
        self._frontier, self._branches = frontier, branches
        self._starts = np.cumsum([0, *(len(branch.sizes) for branch in branches)])
        """Where each branch begins among all skeletons, and where the last ends."""
        self._left = np.ones(len(self), dtype=np.bool_)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def up_to(self, limit: Callable[[], float]) -> Iterator[Entry]:
        """Takes one after the other while their bounds are not above `limit`; roles of each are priced before
        while there is time."""
        while True:
            order, bound = self._first(limit())
            if not len(order):
                return
            timely = True
            for place, index in enumerate(order.tolist()):
                if bound[place] > limit():
                    return
                ahead = slice(place, place + AHEAD)
                entries = list(map(self._entry, order[ahead].tolist(), bound[ahead].tolist()))
                if not entries[0].priced and timely:
                    timely = self._frontier.price_more(entries)
                    if timely:
                        break  # bounds have risen
                self._left[index] = False
                yield entries[0]

    def rest(self, limit: float) -> tuple[int, float]:
        """Plans of those that were not taken, with bounds up to `limit`, and the least of these bounds."""
        self._raise(limit)
        rows: dict[Bounds, list[Ints]] = {}
        for i, branch in enumerate(self._branches):
            rows.setdefault(branch.bounds, []).append(self._within(i, limit))
        taken = {bounds: np.concatenate(some) for bounds, some in rows.items()}
        plans = sum(of.fitting(some) for of, some in taken.items())
        return plans, float(min(of.bound[some].min(initial=inf) for of, some in taken.items()))

    def _first(self, limit: float) -> tuple[Ints, Floats]:
        """Those left with bounds up to `limit`, the least first: `SORTED` of them, and all like the last."""
        self._raise(limit)
        left, bound = np.arange(0), np.empty(0)
        for i, branch in enumerate(self._branches):
            rows = self._within(i, limit)
            left = np.concatenate([left, self._starts[i] + rows])
            bound = np.concatenate([bound, branch.bound[rows]])
            if len(left) > SORTED:
                limit = float(np.partition(bound, SORTED)[SORTED])
                left, bound = left[bound <= limit], bound[bound <= limit]
        order = np.argsort(bound, kind="stable")
        return left[order], bound[order]

    def _raise(self, limit: float) -> None:
        for branch in self._branches:
            branch.bounds.raise_up_to(limit)

    def _within(self, place: int, limit: float) -> Ints:
        """Rows of a branch that are left, with bounds up to `limit`."""
        bound, left = self._branches[place].bound, self._left[slice(*self._starts[place : place + 2])]
        return np.flatnonzero(left & (bound <= limit) & (bound < inf))

    def _entry(self, index: int, bound: float) -> Entry:
        branch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return Entry(bound, self._branches[branch], index - int(self._starts[branch]))


def fitting_of(entries: Sequence[Entry]) -> int:
    """Plans of some skeletons whose roles fit by themselves; those of a branch are counted in one go."""
    rows: dict[Bounds, list[int]] = {}
    for entry in entries:
        rows.setdefault(entry.branch.bounds, []).append(entry.row)
    return sum(bounds.fitting(np.array(of)) for bounds, of in rows.items())
