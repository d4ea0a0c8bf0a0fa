"""Tables with named columns over one array, so that rows are taken, added and compared at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def column(index: int) -> Any:
    """A view of one column; `[...]` behind it writes into the table."""
    return property(lambda self: self.values[..., index])


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Rows of numbers, or a single row."""

    values: Floats
    """(..., column)"""

    def __len__(self) -> int:
        return len(self.values)

    def only(self, rows: Any) -> Self:
        """Some of the rows."""
        return replace(self, values=self.values[rows])


class OptionTimes(Columns):
    """Seconds of an option: moves around and run of its forward call or generation, then of its training."""

    __slots__ = ()
    load = column(0)
    run = column(1)
    unload = column(2)
    train_load = column(3)
    train_run = column(4)
    train_unload = column(5)

    def of_call(self, *, train: bool) -> Floats:
        """(load, run, unload) of one of its two calls, each (n,)."""
        return self.values.T[3:] if train else self.values.T[:3]

    @property
    def ready(self) -> Floats:
        """Until the result of the forward call or generation is there."""
        return np.asarray(self.load + self.run)

    @property
    def training(self) -> Floats:
        """Training with its moves."""
        return np.asarray(self.values[..., 3:].sum(axis=-1))

    @property
    def total(self) -> Floats:
        """All calls and moves of a step."""
        return np.asarray(self.values.sum(axis=-1))


class Sums(Columns):
    """What some roles of a pool add to its numbers: seconds, and bytes of a node's host memory.

    Behind them, where samples stream, the seconds until equal shares of a batch are generated.
    """

    __slots__ = ()
    FIXED = 7
    generate = column(0)
    unload = column(1)
    """Seconds until the engine sleeps."""
    score = column(2)
    """Until the last sample is scored."""
    score_and_unload = column(3)
    train = column(4)
    host = column(5)
    ruled = column(6)
    """Until rules have scored the last sample."""

    @property
    def pieces(self) -> Floats:
        """(n, pieces)"""
        return self.values[..., self.FIXED :]


class Numbers(Columns):
    """What a pool contributes to the step (arrays that broadcast against those of other pools).

    Behind the named columns, where samples stream, when equal shares of them are generated, the last at
    `until_generated_s`.
    """

    __slots__ = ()
    FIXED = 8
    until_generated_s = column(0)
    until_scored_s = column(1)
    """From there on, its own forward calls alone."""
    until_free_s = column(2)
    """From there on, with what moves out behind them."""
    training_s = column(3)
    """With its moves."""
    host = column(4)
    """Bytes of host memory on a node."""
    peak = column(5)
    """Most bytes on a GPU of the pool."""
    until_ruled_s = column(6)
    """Until rules have scored all samples."""
    gpus = column(7)

    @classmethod
    def of(cls, shape: tuple[int, ...] = (), pieces: Any = (), **columns: Any) -> Numbers:
        """From columns by name; what is left out is 0."""
        numbers = cls(np.zeros((*shape, cls.FIXED + np.shape(pieces)[-1])))
        for name, value in columns.items():
            getattr(numbers, name)[...] = value
        numbers.values[..., cls.FIXED :] = pieces
        return numbers

    @property
    def pieces(self) -> list[Floats]:
        """One array a piece."""
        return [self.values[..., i] for i in range(self.FIXED, self.values.shape[-1])]

    def delayed(self, seconds: Floats) -> Numbers:
        """With something more at the end."""
        later = Numbers(self.values.copy())
        later.training_s[...] += seconds
        return later

    def along(self, axis: int, axes: int) -> Numbers:
        """The rows along one of several axes, to be broadcast against other pools."""
        shape = [1] * axes
        shape[axis] = -1
        return Numbers(self.values.reshape(*shape, self.values.shape[-1]))


@dataclass(slots=True, kw_only=True, eq=False)
class Combinations:
    """Options of some roles of a pool put together: what they add to its numbers and to its moments."""

    rows: Ints
    """(n, roles so far) in the order of merging."""
    sums: Sums
    held: Floats
    """(m, moments, views, 3) bytes, mean and variance."""
    at: Ints | None = None
    """(n,) row of `held` of each, which options of a role share; None: the m combinations."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> Floats:
        """(n, moments, views, 3) row of `held` of each."""
        return self.held if self.at is None else self.held[self.at]

    @property
    def leanest(self) -> Floats:
        """(moments, views, 3) the least of them."""
        if self.at is None or len(self) < len(self.held):
            return np.asarray(self.bytes.min(axis=0))
        there = np.zeros(len(self.held), dtype=np.bool_)
        there[self.at] = True
        return np.asarray(self.held[there].min(axis=0))

    def only(self, rows: Ints | Bools) -> Combinations:
        """Some of them."""
        held, at = (self.held[rows], None) if self.at is None else (self.held, self.at[rows])
        return Combinations(rows=self.rows[rows], sums=self.sums.only(rows), held=held, at=at)

    def whole(self) -> Combinations:
        """The same, each with its own row of `held`."""
        return self if self.at is None else replace(self, held=self.bytes, at=None)


def together(parts: Sequence[Combinations]) -> Combinations:
    """All of them, one after the other."""
    return Combinations(
        rows=np.concatenate([p.rows for p in parts]),
        sums=Sums(np.concatenate([p.sums.values for p in parts])),
        held=np.concatenate([p.bytes for p in parts]),
    )
