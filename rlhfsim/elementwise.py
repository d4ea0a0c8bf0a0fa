"""Formulas over a number, or over an array with an entry a layout: one text prices one plan and a column.

Plain numbers stay plain numbers and run at their speed, so a single plan costs no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce, wraps
from itertools import repeat, zip_longest
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
FEW = 8
"""Most words of a column that are looked for one by one."""
SPARSE = 64
"""Most places of a table for each row that it holds."""
MOST_KNOWN = 65536
"""Rows from which on those that are known are forgotten."""
Size: TypeAlias = Any
"""A number (or truth value), or an array with an entry a layout."""


def where(holds: Size, yes: Size, no: Size) -> Size:
    """`yes` where it holds, else `no`."""
    if isinstance(holds, np.ndarray):
        return np.where(holds, yes, no)
    return yes if holds else no


def either(holds: Size, yes: Callable[[], Size], no: Callable[[], Size]) -> Size:
    """`yes()` where it holds, else `no()`; what no layout reads is not worked out."""
    if not isinstance(holds, np.ndarray):
        return yes() if holds else no()
    if holds.all():
        return yes()
    return np.where(holds, yes(), no()) if holds.any() else no()


def by_word(words: Size, answer: Callable[[Any], Size]) -> Size:
    """`answer` of the word that each layout has."""
    if not isinstance(words, np.ndarray):
        return answer(words)
    return reduce(lambda found, word: where(words == word, answer(word), found), {*words.tolist()}, 0.0)


def unsaid(words: Size) -> Size:
    """Where the value is None."""
    nothing: Any = None
    return words == nothing if isinstance(words, np.ndarray) else words is None


def together(function: Callable[..., Size], rows: Sequence[tuple[Any, ...]]) -> list[Size]:
    """`function` of each row, a word and sizes; rows that hold arrays are asked once for each word."""
    shapes = [size.shape for row in rows for size in row if isinstance(size, np.ndarray)]
    if not shapes:
        return [function(*row) for row in rows]
    answers: list[Size] = [None] * len(rows)
    for word, places in alike(row[0] for row in rows):
        columns = np.empty((len(rows[0]) - 1, len(places), *shapes[0]))
        for i, place in enumerate(places):
            for column, size in zip(columns, rows[place][1:], strict=True):
                column[i] = size
        for place, answer in zip(places, function(word, *columns), strict=True):
            answers[place] = answer
    return answers


def most(*sizes: Size) -> Size:
    """The largest, entry by entry."""
    for size in sizes:
        if isinstance(size, np.ndarray):
            return reduce(np.maximum, sizes)
    return max(sizes)


def least(*sizes: Size) -> Size:
    """The smallest, entry by entry."""
    for size in sizes:
        if isinstance(size, np.ndarray):
            return reduce(np.minimum, sizes)
    return min(sizes)


def largest(*sizes: Size) -> Size:
    """The place of the first of the largest, entry by entry."""
    for size in sizes:
        if isinstance(size, np.ndarray):
            return np.argmax(np.broadcast_arrays(*sizes), axis=0)
    return sizes.index(max(sizes))


def ceil(size: Size) -> Size:
    """Rounded up."""
    return np.ceil(size) if isinstance(size, np.ndarray) else math.ceil(size)


def column(sizes: Sequence[Size]) -> Size:
    """Sizes as an array; one stays a plain number."""
    return np.array(sizes) if len(sizes) > 1 else sizes[0]


def number(array: NDArray[Any]) -> Size:
    """An array without an axis as a plain number."""
    return array if np.ndim(array) else float(array)


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
    rows, places = distinct(*columns)
    found = [function(*row) for row in rows]
    if isinstance(found[0], tuple | list):
        found = list(zip_longest(*found, fillvalue=0.0))
    return np.array(found, dtype=float)[..., places]


def remembered(
    known: dict[tuple[Any, ...], NDArray[np.float64]], price: Callable[..., Sequence[Size]], *columns: Size
) -> Sequence[Size]:
    """Numbers of every row of the columns; those of rows that are not `known` are asked for as columns, at
    once."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    if not any(isinstance(column, np.ndarray) for column in columns):
        if columns not in known:
            known[columns] = np.array(price(*columns))
        numbers: list[float] = known[columns].tolist()
        return numbers
    rows, places = distinct(*columns)
    if new := [row for row in rows if row not in known]:
        answers = price(*map(np.array, zip(*new, strict=True)))
        table = np.empty((len(new), len(answers)))
        for column, answer in zip(table.T, answers, strict=True):
            column[:] = answer
        known.update(zip(new, table, strict=True))
    found = np.concatenate([known[row] for row in rows]).reshape(len(rows), -1)
    return tuple(found.T[:, places])


