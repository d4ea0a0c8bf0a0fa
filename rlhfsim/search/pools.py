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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from rlhfsim.memory.components import SyncBytes
from rlhfsim.memory.residency import peak_moments
from rlhfsim.memory.risk import fitting
from rlhfsim.search.agreement import Agreement, open_classes
from rlhfsim.search.bound import head_seconds, ruled
from rlhfsim.search.columns import Bools, Combinations, Floats, Ints, Numbers, Sums
from rlhfsim.search.options import OptionTable
from rlhfsim.search.space import Group, Pace
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.roles import ENDS
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import STREAM_CHUNKS

SCORING = ("logprob", "value", "score")
"""Kinds of calls that pass over finished samples."""
MANY = 100_000
"""More sync classes than a role has."""
Alone = Sequence[Combinations]
SyncSeconds = Callable[[Ints, Ints], Floats]
"""Seconds of the weight path for rows of the actor's and of the rollout's table; inf: unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subproblem:
    """What the combinations of a pool share."""

    group: Group
    tables: tuple[OptionTable, ...]
    originals: tuple[OptionTable, ...]
    """Dominated options included."""
    calls: tuple[Call, ...]
    """Calls of the whole step."""
    workload: Workload
    hardware: NodeGroup
    gpus: int
    sync: SyncBytes
    max_oom: float
    doubt: float = 1.0
    max_memory: float
    """Most bytes on a GPU that the user wants."""
    sync_seconds: SyncSeconds | None
    """Seconds of the weight path, where actor and rollout are both in this pool."""
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
    lent: Floats | None = None
    """(n, moments, views, 3) bytes of the engine of each option on the GPUs of a trainer that lends them;
    None for a pool that is not lent to."""
    lends: bool = False
    """Whether it is the pool of a trainer that lends."""
    learner: Callable[[Numbers], Floats] | None = None
    """Seconds of the learner's chain, of a pool of all of it, where nothing else of its times counts."""

    @property
    def scoring(self) -> list[str]:
        """Roles here that pass over finished samples, in the order of their calls."""
        return [c.role for c in self.calls if c.kind in SCORING and c.role in self.group]

    def held_elsewhere(self, held: Floats) -> Floats:
        """What dominance compares of bytes (n, moments, views, 3): nothing where all of a pool is known."""
        return held if self.lends or self.lent is not None else held[:, :0]


def alone(subproblem: Subproblem) -> Alone:
    """Each role by itself, in the order of the group."""
    return [_role(subproblem, i) for i in range(len(subproblem.group))]


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
    snapshot = subproblem.sync.host if role == "actor" else 0.0
    columns += [table.host * each + snapshot, scored]
    if subproblem.pace == "pieces" and "rollout" in subproblem.group:
        columns += list(table.pieces.T if role == "rollout" else [none] * STREAM_CHUNKS)
    workload = subproblem.workload
    states, at = table.states(
        subproblem.hardware.profile, subproblem.sync, with_actor="actor" in subproblem.group
    )
    there = (*subproblem.group, "rollout") if subproblem.lends else subproblem.group
    held = np.stack([states[m.of(role)] for m in peak_moments(subproblem.calls, there, workload)], axis=1)
    whole = Combinations(
        rows=np.arange(len(table))[:, None], sums=Sums(np.stack(columns, axis=1)), held=held, at=at
    )
    if subproblem.lent is not None:
        return replace(whole, held=np.concatenate([whole.bytes, subproblem.lent], axis=1), at=None)
    return whole


def add_sync(subproblem: Subproblem, part: Combinations, order: Sequence[int]) -> None:
    """Adds the weight path where actor and rollout of this pool have both been merged."""
    group = [subproblem.group[i] for i in order]
    if subproblem.sync_seconds is not None and group[-1] in ENDS and all(role in group for role in ENDS):
        actor, rollout = (part.rows[:, group.index(role)] for role in ENDS)
        part.sums.train[...] += subproblem.sync_seconds(actor, rollout)


