"""What another option or plan equals or beats: rows of a table, and plans whose rollout never drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfsim.search.columns import Bools, Floats, Ints
from rlhfsim.search.options import OptionTable

MIX = 6364136223846793005
"""Odd, so that no bit of a class is lost (Knuth's multiplier)."""


AT_ONCE, PAIRS = 48, 1_000_000
"""Most rows that are compared with all that are left in one go, and most pairs."""


def mixed(classes: Ints, numbers: Ints) -> Ints:
    """Classes that differ wherever classes or numbers do, for all practical purposes: a 64-bit mix."""
    return classes * MIX + numbers


def undominated(columns: Floats, classes: Ints, tie: Floats | None = None) -> Ints:
    """Rows that no other row of their class equals or beats in every column, ordered by their sum.

    Of rows that are equal in every column the one with the least `tie` stays.
    """
    keys = columns.T[::-1] if tie is None else np.concatenate([tie[None], columns.T[::-1]])
    order = np.lexsort([*keys, classes])
    starts = np.flatnonzero(np.diff(classes[order], prepend=classes[order[:1]] - 1))
    sizes = np.diff(starts, append=len(order))
    stays = np.zeros(len(order), dtype=np.bool_)
    for size in np.unique(sizes).tolist():
        places = starts[sizes == size][:, None] + np.arange(size)
        for some in np.split(places, range(0, len(places), max(1, PAIRS // size**2))[1:]):
            stays[some] = _fronts(columns, order[some])
    rows = order[stays]
    return np.asarray(rows[np.argsort(columns[rows].sum(axis=1), kind="stable")])


def distinct(columns: Floats) -> Floats:
    """The columns in which rows differ, equal ones once: the same rows are dominated."""
    varied = columns[:, columns.min(axis=0) < columns.max(axis=0)] if len(columns) else columns
    first = {column.tobytes(): i for i, column in reversed([*enumerate(np.ascontiguousarray(varied.T))])}
    return varied[:, sorted(first.values())] if varied.size else columns[:, :1]


def _fronts(columns: Floats, members: Ints) -> Bools:
    """(classes, rows) whether a row of a class is not dominated; rows in lexicographic order.

    There a row can only be dominated by an earlier one, so of the first rows left those that none before them
    dominates stay; what they dominate goes.
    """
    size = members.shape[1]
    if size <= AT_ONCE:
        rows = columns[members]
        return np.asarray(~np.tril(_beaten(rows, rows), -1).any(axis=-1))
    stays = np.zeros(members.shape, dtype=np.bool_)
    for own, of_class in zip(stays, members, strict=True):
        left = np.arange(size)
        while len(left):
            few = min(AT_ONCE, max(1, PAIRS // len(left)))
            first, left = left[:few], left[few:]
            rows = columns[of_class[first]]
            front = first[~np.tril(_beaten(rows, rows), -1).any(axis=-1)]
            own[front] = True
            left = left[~_beaten(columns[of_class[left]], columns[of_class[front]]).any(axis=-1)]
    return stays


def _beaten(rows: Floats, others: Floats) -> Bools:
    """(..., rows, others) whether the other is no worse in any column."""
    beaten = np.ones((*rows.shape[:-1], others.shape[-2]), dtype=np.bool_)
    for one, other in zip(np.moveaxis(rows, -1, 0), np.moveaxis(others, -1, 0), strict=True):
        beaten &= one[..., :, None] >= other[..., None, :]
    return beaten


def lean(
    table: OptionTable,
    columns: Floats,
    *,
    by_class: bool,
    by_label: bool,
    by_move: bool,
    agreed: Sequence[int] = (),
) -> Ints:
    """Options of one role that no other of its class beats in time and in every state's bytes.

    `agreed`: columns of `OptionTable.agreed` that other roles must have the same number in.
    """
    classes = table.sync_class if by_class else np.zeros(len(table), dtype=np.int64)
    if by_label:
        classes = classes * 2 + table.frees
    if by_move:
        classes = classes * 4 + table.moved
    for column in agreed:
        assert table.agreed is not None
        classes = mixed(classes, table.agreed[:, column])
    return np.sort(undominated(distinct(columns), classes))


# --- plans whose rollout never drains ---------------------------------------------------------------


LENT_GAP = 0.01
"""Share by which a step may be shorter though its learner, whose GPUs are lent, is slower: 0.7 % is the most
that brute force has found. Simulating them all takes a search of 8 GPUs from 30 s to over 8 minutes."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A simulated plan, described by what runs at the same time as its rollout."""

    learner_s: float
    """The learner's chain for one batch."""
    moves_s: Sequence[float]
    """The weight sync; where the trainer's GPUs are lent also the way to the rollout and back."""
    step_s: float
    """Simulated."""

    def beats(self, learner_s: float, moves_s: Sequence[float], limit: float) -> bool:
        """Whether a plan with the same rollout is no faster, or slower than `limit`.

        A slower learner is taken to shorten no step. In the simulation a faster one moves weights more often,
        while more sequences run that prefill again: of 60 what-if points (30 of fixed lengths) one would have
        a step that is 5 % shorter with a slower learner, none of the 30 with drawn lengths
        (lab/benchmarks/slower_learners.py).
        Where its GPUs are lent: `LENT_GAP`. A move that is shorter by some seconds shortens no step by more.
        """
        shorter = sum(max(0.0, mine - its) for mine, its in zip(self.moves_s, moves_s, strict=True))
        return self.learner_s <= learner_s and (not shorter or self.step_s - shorter > limit)

    def excludes(self, learner_s: float, moves_s: Sequence[float], limit: float) -> bool:
        """The same of any plan whose learner and moves take at least as long, of which this may be one."""
        differs = self.learner_s < learner_s or self.step_s > limit
        return differs and self.beats(learner_s, moves_s, limit)