def kept(maxsize: int) -> Callable[[F], F]:
    """A cache of the answers for plain arguments; those for arrays are worked out each time."""

    def keeping(function: F) -> F:
        known = lru_cache(maxsize=maxsize)(function)

        @wraps(function)
        def asked(*args: Any, **named: Any) -> Any:
            try:
                return known(*args, **named)
            except TypeError:  # arrays have no hash
                return function(*args, **named)

        return cast(F, asked)

    return keeping


def distinct(*columns: Size) -> tuple[list[tuple[Any, ...]], NDArray[np.intp]]:
    """Distinct rows of columns, one of which is an array, and the place among them of every row; a number
    is the same in every row."""
    first, places = groups(*(column for column in columns if isinstance(column, np.ndarray)))
    chosen = (c.ravel()[first].tolist() if isinstance(c, np.ndarray) else repeat(c) for c in columns)
    return list(zip(*chosen, strict=False)), places


def groups(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where each distinct row of the columns, all of one shape, is first, and the place among those of every
    row."""
    shape = columns[0].shape
    if not columns[0].size:
        return np.zeros(0, dtype=np.intp), np.zeros(shape, dtype=np.intp)
    numbers = [_numbers(column.ravel()) for column in columns]
    code, count = numbers[0], int(numbers[0].max()) + 1
    for number in numbers[1:]:
        code, count = code * (size := int(number.max()) + 1) + number, count * size
        if count > SPARSE * len(code):
            known, code = np.unique(code, return_inverse=True)
            count = len(known)
    first = np.full(count, -1, dtype=np.intp)
    first[code[::-1]] = np.arange(len(code))[::-1]
    used = np.flatnonzero(first >= 0)
    place = np.zeros(count, dtype=np.intp)
    place[used] = np.arange(len(used))
    return first[used], place[code].reshape(shape)


def _numbers(column: NDArray[Any]) -> NDArray[np.int64]:
    """A number from 0 on for each value of a column, most of them close together."""
    if column.dtype.kind in "bui":
        number = column.astype(np.int64)
        number -= number.min()
        if number.max() < SPARSE * len(number):
            return number
    if column.dtype.kind in "buif":
        return np.unique(column, return_inverse=True)[1].astype(np.int64)
    number, left, count = np.full(len(column), -1, dtype=np.int64), column, 0
    while len(left) and count < FEW:
        number[column == left[0]] = count
        left, count = column[number < 0], count + 1
    return np.array(numbered(column.tolist())[1], dtype=np.int64) if len(left) else number


def numbered(rows: Iterable[T]) -> tuple[list[T], list[int]]:
    """Distinct rows in the order of their first, and the place of each among them."""
    places: dict[T, int] = {}
    found = [places.setdefault(row, len(places)) for row in rows]
    return list(places), found


def alike(rows: Iterable[T]) -> Iterator[tuple[T, NDArray[np.intp]]]:
    """Distinct rows, and where each occurs."""
    distinct, places = numbered(rows)
    if len(distinct) < 2:
        yield from ((row, np.arange(len(places))) for row in distinct)
        return
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=len(distinct)))
    yield from zip(distinct, np.split(order, ends[:-1]), strict=True)
