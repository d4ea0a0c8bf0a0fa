"""Roles that share a pool: which of their combinations fit, and which no other one beats.

A pool enters the step time through four numbers (seconds), in which every schedule is monotone:

    a  wake and generation
    R  from there until its last sample is scored
    F  from there until it is free again
    X  training with its moves (and the sync, where both ends sit here)

so of combinations that fit, one with no smaller a, R, F and X (or peak, where memory is the objective) of the
same sync class, and no less host memory where it is shared, is dominated. Where samples stream it also counts
which roles are moved in and out of GPU memory, since those wait for the whole batch, and what they leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from rlhfsim.memory.components import SyncBytes
from rlhfsim.memory.residency import peak_moments
from rlhfsim.memory.risk import fitting
from rlhfsim.search.agreement import Agreement, Placed, agree, open_classes
from rlhfsim.search.bound import head_seconds, ruled
from rlhfsim.search.columns import Bools, Combinations, Floats, Ints, Numbers, Sums, together
from rlhfsim.search.dominance import distinct, undominated
from rlhfsim.search.options import OptionTable
from rlhfsim.search.space import Group, Pace
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.workload import Workload

ENDS = ("actor", "rollout")
"""Roles that the weight sync joins."""
SCORING = ("logprob", "value", "score")
"""Kinds of calls that pass over finished samples."""
MERGE = ("actor", "critic", "rollout", "reference", "reward")
"""Order in which roles are merged: those that decide most first."""
WORTH = 2_000
"""Combinations among which dominance is looked for before all roles are merged."""
BATCH = 200_000
"""Combinations that go on together to the next role."""
CHUNK = 100_000
"""Combinations that are looked at in one go."""
MANY = 100_000
"""More sync classes than a role has."""
Bound = Callable[[Numbers], Floats]
"""What no plan of the skeleton with these numbers of a pool goes below."""
Alone = Sequence[Combinations]
SyncSeconds = Callable[[Ints, Ints], Floats]
"""Seconds of the weight path for rows of the actor's and of the rollout's table; inf: unavailable."""


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
    considered: int
    """Combinations of the tables."""
    bounded: int
    infeasible: int
    dominated: int
    shortfall: float
    """Least bytes that are missing on a GPU, where nothing fits."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subproblem:
    """What the combinations of a pool share."""

    group: Group
    tables: tuple[OptionTable, ...]
    originals: tuple[OptionTable, ...]
    """Dominated options included."""
    calls: tuple[Call, ...]
    """Of the whole step."""
    workload: Workload
    hardware: NodeGroup
    gpus: int
    sync: SyncBytes
    max_oom: float
    doubt: float = 1.0
    max_memory: float
    """Most bytes on a GPU that the user wants."""
    sync_seconds: SyncSeconds | None
    """Of the weight path, where actor and rollout both sit here."""
    shares_host: bool
    """Whether other pools sit on the same node."""
    pace: Pace
    """What counts of a rollout: its batches, the pieces that it hands on, or its rate."""
    rules_streamed: bool
    """Whether rules score samples as they are generated."""
    wants_memory: bool
    """Whether bytes are the objective."""
    frees: Literal["any", "must", "must not"]
    """What the request says about taking roles out of GPU memory (naive against smart)."""
    whole: bool
    """Whether there is no other pool."""
    agreement: tuple[Agreement, ...] = ()

    @property
    def scoring(self) -> list[str]:
        """Roles here that pass over finished samples, in the order of their calls."""
        return [c.role for c in self.calls if c.kind in SCORING and c.role in self.group]


def alone(subproblem: Subproblem) -> Alone:
    """Each role by itself, in the order of the group."""
    return [_role(subproblem, i) for i in range(len(subproblem.group))]


def pool_table(
    subproblem: Subproblem, bound: Bound, limit: float, each: Alone | None = None, *, beam: int | None = None
) -> PoolTable:
    """The combinations that fit and are not dominated; only those with a bound up to `limit` may win.

    Roles are merged one by one. A combination of some is dropped when its numbers with the fastest options
    of the roles to come cannot win, when its bytes with the leanest of them do not fit, or when another one
    of its class is no worse in any number and any moment. With `beam` only so many with the least bound go
    on: a quick look, not a proof. `each`: the roles `alone`, where they are known.
    """
    merge = _Merge(subproblem, each or alone(subproblem), bound, limit, beam)
    first = merge.roles[0]
    start = Combinations(
        rows=np.empty((1, 0), np.int64),
        sums=Sums(np.zeros((1, first.sums.values.shape[1]))),
        bytes=np.zeros((1, *first.bytes.shape[1:])),
    )
    merge.grow(start, 0)
    return PoolTable(
        tables=subproblem.tables,
        originals=subproblem.originals,
        rows=merge.rows,
        numbers=merge.numbers,
        considered=prod(map(len, merge.roles)),
        **{line: merge.counts[line] for line in ("bounded", "infeasible", "dominated")},
        shortfall=float(merge.shortfall),
    )


