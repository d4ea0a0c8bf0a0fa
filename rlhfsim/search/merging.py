"""The roles of a pool, merged one by one: the combinations that fit and that no other one beats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from rlhfsim.search import clock
from rlhfsim.search.agreement import Placed, agreeing
from rlhfsim.search.columns import Bools, Combinations, Floats, Ints, Numbers, Sums, together
from rlhfsim.search.dominance import distinct, undominated
from rlhfsim.search.options import OptionTable
from rlhfsim.search.pools import (
    Alone,
    Subproblem,
    add_sync,
    alone,
    by_times,
    classes_of,
    compared,
    fits_of,
    labelled,
    numbers_of,
    times_of,
)
from rlhfsim.specs.workload.roles import ENDS, FROZEN, GENERATING, TRAINED

Bound = Callable[[Numbers], Floats]
"""What no plan of the skeleton with these numbers of a pool goes below."""
MERGE = (*TRAINED, *GENERATING, *FROZEN)
"""Order in which roles are merged: those that decide most first."""
CHUNK = 6_000
"""Combinations that are looked at in one go."""
BATCH = 12_000
"""Combinations that go on together to the next role."""
PER_OPTION = 10
"""Combinations that take as long as the price of one option (671B on 1,024 GPUs: some 12 us)."""
WORTH = 2_000
"""Combinations among which dominance is looked for before all roles are merged."""
NARROWER = 0.9
"""Share of the options of all roles: roles are narrowed again while no more than this stay."""
OF_A_CLASS = 8
"""Whole combinations of a class with which others are compared before all of their roles are merged."""
ROUNDING = 1e-9
"""Relative difference by which sums in another order may differ."""
LOOKED_AT = 10_000
"""Combinations of all roles above which some good ones are looked for first."""


@dataclass(slots=True, kw_only=True, eq=False)
class PoolTable:
    """The combinations of a pool that may be part of the best plan."""

    tables: tuple[OptionTable, ...]
    """Options of each role, dominated ones left out."""
    originals: tuple[OptionTable, ...]
    """Those that were left out included."""
    rows: Ints
    """(n, roles) row of each table."""
    numbers: Numbers
    held: Floats
    """(n, moments, views, 3) bytes, see `Subproblem.held_elsewhere`."""
    considered: int
    """Combinations of the tables."""
    bounded: int
    infeasible: int
    dominated: int
    shortfall: float
    """Least bytes that are missing on a GPU, where nothing fits."""

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, most: int) -> PoolTable:
        """The first combinations, which take least; nothing is counted."""
        if len(self) <= most:
            return self
        few = slice(0, most)
        return replace(self, rows=self.rows[few], numbers=self.numbers.only(few), held=self.held[few])

    def without(self, beaten: Bools) -> PoolTable:
        """The others, where whole combinations are beaten by plans that were simulated."""
        stays, count = ~beaten, int(beaten.sum())
        numbers, held = self.numbers.only(stays), self.held[stays]
        dominated = self.dominated + count
        return replace(self, rows=self.rows[stays], numbers=numbers, held=held, dominated=dominated)


def pool_table(
    subproblem: Subproblem, bound: Bound, limit: float, each: Alone | None = None, *, beam: int | None = None
) -> PoolTable:
    """The combinations that fit and are not dominated; only those with a bound up to `limit` may win.

    Options that cannot win with the fastest of the other roles, or cannot fit with the leanest, go first.
    Then roles are merged one by one. A combination of some is dropped when its numbers with the fastest
    options of the roles to come cannot win, when its bytes with the leanest of them do not fit, or when
    another one of its class is no worse in any number and any moment. With `beam` only so many with the least
    bound go on: a quick look, not a proof. `each`: the roles `alone`, where they are known.

    Raises:
        OutOfTime: time is up, and it is more than a quick look.
    """
    each = each or alone(subproblem)
    merge = _Merge(subproblem, each, bound, limit, beam)
    merge.run()
    return PoolTable(
        tables=subproblem.tables,
        originals=subproblem.originals,
        rows=merge.rows,
        numbers=merge.numbers,
        held=merge.held,
        considered=prod(map(len, each)),
        **{line: merge.counts[line] for line in ("bounded", "infeasible", "dominated")},
        shortfall=float(merge.shortfall),
    )


def counted(
    fitting: int, pools: Sequence[PoolTable], unfit: int, beaten: int, simulated: int
) -> dict[str, int]:
    """Where the plans of a skeleton went: dominated roles, then pool by pool, then their combinations."""
    considered = prod(p.considered for p in pools)
    hopeful = prod(p.considered - p.bounded for p in pools)
    feasible = prod(p.considered - p.bounded - p.infeasible for p in pools)
    left = prod(len(p) for p in pools)
    return {
        "dominated": fitting - considered + feasible - left + beaten,
        "infeasible": hopeful - feasible + unfit,
        "bounded": considered - hopeful + left - unfit - beaten - simulated,
    }


def counted_empty(fitting: int, pool: PoolTable) -> dict[str, int]:
    """Where the plans of a skeleton went, one of whose pools has no combination left: where it went.

    A pool one of whose roles has no option has no plans to count.
    """
    own = prod(map(len, pool.originals))
    others = fitting // own if own else 0
    return {
        "dominated": others * (own - pool.considered + pool.dominated),
        "infeasible": others * pool.infeasible,
        "bounded": others * pool.bounded,
    }


class _Reached:
    """Some whole combinations that fit, by class."""

    def __init__(self, columns: Floats, classes: Ints) -> None:
        """(n, columns) as dominance compares them, and (n,) their classes."""
        self._classes, place = np.unique(classes, return_inverse=True)
        self._columns = np.full((len(self._classes) + 1, OF_A_CLASS, columns.shape[1]), np.inf)
        rows = _first_of_each(place, columns.sum(axis=1))
        self._columns[place[rows], _ranks(place[rows])] = columns[rows]

    def beats(self, columns: Floats, classes: Ints) -> Bools:
        """(n,) whether one of the class is no worse in any column, and better in some."""
        place = np.searchsorted(self._classes, classes)
        known = np.append(self._classes, 0)[place] == classes
        found = self._columns[np.where(known, place, len(self._classes))]
        mine = columns[:, None]
        return np.asarray(
            ((mine >= found).all(axis=2) & (mine > found * (1 + ROUNDING)).any(axis=2)).any(axis=1)
        )


def _first_of_each(classes: Ints, sizes: Floats) -> Ints:
    """The `OF_A_CLASS` rows of each class with the least sizes, class by class."""
    order = np.lexsort((sizes, classes))
    return np.asarray(order[_ranks(classes[order]) < OF_A_CLASS])


def _ranks(classes: Ints) -> Ints:
    """Place of each row among those of its class, which are in adjacent rows."""
    starts = np.flatnonzero(np.diff(classes, prepend=classes[:1] - 1))
    sizes = np.diff(starts, append=len(classes))
    return np.asarray(np.arange(len(classes)) - np.repeat(starts, sizes))


class _Merge:
    """The roles of a pool, merged one by one; `rows` and `numbers` are the whole combinations that stay."""

    def __init__(
        self,
        subproblem: Subproblem,
        each: Alone,
        bound: Bound,
        limit: float,
        beam: int | None,
        *,
        quick: bool = False,
    ) -> None:
        """`quick`: the best of each class alone go on from role to role."""
        self.subproblem, self.bound, self.limit, self.beam = subproblem, bound, limit, beam
        self.quick = quick
        self.reached: _Reached | None = None
        """What dominates others before all of their roles are merged."""
        group = subproblem.group
        self.order = sorted(range(len(group)), key=lambda i: MERGE.index(group[i]))
        self.roles = [each[i] for i in self.order]
        self.counts: Counter[str] = Counter()
        self.shortfall = np.inf
        self.rows = np.empty((0, len(group)), np.int64)
        self.numbers = numbers_of(subproblem, self.roles[0].sums.only(slice(0, 0)))
        self.held = subproblem.held_elsewhere(self.roles[0].held[:0])

    def run(self) -> None:
        """Narrows every role, then merges them."""
        if self.subproblem.frees == "must not":
            for place, i in enumerate(self.order):
                stays = ~self.subproblem.tables[i].frees[self.roles[place].rows[:, 0]]
                self._keep(place, stays, "infeasible")
        narrower = True
        while narrower and all(map(len, self.roles)):
            before = sum(map(len, self.roles))
            for place in range(len(self.roles)):
                if all(map(len, self.roles)):
                    self._narrow(place)
            narrower = sum(map(len, self.roles)) < NARROWER * before
        if not all(map(len, self.roles)):
            return
        self.roles = [role.whole() for role in self.roles]
        if len(self.roles) == 1 and self.beam is None and self.subproblem.frees != "must":
            clock.check()
            self._finish(self.roles[0])
            return
        if not self.quick and self.beam is None and prod(map(len, self.roles)) > LOOKED_AT:
            self.reached = self._look()
        first = self.roles[0]
        start = Combinations(
            rows=np.empty((1, 0), np.int64),
            sums=Sums(np.zeros((1, first.sums.values.shape[1]))),
            held=np.zeros((1, *first.held.shape[1:])),
        )
        self.grow(start, 0)

    def _look(self) -> _Reached | None:
        """Some good whole combinations, where it is known before all roles are merged what they beat."""
        subproblem = self.subproblem
        if not by_times(subproblem):
            return None
        each = [self.roles[self.order.index(i)] for i in range(len(self.roles))]
        look = _Merge(subproblem, each, self.bound, self.limit, None, quick=True)
        look.run()
        return _Reached(*compared(subproblem, look.rows, look.numbers, look.held))

    def _narrow(self, place: int) -> None:
        """Drops options of a role that cannot win, or cannot fit, whatever the other roles do."""
        role = self.roles[place]
        least, leanest = self._least([r for i, r in enumerate(self.roles) if i != place], role)
        numbers = numbers_of(self.subproblem, Sums(role.sums.values + least.values))
        if self.subproblem.wants_memory:
            numbers.peak[...] = (role.bytes[..., 0] + leanest[..., 0]).max(axis=(1, 2))
        self._keep(place, self.bound(numbers) <= self.limit, "bounded")
        role = self.roles[place]
        if len(role):
            host = role.sums.host + least.host
            fits, missing = fits_of(self.subproblem, role, role.bytes + leanest, host)
            self.shortfall = min(self.shortfall, missing)
            self._keep(place, fits, "infeasible")

    def _keep(self, place: int, kept: Bools, line: str) -> None:
        """Counts the combinations with the other options of a role, and drops those."""
        others = prod(len(role) for i, role in enumerate(self.roles) if i != place)
        self.counts[line] += others * int(len(kept) - kept.sum())
        self.roles[place] = self.roles[place].only(kept)

    @staticmethod
    def _least(roles: Sequence[Combinations], like: Combinations) -> tuple[Sums, Floats]:
        """The least that some roles add: their fastest options, and their leanest."""
        least = Sums(sum((r.sums.values.min(axis=0) for r in roles), np.zeros(like.sums.values.shape[1])))
        return least, sum((role.leanest for role in roles), np.zeros(like.held.shape[1:]))

    def grow(self, part: Combinations, place: int) -> None:
        """Merges the roles from `place` on; many combinations go on in batches: memory stays small."""
        if place == len(self.roles):
            self._finish(part)
            return
        for batch in self._merged(part, place):
            if len(batch):
                self.grow(batch, place + 1)

    def _finish(self, part: Combinations) -> None:
        """Adds whole combinations and drops what is dominated."""
        numbers = numbers_of(self.subproblem, part.sums)
        numbers.peak[...] = part.bytes[..., 0].max(axis=(1, 2))
        rows = np.concatenate([self.rows, part.rows[:, np.argsort(self.order)]])
        numbers = Numbers(np.concatenate([self.numbers.values, numbers.values]))
        held = np.concatenate([self.held, self.subproblem.held_elsewhere(part.bytes)])
        tie = (
            numbers.until_generated_s + numbers.until_free_s + numbers.training_s
            if self.subproblem.wants_memory
            else numbers.peak
        )
        best = undominated(*compared(self.subproblem, rows, numbers, held), tie)
        self.counts["dominated"] += len(rows) - len(best)
        self.rows, self.numbers, self.held = rows[best], numbers.only(best), held[best]

    def _merged(self, part: Combinations, place: int) -> Iterator[Combinations]:
        """With one role more, in batches of about `BATCH`; where some alone go on, those."""
        order, most = self.order[: place + 1], self.beam or BATCH
        some = self.quick or self.beam is not None
        blocks: list[Combinations] = []
        bounds: list[Floats] = []
        for block, bound in self._blocks(part, place):
            blocks.append(block)
            bounds.append(bound)
            if sum(map(len, blocks)) <= most:
                continue
            whole, bound = together(blocks), np.concatenate(bounds)
            if some:
                first = self._first(whole.rows, bound, order)
                blocks, bounds = [whole.only(first)], [bound[first]]
                most = max(most, 2 * len(first))
            else:
                yield whole
                blocks, bounds = [], []
        if not blocks:
            return
        whole = together(blocks)
        if some:
            whole = whole.only(self._first(whole.rows, np.concatenate(bounds), order))
        elif place + 1 < len(self.roles) and 0 < len(whole) <= WORTH:
            best = self._lean(whole, order)
            followed = prod(map(len, self.roles[place + 1 :]))
            self.counts["dominated"] += followed * (len(whole) - len(best))
            whole = whole.only(best)
        yield whole

    def _first(self, rows: Ints, bound: Floats, order: Sequence[int]) -> Ints:
        """Those that go on where not all do: with the least bounds of each class, or of all."""
        if self.beam is None:
            return _first_of_each(self._classes(rows, order), bound)
        return (
            np.argsort(bound, kind="stable")[: self.beam] if len(bound) > self.beam else np.arange(len(bound))
        )

    def _blocks(self, part: Combinations, place: int) -> Iterator[tuple[Combinations, Floats]]:
        """What may still win and may still fit, with its bound, about `CHUNK` combinations at a time."""
        role, rest, order = self.roles[place], self.roles[place + 1 :], self.order[: place + 1]
        least, leanest = self._least(rest, role)
        weight = prod(map(len, rest))
        for one, two in self._pairs(part, place):
            clock.spend(len(one) / PER_OPTION)
            both = Combinations(
                rows=np.concatenate([part.rows[one], role.rows[two]], axis=1),
                sums=Sums(part.sums.values[one] + role.sums.values[two]),
                held=np.empty((len(one), 0)),
            )
            add_sync(self.subproblem, both, order)
            numbers = numbers_of(self.subproblem, Sums(both.sums.values + least.values))
            if self.subproblem.wants_memory:
                held = part.bytes[one, ..., 0] + role.bytes[two, ..., 0] + leanest[..., 0]
                numbers.peak[...] = held.max(axis=(1, 2))
            bound = self.bound(numbers)
            hopeful = bound <= self.limit
            self.counts["bounded"] += weight * int(len(both) - hopeful.sum())
            if self.reached is not None and self._classed(order):
                columns = times_of(self.subproblem, numbers)
                hopeful &= ~(beaten := hopeful & self.reached.beats(columns, self._classes(both.rows, order)))
                self.counts["dominated"] += weight * int(beaten.sum())
            fit_count, turn = 0, 2 * (self.beam or BATCH)
            turns = np.flatnonzero(hopeful)
            if self.beam is not None:  # the best first, since few of them go on
                turns = turns[np.argsort(bound[turns], kind="stable")]
            for some in np.split(turns, range(turn, len(turns), turn)):
                block = both.only(some)
                block.held = part.bytes[one[some]] + role.bytes[two[some]]
                host = block.sums.host + least.host
                fits, missing = fits_of(self.subproblem, block, block.bytes + leanest, host)
                if not rest:
                    fits &= labelled(self.subproblem, block.rows[:, np.argsort(order)])
                self.counts["infeasible"] += weight * int(len(block) - fits.sum())
                fit_count += int(fits.sum())
                self.shortfall = min(self.shortfall, missing)
                yield block.only(fits), bound[some][fits]
                if self.beam is not None and fit_count >= self.beam:
                    break

    def _pairs(self, part: Combinations, place: int) -> Iterator[tuple[Ints, Ints]]:
        """Rows of combinations and of a role that agree where one key is about both, some at a time."""
        role, order = self.roles[place], self.order[: place + 1]
        [added] = self._placed(role.rows, order[-1:])
        placed = self._placed(part.rows, order[:-1])
        ours, theirs = agreeing(self.subproblem.agreement, placed, added, len(part))
        like = np.argsort(theirs, kind="stable")
        first, last = (np.searchsorted(theirs[like], ours, side) for side in ("left", "right"))
        count = last - first
        weight = prod(map(len, self.roles[place + 1 :]))
        self.counts["infeasible"] += weight * int(len(part) * len(role) - count.sum())
        ends = np.cumsum(count)
        turns = np.searchsorted(ends, np.arange(CHUNK, ends[-1] if len(ends) else 0, CHUNK))
        for rows in np.split(np.arange(len(part)), np.unique(turns)):
            if self.beam is None:
                clock.check()
            each = count[rows]
            begin = first[rows] - (np.cumsum(each) - each)
            yield np.repeat(rows, each), like[np.repeat(begin, each) + np.arange(each.sum())]

    def _placed(self, rows: Ints, order: Sequence[int]) -> list[Placed]:
        """Roles with the rows of their tables."""
        group, tables = self.subproblem.group, self.subproblem.tables
        return [(group[i], tables[i], row) for i, row in zip(order, rows.T, strict=False)]

    def _classes(self, rows: Ints, order: Sequence[int]) -> Ints:
        """The classes that dominance compares within, of combinations of some roles."""
        by_layout = self.subproblem.sync_seconds is None
        return classes_of(self.subproblem, self._placed(rows, order), by_layout=by_layout)

    def _classed(self, order: Sequence[int]) -> bool:
        """Whether the roles that decide the class of a whole combination are merged."""
        group = self.subproblem.group
        left = set(group) - {group[i] for i in order}
        return self.subproblem.sync_seconds is not None or not left & set(ENDS)

    def _lean(self, part: Combinations, order: Sequence[int]) -> Ints:
        """Those that no other one of their class equals or beats in every number and every moment."""
        subproblem = self.subproblem
        placed = self._placed(part.rows, order)
        classes = classes_of(subproblem, placed, by_layout=True)
        values = [part.bytes.reshape(len(part), -1)]
        values += [part.sums.host[:, None] if subproblem.wants_memory else part.sums.values]
        if subproblem.pace == "pieces" and not subproblem.wants_memory:
            values += [table.times.values[rows] for _, table, rows in placed]
        return undominated(distinct(np.concatenate(values, axis=1)), classes)
