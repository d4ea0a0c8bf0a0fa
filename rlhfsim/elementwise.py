"""Formulas over a number, or over an array with an entry a layout: one text prices one plan and a column.

Plain numbers stay plain numbers and run at their speed, so a single plan costs no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import repeat, zip_longest
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
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

    It answers with a number or a tuple of numbers; the answer is an array, or one for each of them: where
    some tuples are shorter, with 0 behind their end.
    """
    if not any(isinstance(column, np.ndarray) for column in columns):
        return function(*columns)
    distinct, rows = numbered(rows_of(*columns))
    found = [function(*row) for row in distinct]
    if isinstance(found[0], tuple | list):
        found = list(zip_longest(*found, fillvalue=0.0))
    return np.array(found, dtype=float)[..., rows]


def rows_of(*columns: Size) -> Iterator[tuple[Any, ...]]:
    """The rows of columns, one of which is an array; a number stands in every row."""
    return zip(*(c.tolist() if isinstance(c, np.ndarray) else repeat(c) for c in columns), strict=False)


def numbered(rows: Iterable[T]) -> tuple[list[T], list[int]]:
    """Distinct rows in the order of their first, and the place of each among them."""
    places: dict[T, int] = {}
    found = [places.setdefault(row, len(places)) for row in rows]
    return list(places), found


def alike(rows: Iterable[T]) -> Iterator[tuple[T, NDArray[np.intp]]]:
    """Distinct rows, and where each stands."""
    distinct, places = numbered(rows)
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=len(distinct)))
    yield from zip(distinct, np.split(order, ends[:-1]), strict=True)
