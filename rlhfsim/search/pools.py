"""Roles that share a pool: which of their combinations fit, and which no other one beats.

A pool enters the step time through four numbers (seconds), in which every schedule is monotone:

    a  wake and generation                  R  from there until its last sample is scored
    F  from there until it is free again    X  training with its moves (and the sync, where both ends sit here)

so of combinations that fit, one with no smaller a, R, F and X of the same sync class (and no less
host memory, where it is shared) is dominated. Where samples stream it also counts which roles are
moved in and out of GPU memory, since those wait for the whole batch, and how much work they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhfsim.search.bound import FIXED
from rlhfsim.search.dominance import undominated
from rlhfsim.search.fit import SyncBytes, fitting
from rlhfsim.search.options import SCORE, TRAIN, OptionTable
from rlhfsim.search.space import Group, Pace
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.workload.dataflow import Call

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
HOST, PEAK = 4, 5
"""Columns of the numbers that are read by name."""
TRAIN_TIME, HOST_TIME = 4, 5
"""Columns of `Part.times` that are read by name."""
ENDS = ("actor", "rollout")
"""Roles that the weight sync joins."""
Bound = Callable[[Floats], Floats]
"""What no plan of the skeleton with these numbers of a pool goes below."""
MERGE = ("actor", "critic", "rollout", "reference", "reward")
"""Order in which roles are merged: those that decide most first."""
WORTH = 2_000
"""Parts among which dominance is looked for before all roles are merged."""
BATCH = 200_000
"""Parts that go on together to the next role."""
CHUNK = 100_000
"""Combinations that are looked at in one go."""
MANY = 100_000
"""More sync classes than a role has."""
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
    numbers: Floats
    """(n, columns) a, R, F, X, host bytes of a node, most bytes on a GPU, then the pieces of a stream."""
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
    hardware: NodeGroup
    gpus: int
    sync: SyncBytes
    max_oom: float
    max_memory: float
    """Most bytes on a GPU that the user wants."""
    head: float
    """Seconds between generation and the first forward call: rules that are not overlapped."""
    sync_seconds: SyncSeconds | None
    """Of the weight path, where actor and rollout both sit here."""
    shares_host: bool
    """Whether other pools sit on the same node."""
    pace: Pace
    """What counts of a rollout: its batches, the pieces that it hands on, or its rate."""
    wants_memory: bool
    """Whether bytes are the objective."""
    frees: Literal["any", "must", "must not"]
    """What the request says about taking roles out of GPU memory (naive against smart)."""
    whole: bool
    """Whether there is no other pool."""


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Combinations of some roles of a pool: what they add to its numbers and to its moments."""

    rows: Ints
    """(n, roles so far) in the order of merging."""
    times: Floats
    """(n, columns) see `TIMES`; then the pieces of a stream."""
    bytes: Floats
    """(n, moments, views, 3) bytes, mean and variance."""

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, rows: Ints | Bools) -> Part:
        """Some of them."""
        return Part(rows=self.rows[rows], times=self.times[rows], bytes=self.bytes[rows])

    def least(self) -> tuple[Floats, Floats]:
        """Of every entry the least."""
        return self.times.min(axis=0), self.bytes.min(axis=0)


TIMES = ("generate", "unload", "score", "score and unload", "train", "host")
"""Columns of `Part.times`: seconds, the last one bytes; all add up over roles."""


@dataclass(slots=True, kw_only=True)
class Fate:
    """What became of the combinations of a pool."""

    bounded: int = 0
    infeasible: int = 0
    dominated: int = 0
    shortfall: float = np.inf


