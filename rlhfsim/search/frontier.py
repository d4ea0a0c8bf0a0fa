"""Skeletons in the order of their bounds; roles are priced only where a bound leaves room for a plan.

A bound with the floors of roles that are not priced is no higher than the one with their prices. So where
all roles of the skeleton with the least bound are priced, no other one has less, whatever its roles are
priced at: the order is that of a search that prices everything first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from rlhfsim.search import clock
from rlhfsim.search.branches import Bounds, Branch
from rlhfsim.search.columns import Floats, Ints
from rlhfsim.search.options import PriceKey
from rlhfsim.search.parallel import serial
from rlhfsim.search.subproblems import Subproblems
from rlhfsim.specs.workload.roles import GENERATING, MODELS

SMALL = 64
"""GPUs of a pool up to which its options are so few that all roles are priced at once, on all cores."""
AHEAD = 4
"""Skeletons of which a role is priced in one go, those with the least bounds."""
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

    def price_all(self, keys: Sequence[PriceKey]) -> None:
        """Prices all roles, where each has few options."""
        if all(key.gpus <= SMALL for key in keys):
            self._price(keys)
            for branch in self.branches:
                branch.bounds.raise_up_to(inf)

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
        sizes = [len(branch.sizes) for branch in branches]
        self._owner = np.repeat(np.arange(len(branches)), sizes)
        self._row = np.concatenate([np.arange(0), *(np.arange(size) for size in sizes)])
        self._left = np.ones(len(self._row), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._row)

    def up_to(self, limit: Callable[[], float]) -> Iterator[Entry]:
        """Takes one after the other while their bounds are not above `limit`; roles of each are priced before
        while there is time."""
        while len(order := self._order(limit())):
            bound, timely = self._bounds(), True
            for place, index in enumerate(order.tolist()):
                if bound[index] > limit():
                    return
                entry = self._entry(index, bound)
                if not entry.priced and timely:
                    ahead = (self._entry(i, bound) for i in order[place:].tolist())
                    timely = self._frontier.price_more([e for e, _ in zip(ahead, range(AHEAD), strict=False)])
                    if timely:
                        break  # bounds have risen
                self._left[index] = False
                yield entry

    def rest(self, limit: float) -> tuple[int, float]:
        """Plans of those that were not taken, with bounds up to `limit`, and the least of these bounds."""
        order, bound = self._order(limit), self._bounds()
        owner = self._owner[order]
        counts = {b.bounds: np.array(list(b.bounds.fitting()), object) for b in self._branches}
        rows = [(self._branches[i], self._row[order[owner == i]]) for i in np.unique(owner).tolist()]
        return sum(counts[b.bounds][of].sum() for b, of in rows), float(bound[order].min(initial=inf))

    def _order(self, limit: float) -> Ints:
        for branch in self._branches:
            branch.bounds.raise_up_to(limit)
        bound = self._bounds()
        left = np.flatnonzero(self._left & (bound <= limit) & (bound < inf))
        return left[np.argsort(bound[left], kind="stable")]

    def _bounds(self) -> Floats:
        return np.concatenate([np.empty(0), *(branch.bound for branch in self._branches)])

    def _entry(self, index: int, bound: Floats) -> Entry:
        return Entry(float(bound[index]), self._branches[self._owner[index]], int(self._row[index]))