def numbers_of(subproblem: Subproblem, sums: Sums) -> Numbers:
    """What combinations contribute to the step; the peak is filled in later."""
    scores = subproblem.scoring
    begin = np.maximum(sums.unload, head_seconds(subproblem.workload)) if scores else sums.unload
    return Numbers.of(
        (len(sums),),
        sums.pieces,
        until_generated_s=sums.generate,
        until_scored_s=begin + sums.score if scores else 0.0,
        until_free_s=begin + sums.score_and_unload,
        training_s=sums.train,
        until_ruled_s=sums.ruled,
        host=sums.host,
        gpus=subproblem.gpus,
    )


def fits_of(subproblem: Subproblem, part: Combinations, held: Floats, host: Floats) -> tuple[Bools, float]:
    """Which may still fit at every moment, with the leanest roles to come; and the least bytes that are
    missing on a GPU where none has room, inf where one has."""
    profile = subproblem.hardware.profile
    usable, fullest = profile.usable_memory.value, held[..., 0].max(axis=(1, 2))
    fits = fitting(held, usable, subproblem.max_oom, subproblem.doubt).all(axis=1)
    missing = np.inf if fits.any() else float(fullest.min(initial=np.inf)) - usable
    fits &= (fullest <= subproblem.max_memory) & (host <= profile.node.host_memory.value)
    return np.asarray(fits & np.isfinite(part.sums.train)), missing


def labelled(subproblem: Subproblem, rows: Ints) -> Bools:
    """Combinations that take something out of GPU memory, where the allowed label asks for it."""
    if subproblem.frees != "must" or not subproblem.whole:
        return np.ones(len(rows), dtype=np.bool_)
    freed = [t.frees[rows[:, i]] for i, t in enumerate(subproblem.tables)]
    return np.asarray(np.logical_or.reduce(freed))


def classes_of(
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


def compared(subproblem: Subproblem, rows: Ints, numbers: Numbers, held: Floats) -> tuple[Floats, Ints]:
    """(n, columns) what dominance compares of combinations, and (n,) the class within which it does.

    `held`: (n, moments, views, 3) of those of a schedule that lends, whose bytes meet those of another pool.
    """
    columns = [numbers.peak] if subproblem.wants_memory else [*times_of(subproblem, numbers).T]
    columns += [numbers.host] if subproblem.shares_host or subproblem.lends else []
    columns += [*held.reshape(len(held), prod(held.shape[1:])).T]
    if subproblem.pace == "pieces" and not subproblem.wants_memory:
        streamed = _streamed(subproblem, rows)
        columns += [
            *streamed,
            numbers.until_scored_s - streamed[0],
        ]  # last: the whole batch, without the last unload
    placed = list(zip(subproblem.group, subproblem.tables, rows.T, strict=True))
    return np.stack(columns, axis=1), classes_of(
        subproblem, placed, by_layout=subproblem.sync_seconds is None
    )


def times_of(subproblem: Subproblem, numbers: Numbers) -> Floats:
    """(n, columns) seconds that dominance compares of combinations."""
    if subproblem.learner is not None:
        return subproblem.learner(numbers)[:, None]
    times = [
        numbers.until_generated_s,
        numbers.until_scored_s,
        numbers.until_free_s,
        numbers.training_s,
        numbers.until_ruled_s,
        *numbers.pieces,
    ]
    return np.stack(times, axis=1)


def by_times(subproblem: Subproblem) -> bool:
    """Whether dominance compares seconds alone, in classes that the ends of the weight sync decide, where
    bounds leave most combinations: those of rollouts that never drain are far below the best plan."""
    bytes_count = subproblem.wants_memory or subproblem.shares_host or subproblem.lends
    known = subproblem.pace == "continuous" and subproblem.frees != "must" and subproblem.lent is None
    return known and not bytes_count and not any(each.outside for each in subproblem.agreement)


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
