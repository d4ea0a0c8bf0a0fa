"""Rows of a table that no other row of their class equals or beats in every column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfsim.search.columns import Floats, Ints
from rlhfsim.search.options import OptionTable

MIX = 6364136223846793005
"""Odd, so that no bit of a class is lost (Knuth's multiplier)."""


def mixed(classes: Ints, numbers: Ints) -> Ints:
    """Classes that differ wherever classes or numbers do, for all practical purposes: a 64-bit mix."""
    return classes * MIX + numbers


def undominated(columns: Floats, classes: Ints, tie: Floats | None = None) -> Ints:
    """Rows that no other row of their class equals or beats in every column, ordered by their sum.

    Of rows that are equal in every column the one with the least `tie` stays.
    """
    order = np.argsort(classes, kind="stable")
    fronts: list[Ints] = []
    for members in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        fronts.append(members[_front(columns[members], None if tie is None else tie[members])])
    rows = np.concatenate(fronts) if fronts else np.empty(0, dtype=np.int64)
    return np.asarray(rows[np.argsort(columns[rows].sum(axis=1), kind="stable")])


def _front(columns: Floats, tie: Floats | None) -> Ints:
    """Rows that are not dominated.

    In lexicographic order a row can only be dominated by an earlier one, so the first row left is
    never dominated; what it dominates goes.
    """
    keys = columns.T[::-1] if tie is None else np.concatenate([tie[None], columns.T[::-1]])
    left = np.lexsort(keys)
    front: list[int] = []
    while len(left):
        front.append(int(left[0]))
        left = left[(columns[left] < columns[left[0]]).any(axis=1)]
    return np.array(front, dtype=np.int64)


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
    return np.sort(undominated(columns, classes))
