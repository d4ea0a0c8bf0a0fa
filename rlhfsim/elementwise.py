"""Formulas over a number, or over an array with an entry a layout: one text prices one plan and a column.

Plain numbers stay plain numbers and run at their speed, so a single plan costs no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np

Size: TypeAlias = Any
"""A number (or truth value), or an array with an entry a layout."""


def where(holds: Size, yes: Size, no: Size) -> Size:
    """`yes` where it holds, else `no`."""
    if isinstance(holds, np.ndarray):
        return np.where(holds, yes, no)
    return yes if holds else no


def most(*sizes: Size) -> Size:
    """The largest, entry by entry."""
    if any(isinstance(size, np.ndarray) for size in sizes):
        return reduce(np.maximum, sizes)
    return max(sizes)


def least(*sizes: Size) -> Size:
    """The smallest, entry by entry."""
    if any(isinstance(size, np.ndarray) for size in sizes):
        return reduce(np.minimum, sizes)
    return min(sizes)


def ceil(size: Size) -> Size:
    """Rounded up."""
    return np.ceil(size) if isinstance(size, np.ndarray) else math.ceil(size)


def some(holds: Size) -> bool:
    """Whether it holds for any layout."""
    return bool(holds.any()) if isinstance(holds, np.ndarray) else bool(holds)


def given(size: Size) -> Size:
    """Where there is a size that is not 0: None is none, as 0 is in an array."""
    return size > 0 if isinstance(size, np.ndarray) else bool(size)


def each(function: Callable[..., Any], *columns: Size) -> Any:
    """`function` of every row of the columns, asked once for all equal rows.

    It answers with a number or a tuple of numbers; the answer is an array, or one for each of them.
    """
    if not any(isinstance(column, np.ndarray) for column in columns):
        return function(*columns)
    lists = (c.tolist() if isinstance(c, np.ndarray) else repeat(c) for c in columns)
    places: dict[Any, int] = {}
    rows = [places.setdefault(row, len(places)) for row in zip(*lists, strict=False)]
    return np.array([function(*row) for row in places], dtype=float)[rows].T