class _Merge:
    """The roles of a pool, merged one by one; `rows` and `numbers` are the whole combinations that stay."""

    def __init__(
        self, subproblem: Subproblem, each: Alone, bound: Bound, limit: float, beam: int | None
    ) -> None:
        self.subproblem, self.bound, self.limit, self.beam = subproblem, bound, limit, beam
        group = subproblem.group
        self.order = sorted(range(len(group)), key=lambda i: MERGE.index(group[i]))
        self.roles = [each[i] for i in self.order]
        self.frees = [subproblem.tables[i].frees for i in self.order]
        """Options that the label may not allow, role after role."""
        self.counts: Counter[str] = Counter()
        self.shortfall = np.inf
        self.rows = np.empty((0, len(group)), np.int64)
        self.numbers = _numbers(subproblem, self.roles[0].sums.only(slice(0, 0)))

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
        numbers = _numbers(self.subproblem, part.sums)
        numbers.peak[...] = part.bytes[..., 0].max(axis=(1, 2))
        rows = np.concatenate([self.rows, part.rows[:, np.argsort(self.order)]])
        numbers = Numbers(np.concatenate([self.numbers.values, numbers.values]))
        tie = numbers.a + numbers.f + numbers.x if self.subproblem.wants_memory else numbers.peak
        best = undominated(*compared(self.subproblem, rows, numbers), tie)
        self.counts["dominated"] += len(rows) - len(best)
        self.rows, self.numbers = rows[best], numbers.only(best)

    def _merged(self, part: Combinations, place: int) -> Iterator[Combinations]:
        """With one role more, in batches of about `BATCH`; with a beam, the best alone."""
        blocks: list[Combinations] = []
        bounds: list[Floats] = []
        for block, bound in self._blocks(part, place):
            blocks.append(block)
            bounds.append(bound)
            size = sum(map(len, blocks))
            if self.beam is not None and size > self.beam:
                best = np.argsort(np.concatenate(bounds), kind="stable")[: self.beam]
                blocks, bounds = [together(blocks).only(best)], [np.concatenate(bounds)[best]]
            elif self.beam is None and size > BATCH:
                yield together(blocks)
                blocks, bounds = [], []
        if not blocks:
            return
        whole = together(blocks)
        if self.beam is None and place + 1 < len(self.roles) and 0 < len(whole) <= WORTH:
            best = self._lean(whole, self.order[: place + 1])
            followed = prod(map(len, self.roles[place + 1 :]))
            self.counts["dominated"] += followed * (len(whole) - len(best))
            whole = whole.only(best)
        yield whole

    def _blocks(self, part: Combinations, place: int) -> Iterator[tuple[Combinations, Floats]]:
        """What may still win and may still fit, with its bound, about `CHUNK` combinations at a time."""
        role, rest, order = self.roles[place], self.roles[place + 1 :], self.order[: place + 1]
        least = Sums(sum((r.sums.values.min(axis=0) for r in rest), np.zeros(part.sums.values.shape[1])))
        leanest = sum((r.bytes.min(axis=0) for r in rest), np.zeros(part.bytes.shape[1:]))
        weight, each = prod(map(len, rest)), max(1, CHUNK // max(1, len(role)))
        for start in range(0, len(part), each):
            one = np.repeat(np.arange(start, min(start + each, len(part))), len(role))
            two = np.tile(np.arange(len(role)), len(one) // max(1, len(role)))
            placed = self._placed(part.rows[one], order)
            possible = agree(self.subproblem.agreement, placed, self._placed(role.rows[two], order[-1:])[0])
            if self.subproblem.frees == "must not":
                possible &= ~self.frees[place][two]
            self.counts["infeasible"] += weight * int(len(one) - possible.sum())
            one, two = one[possible], two[possible]
            both = Combinations(
                rows=np.concatenate([part.rows[one], role.rows[two]], axis=1),
                sums=Sums(part.sums.values[one] + role.sums.values[two]),
                bytes=np.empty((len(one), 0)),
            )
            _add_sync(self.subproblem, both, order)
            numbers = _numbers(self.subproblem, Sums(both.sums.values + least.values))
            if self.subproblem.wants_memory:
                held = part.bytes[one, ..., 0] + role.bytes[two, ..., 0] + leanest[..., 0]
                numbers.peak[...] = held.max(axis=(1, 2))
            bound = self.bound(numbers)
            hopeful = bound <= self.limit
            self.counts["bounded"] += weight * int(len(both) - hopeful.sum())
            fit_count, turn = 0, 2 * (self.beam or BATCH)
            turns = np.flatnonzero(hopeful)
            if self.beam is not None:  # the best first, since few of them go on
                turns = turns[np.argsort(bound[turns], kind="stable")]
            for some in np.split(turns, range(turn, len(turns), turn)):
                block = both.only(some)
                block.bytes = part.bytes[one[some]] + role.bytes[two[some]]
                host = block.sums.host + least.host
                fits, missing = _fits(self.subproblem, block, block.bytes + leanest, host)
                if not rest:
                    fits &= _labelled(self.subproblem, block.rows[:, np.argsort(order)])
                self.counts["infeasible"] += weight * int(len(block) - fits.sum())
                fit_count += int(fits.sum())
                self.shortfall = min(self.shortfall, missing)
                yield block.only(fits), bound[some][fits]
                if self.beam is not None and fit_count >= self.beam:
                    break

    def _placed(self, rows: Ints, order: Sequence[int]) -> list[Placed]:
        """Roles with the rows of their tables."""
        group, tables = self.subproblem.group, self.subproblem.tables
        return [(group[i], tables[i], row) for i, row in zip(order, rows.T, strict=False)]

    def _lean(self, part: Combinations, order: Sequence[int]) -> Ints:
        """Those that no other one of their class equals or beats in every number and every moment."""
        subproblem = self.subproblem
        placed = self._placed(part.rows, order)
        classes = _classes(subproblem, placed, by_layout=True)
        values = [part.bytes.reshape(len(part), -1)]
        values += [part.sums.host[:, None] if subproblem.wants_memory else part.sums.values]
        if subproblem.pace == "pieces" and not subproblem.wants_memory:
            values += [table.times.values[rows] for _, table, rows in placed]
        return undominated(distinct(np.concatenate(values, axis=1)), classes)


def _role(subproblem: Subproblem, index: int) -> Combinations:
    """One role alone: its share of the numbers and of every moment of the pool."""
    table, role = subproblem.tables[index], subproblem.group[index]
    times, none = table.times, np.zeros(len(table))
    each = min(subproblem.gpus, subproblem.hardware.gpus_per_node)
    scored = none
    if role == "rollout" and subproblem.pace == "continuous":  # whose rules are the learner's
        columns = [table.continuous, times.unload, none, none, none]
    elif role == "rollout":
        columns = [times.ready, times.unload, none, none, none]
        scored = ruled(subproblem.workload, table.pieces, streamed=subproblem.rules_streamed)
    else:
        score = times.of_call(train=False).sum(axis=0)
        last = times.unload if [role] == subproblem.scoring[-1:] else none
        columns = [none, none, score - last, score, times.training]
    columns += [table.host * each, scored]
    if subproblem.pace == "pieces" and "rollout" in subproblem.group:
        columns += list((table.pieces if role == "rollout" else np.zeros_like(table.pieces)).T)
    workload = subproblem.workload
    states = table.states(
        subproblem.hardware.profile, subproblem.sync, with_actor="actor" in subproblem.group
    )
    moments = [states[m.of(role)] for m in peak_moments(subproblem.calls, subproblem.group, workload)]
    return Combinations(
        rows=np.arange(len(table))[:, None],
        sums=Sums(np.stack(columns, axis=1)),
        bytes=np.stack(moments, axis=1),
    )


def _add_sync(subproblem: Subproblem, part: Combinations, order: Sequence[int]) -> None:
    """Adds the weight path where actor and rollout of this pool have both been merged."""
    group = [subproblem.group[i] for i in order]
    if subproblem.sync_seconds is not None and group[-1] in ENDS and all(role in group for role in ENDS):
        actor, rollout = (part.rows[:, group.index(role)] for role in ENDS)
        part.sums.train[...] += subproblem.sync_seconds(actor, rollout)


def _numbers(subproblem: Subproblem, sums: Sums) -> Numbers:
    """What combinations contribute to the step; the peak is filled in later."""
    scores = subproblem.scoring
    begin = np.maximum(sums.unload, head_seconds(subproblem.workload)) if scores else sums.unload
    return Numbers.of(
        (len(sums),),
        sums.pieces,
        a=sums.generate,
        r=begin + sums.score if scores else 0.0,
        f=begin + sums.score_and_unload,
        x=sums.train,
        u=sums.ruled,
        host=sums.host,
    )


def _fits(subproblem: Subproblem, part: Combinations, held: Floats, host: Floats) -> tuple[Bools, float]:
    """Which may still fit at every moment, with the leanest roles to come; and the least bytes that are
    missing on a GPU where none has room, inf where one has."""
    profile = subproblem.hardware.profile
    usable, fullest = profile.usable_memory.value, held[..., 0].max(axis=(1, 2))
    fits = fitting(held, usable, subproblem.max_oom, subproblem.doubt).all(axis=1)
    missing = np.inf if fits.any() else float(fullest.min(initial=np.inf)) - usable
    fits &= (fullest <= subproblem.max_memory) & (host <= profile.node.host_memory.value)
    return np.asarray(fits & np.isfinite(part.sums.train)), missing


def _labelled(subproblem: Subproblem, rows: Ints) -> Bools:
    """Combinations that take something out of GPU memory, where the allowed label asks for it."""
    if subproblem.frees != "must" or not subproblem.whole:
        return np.ones(len(rows), dtype=np.bool_)
    freed = [t.frees[rows[:, i]] for i, t in enumerate(subproblem.tables)]
    return np.asarray(np.logical_or.reduce(freed))


def _classes(
    subproblem: Subproblem, placed: Sequence[tuple[str, OptionTable, Ints]], *, by_layout: bool
) -> Ints:
    """The class of each combination, of which `placed` tells roles, tables and their rows.

    `by_layout`: the other end of the weight sync is not yet known, or sits elsewhere.
    """
    classes = np.zeros(len(placed[0][2]), dtype=np.int64)
    for role, table, rows in placed:
        if by_layout and role in ENDS:
            classes = classes * MANY + table.sync_class[rows]
    if subproblem.frees == "must":
        classes = classes * 2 + np.logical_or.reduce([table.frees[rows] for _, table, rows in placed])
    if subproblem.pace == "pieces":
        for _, table, rows in placed:
            classes = classes * 4 + table.moved[rows]
    return open_classes(subproblem.agreement, subproblem.group, placed, classes)


def compared(subproblem: Subproblem, rows: Ints, numbers: Numbers) -> tuple[Floats, Ints]:
    """(n, columns) what dominance compares of combinations, and (n,) the class within which it does."""
    times = [numbers.a, numbers.r, numbers.f, numbers.x, numbers.u, *numbers.pieces]
    columns = [numbers.peak] if subproblem.wants_memory else times
    columns += [numbers.host] if subproblem.shares_host else []
    if subproblem.pace == "pieces" and not subproblem.wants_memory:
        streamed = _streamed(subproblem, rows)
        columns += [*streamed, numbers.r - streamed[0]]  # last: the whole batch, without the last unload
    placed = list(zip(subproblem.group, subproblem.tables, rows.T, strict=True))
    return np.stack(columns, axis=1), _classes(subproblem, placed, by_layout=subproblem.sync_seconds is None)


def _streamed(subproblem: Subproblem, rows: Ints) -> Floats:
    """(4, n) seconds of scoring that takes samples as they finish, and of what cannot; then of training.

    A pool keeps the order of its calls: behind one that waits for the whole batch (it is moved) none streams.
    """
    seconds, going = np.zeros((4, len(rows))), np.ones(len(rows), dtype=np.bool_)
    for call in subproblem.calls:
        if call.role not in subproblem.group or call.kind in ("generate", "sync"):
            continue
        i, train = subproblem.group.index(call.role), call.kind == "train"
        load, run, unload = subproblem.tables[i].times.only(rows[:, i]).of_call(train=train)
        going = going & (load + unload == 0)
        seconds[2 * train] += np.where(going, run, 0.0)
        seconds[2 * train + 1] += np.where(going, 0.0, load + run + unload)
    return seconds