def pool_table(subproblem: Subproblem, bound: Bound, limit: float, *, beam: int | None = None) -> PoolTable:
    """The combinations that fit and are not dominated; only those with a bound up to `limit` may win.

    Roles are merged one by one. A part is dropped when its numbers with the fastest options of the
    roles to come cannot win, when its bytes with the leanest of them do not fit, or when another
    part of its class is no worse in any number and any moment. With `beam` only so many parts with
    the least bound go on: a quick look, not a proof.
    """
    order = sorted(range(len(subproblem.group)), key=lambda i: MERGE.index(subproblem.group[i]))
    roles = [_role(subproblem, i) for i in order]
    fate, left = Fate(), [len(s) for s in roles]
    columns = FIXED + roles[0].times.shape[1] - len(TIMES)
    kept = Kept(rows=np.empty((0, len(order)), np.int64), numbers=np.empty((0, columns)))

    def grow(part: Part, place: int) -> None:
        """Merges the roles from `place` on; many parts go on in batches, so that memory stays small."""
        if place == len(roles):
            kept.take(subproblem, part, order, fate)
            return
        goal = Goal(bound=bound, limit=limit, beam=beam, fate=fate, weight=prod(left[place + 1 :]))
        for batch in _merged(subproblem, part, roles[place], roles[place + 1 :], order[: place + 1], goal):
            if len(batch):
                grow(batch, place + 1)

    start = Part(
        rows=np.empty((1, 0), np.int64),
        times=np.zeros((1, roles[0].times.shape[1])),
        bytes=np.zeros((1, *roles[0].bytes.shape[1:])),
    )
    grow(start, 0)
    return PoolTable(
        tables=subproblem.tables,
        originals=subproblem.originals,
        rows=kept.rows,
        numbers=kept.numbers,
        considered=prod(left),
        bounded=fate.bounded,
        infeasible=fate.infeasible,
        dominated=fate.dominated,
        shortfall=float(fate.shortfall),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """Whole combinations that no other one met so far beats."""

    rows: Ints
    numbers: Floats

    def take(self, subproblem: Subproblem, part: Part, order: Sequence[int], fate: Fate) -> None:
        """Adds finished parts and drops what is dominated."""
        numbers = _numbers(subproblem, part.times)
        numbers[:, PEAK] = part.bytes[..., 0].max(axis=(1, 2))
        rows = np.concatenate([self.rows, part.rows[:, np.argsort(order)]])
        numbers = np.concatenate([self.numbers, numbers])
        best = undominated(*compared(subproblem, rows, numbers), numbers[:, PEAK])
        fate.dominated += len(rows) - len(best)
        self.rows, self.numbers = rows[best], numbers[best]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Goal:
    """What merged parts must beat, and where the dropped ones are counted."""

    bound: Bound
    limit: float
    beam: int | None
    fate: Fate
    weight: int
    """Combinations of later roles that follow each part."""


def _merged(
    subproblem: Subproblem, part: Part, role: Part, rest: Sequence[Part], order: Sequence[int], goal: Goal
) -> Iterator[Part]:
    """The part with one role more, in batches of about `BATCH`; with a beam, its best alone."""
    found: list[Part] = []
    bounds: list[Floats] = []
    for block, bound in _blocks(subproblem, part, role, rest, order, goal):
        found.append(block)
        bounds.append(bound)
        size = sum(map(len, found))
        if goal.beam is not None and size > goal.beam:
            best = np.argsort(np.concatenate(bounds), kind="stable")[: goal.beam]
            found, bounds = [_together(found).only(best)], [np.concatenate(bounds)[best]]
        elif goal.beam is None and size > BATCH:
            yield _together(found)
            found, bounds = [], []
    if not found:
        return
    whole = _together(found)
    if goal.beam is None and rest and 0 < len(whole) <= WORTH:
        best = _lean_parts(subproblem, whole, order)
        goal.fate.dominated += goal.weight * (len(whole) - len(best))
        whole = whole.only(best)
    yield whole


def _together(parts: Sequence[Part]) -> Part:
    return Part(
        rows=np.concatenate([p.rows for p in parts]),
        times=np.concatenate([p.times for p in parts]),
        bytes=np.concatenate([p.bytes for p in parts]),
    )


def _blocks(
    subproblem: Subproblem, part: Part, role: Part, rest: Sequence[Part], order: Sequence[int], goal: Goal
) -> Iterator[tuple[Part, Floats]]:
    """What may still win and may still fit, with its bound, about `CHUNK` combinations at a time."""
    soon = [s.least() for s in rest]
    times = sum((t for t, _ in soon), np.zeros(part.times.shape[1]))
    held = sum((b for _, b in soon), np.zeros(part.bytes.shape[1:]))
    each = max(1, CHUNK // max(1, len(role)))
    for start in range(0, len(part), each):
        one = np.repeat(np.arange(start, min(start + each, len(part))), len(role))
        two = np.tile(np.arange(len(role)), len(one) // max(1, len(role)))
        both = Part(
            rows=np.concatenate([part.rows[one], role.rows[two]], axis=1),
            times=part.times[one] + role.times[two],
            bytes=np.empty((len(one), 0)),
        )
        _add_sync(subproblem, both, order)
        bound = goal.bound(_numbers(subproblem, both.times + times))
        hopeful = bound <= goal.limit
        goal.fate.bounded += goal.weight * int(len(both) - hopeful.sum())
        found, missing = 0, np.inf
        for some in _in_turn(np.flatnonzero(hopeful), bound, goal.beam):
            block = both.only(some)
            block.bytes = part.bytes[one[some]] + role.bytes[two[some]]
            fits, short = _fits(
                subproblem, block, block.bytes + held, block.times[:, HOST_TIME] + times[HOST_TIME]
            )
            if not rest:
                fits &= _labelled(subproblem, block.rows[:, np.argsort(order)])
            goal.fate.infeasible += goal.weight * int(len(block) - fits.sum())
            found, missing = found + int(fits.sum()), min(missing, short)
            yield block.only(fits), bound[some][fits]
            if goal.beam is not None and found >= goal.beam:
                break
        if missing > -np.inf:  # not one has room
            goal.fate.shortfall = min(goal.fate.shortfall, missing)


def _in_turn(rows: Ints, bound: Floats, beam: int | None) -> Iterator[Ints]:
    """All rows at once; with a beam a few at a time, the best first, since few of them go on."""
    if beam is None or len(rows) <= 2 * beam:
        yield rows
        return
    order = rows[np.argsort(bound[rows], kind="stable")]
    for start in range(0, len(order), 2 * beam):
        yield order[start : start + 2 * beam]


def _role(subproblem: Subproblem, index: int) -> Part:
    """One role alone: its share of the numbers and of every moment of the pool."""
    table, placed = subproblem.tables[index], subproblem.group[index]
    scoring = [c.role for c in subproblem.calls if c.kind in ("logprob", "value", "score")]
    present = [role for role in scoring if role in subproblem.group]
    t, none = table.times, np.zeros(len(table))
    if placed == "rollout":
        generate = table.refilled if subproblem.pace == "refilled" else t[:, 0] + t[:, 1]
        columns = [generate, t[:, 2], none, none, none]
    else:
        last = t[:, 2] if present and placed == present[-1] else none
        score = t[:, :3].sum(axis=1)
        columns = [none, none, score - last, score, t[:, 3:].sum(axis=1)]
    each = min(subproblem.gpus, subproblem.hardware.gpus_per_node)
    columns.append(table.host * each)
    if subproblem.pace == "pieces" and "rollout" in subproblem.group:
        pieces = table.pieces if placed == "rollout" else np.zeros_like(table.pieces)
        columns += list(pieces.T)
    profile = subproblem.hardware.profile
    states = table.states(profile, subproblem.sync, with_actor="actor" in subproblem.group)
    moments = [states[m.get(index, "idle")] for m in _moments(subproblem)]
    return Part(
        rows=np.arange(len(table))[:, None], times=np.stack(columns, axis=1), bytes=np.stack(moments, axis=1)
    )


def _add_sync(subproblem: Subproblem, part: Part, order: Sequence[int]) -> None:
    """Adds the weight path where actor and rollout of this pool have both been merged."""
    if subproblem.sync_seconds is None or subproblem.group[order[-1]] not in ENDS:
        return
    at = {subproblem.group[i]: place for place, i in enumerate(order)}
    if all(role in at for role in ENDS):
        actor, rollout = (part.rows[:, at[role]] for role in ENDS)
        part.times[:, TRAIN_TIME] += subproblem.sync_seconds(actor, rollout)


def _numbers(subproblem: Subproblem, times: Floats) -> Floats:
    """(n, columns) a, R, F, X, host bytes and the peak, which is filled in later; then the pieces."""
    generate, unload, score, both, train, host = (times[:, i] for i in range(len(TIMES)))
    scores = any(
        c.role in subproblem.group for c in subproblem.calls if c.kind in ("logprob", "value", "score")
    )
    begin = np.maximum(unload, subproblem.head) if scores else unload
    scored = begin + score if scores else np.zeros_like(score)
    fixed = [generate, scored, begin + both, train, host, np.zeros_like(host)]
    return np.concatenate([np.stack(fixed, axis=1), times[:, len(TIMES) :]], axis=1)


def _fits(subproblem: Subproblem, part: Part, held: Floats, host: Floats) -> tuple[Bools, float]:
    """Which parts may still fit at every moment, with the leanest roles to come; and the least bytes that are
    missing on a GPU where none has room, -inf where one has."""
    profile = subproblem.hardware.profile
    usable, most = profile.usable_memory.value, held[..., 0].max(axis=(1, 2))
    fits = fitting(held, usable, subproblem.max_oom).all(axis=1)
    missing = -np.inf if fits.any() else float(most.min(initial=np.inf)) - usable
    fits &= most <= subproblem.max_memory
    fits &= host <= profile.node.host_memory.value
    return np.asarray(fits & np.isfinite(part.times[:, TRAIN_TIME])), missing


def _freeing(subproblem: Subproblem, rows: Ints) -> Bools:
    """Combinations in which some role leaves GPU memory between calls."""
    each = [t.frees[rows[:, i]] for i, t in enumerate(subproblem.tables)]
    return np.asarray(np.logical_or.reduce(each))


def _labelled(subproblem: Subproblem, rows: Ints) -> Bools:
    """Combinations that may carry a label which the request allows."""
    if subproblem.frees == "must not":
        return ~_freeing(subproblem, rows)
    if subproblem.frees == "must" and subproblem.whole:
        return _freeing(subproblem, rows)
    return np.ones(len(rows), dtype=np.bool_)


def _moments(subproblem: Subproblem) -> list[Mapping[int, str]]:
    """The states that may be the fullest: role index -> state, the others idle (see `search.fit`)."""
    at = {role: i for i, role in enumerate(subproblem.group)}
    syncs = any(c.kind == "sync" for c in subproblem.calls)
    engine = at.get("rollout")
    ready = {engine: "ready"} if engine is not None else {}
    found: list[Mapping[int, str]] = [ready]
    if engine is not None:
        found.append({engine: "running"})
    for call in subproblem.calls:
        if call.role in at and call.kind not in ("generate", "sync"):
            found.append({at[call.role]: "train" if call.kind == "train" else "score"})
    if syncs and "actor" in at:
        found.append({**ready, at["actor"]: "sync"})
    elif syncs and engine is not None:
        found.append({engine: "sync"})
    return found


def _lean_parts(subproblem: Subproblem, part: Part, order: Sequence[int]) -> Ints:
    """Parts that no other one of their class equals or beats in every number and every moment."""
    classes = np.zeros(len(part), dtype=np.int64)
    for place, i in enumerate(order):
        if subproblem.group[i] in ENDS:
            classes = classes * MANY + subproblem.tables[i].sync_class[part.rows[:, place]]
    if subproblem.frees == "must":
        each = [subproblem.tables[i].frees[part.rows[:, place]] for place, i in enumerate(order)]
        classes = classes * 2 + np.logical_or.reduce(each)
    found = [part.times, part.bytes.reshape(len(part), -1)]
    if subproblem.pace == "pieces":
        pairs = [(subproblem.tables[i], part.rows[:, place]) for place, i in enumerate(order)]
        for table, rows in pairs:
            classes = classes * 4 + table.moved[rows]
        found += [table.times[rows] for table, rows in pairs]
    columns = np.concatenate(found, axis=1)
    varied = columns[:, columns.min(axis=0) < columns.max(axis=0)] if len(part) else columns
    return undominated(np.unique(varied, axis=1) if varied.size else columns[:, :1], classes)


def compared(subproblem: Subproblem, rows: Ints, numbers: Floats) -> tuple[Floats, Ints]:
    """(n, columns) what dominance compares of combinations, and (n,) the class within which it does."""
    left_out = [
        c for c, counts in ((HOST, subproblem.shares_host), (PEAK, subproblem.wants_memory)) if not counts
    ]
    columns = np.delete(numbers, left_out, axis=1)
    classes = np.zeros(len(rows), dtype=np.int64)
    if subproblem.sync_seconds is None:  # the other end sits elsewhere
        for role in ENDS:
            if role in subproblem.group:
                i = subproblem.group.index(role)
                classes = classes * MANY + subproblem.tables[i].sync_class[rows[:, i]]
    if subproblem.frees == "must":
        classes = classes * 2 + _freeing(subproblem, rows)
    if subproblem.pace == "pieces":
        for i, table in enumerate(subproblem.tables):
            classes = classes * 4 + table.moved[rows[:, i]]
        streamed = _streamed(subproblem, rows)
        late = numbers[:, 1:2] - streamed[:, :1]  # scoring of the whole batch, without the last unload
        columns = np.concatenate([columns, streamed, late], axis=1)
    return columns, classes


def _streamed(subproblem: Subproblem, rows: Ints) -> Floats:
    """(n, 4) seconds of scoring and of training that can take samples as they finish, and of what cannot.

    A pool keeps the order of its calls: behind one that waits for the whole batch (its role is
    moved in or out) none streams.
    """
    found, going = np.zeros((len(rows), 4)), np.ones(len(rows), dtype=np.bool_)
    for call in subproblem.calls:
        if call.role not in subproblem.group or call.kind in ("generate", "sync"):
            continue
        i = subproblem.group.index(call.role)
        train = call.kind == "train"
        times = subproblem.tables[i].times[rows[:, i]][:, TRAIN if train else SCORE]
        going = going & (times[:, 0] + times[:, 2] == 0)
        found[:, 2 * train] += np.where(going, times[:, 1], 0.0)
        found[:, 2 * train + 1] += np.where(going, 0.0, times.sum(axis=1))
    return found
