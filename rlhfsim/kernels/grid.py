"""Measured times on a grid: monotone, multilinear in the logarithms, constant efficiency beyond."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


FEW = 8
"""Up to this many points a plain loop is faster than array operations."""
LEAST = 1e-9
"""Coordinates are at least this, so that their logarithm exists."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """log t over log2 coordinates; never falls along any axis."""

    knots: tuple[Floats, ...]
    """log2 of the coordinates, ascending, two or more per axis."""
    growth: tuple[float, ...]
    """Power of time beyond the last knot of each axis; below the first knot time is constant."""
    log_time: Floats
    """Natural log of seconds, one dimension per axis."""
    _axes: tuple[list[float], ...] = field(init=False, repr=False)
    _values: list[float] = field(init=False, repr=False)
    _corners: tuple[int, ...] = field(init=False, repr=False)
    """Places of a cell's corners in `_values`, from its lowest one on; the last axis moves first."""

    def __post_init__(self) -> None:
        """Keep plain numbers for the loop over few points."""
        object.__setattr__(self, "_axes", tuple(axis.tolist() for axis in self.knots))
        object.__setattr__(self, "_values", self.log_time.ravel().tolist())
        strides = [math.prod(self.log_time.shape[i + 1 :]) for i in range(self.log_time.ndim)]
        steps = product(*((0, stride) for stride in strides))
        object.__setattr__(self, "_corners", tuple(sum(step) for step in steps))

    def __call__(self, *coordinates: ArrayLike) -> Floats:
        """Seconds at points; coordinates broadcast.

        log t = sum of corners w_i log t_i (multilinear), plus growth x log of the excess

        The same operations in the same order as `at`, so that a time is the same to the last bit however many
        are asked for.
        """
        shape = np.broadcast(*coordinates).shape
        if math.prod(shape) <= FEW:
            points = np.broadcast_arrays(*coordinates)
            each = zip(*(x.ravel().tolist() for x in points), strict=True)
            return np.array([self.at(point) for point in each]).reshape(shape)
        logs = [_mapped(math.log2, np.maximum(x, LEAST)) for x in coordinates]
        base, shares = cells(self.knots, logs)
        beyond = np.zeros(shape)
        for knots, power, x in zip(self.knots, self.growth, logs, strict=True):
            beyond += power * np.maximum(x - knots[-1], 0.0)
        cell = self.log_time.ravel()[np.add.outer(self._corners, base)]
        for share in reversed(shares):
            low = cell[0::2]
            cell = low + share * (cell[1::2] - low)
        return _mapped(math.exp, cell[0] + math.log(2.0) * beyond)

    def at(self, point: tuple[float, ...]) -> float:
        """Seconds at one point; one axis after the other instead of a sum over corners."""
        base, shares, beyond = 0, [], 0.0
        for axis, power, value in zip(self._axes, self.growth, point, strict=True):
            x = math.log2(value if value > LEAST else LEAST)
            last = len(axis) - 1
            low = bisect_right(axis, x, 1, last) - 1
            share = (x - axis[low]) / (axis[low + 1] - axis[low])
            shares.append(0.0 if share < 0.0 else min(share, 1.0))
            base = base * (last + 1) + low
            if x > axis[last]:
                beyond += power * (x - axis[last])
        values = self._values
        cell = [values[base + corner] for corner in self._corners]
        for share in reversed(shares):
            ends = iter(cell)
            cell = [low + share * (high - low) for low, high in zip(ends, ends, strict=True)]
        return math.exp(cell[0] + math.log(2.0) * beyond)


def _mapped(function: Callable[[float], float], values: ArrayLike) -> Floats:
    """A function of the standard library of every value: NumPy's may differ by a last bit."""
    given = np.asarray(values, dtype=np.float64)
    return np.fromiter(map(function, given.ravel().tolist()), np.float64, given.size).reshape(given.shape)


def cells(knots: tuple[Floats, ...], points: list[Floats]) -> tuple[NDArray[np.intp], list[Floats]]:
    """Flat index of the lowest node of each point's cell, and how far along each axis of it the point is;
    points are clipped."""
    base, shares = np.zeros((), dtype=np.intp), list[Floats]()
    for axis, x in zip(knots, points, strict=True):
        low = np.minimum(np.maximum(np.searchsorted(axis, x, side="right") - 1, 0), axis.size - 2)
        share = (x - axis[low]) / (axis[low + 1] - axis[low])
        shares.append(np.minimum(np.maximum(share, 0.0), 1.0))
        base = base * axis.size + low
    return base, shares


def monotone(log_time: Floats) -> Floats:
    """The least grid above `log_time` that falls along no axis (running maximum)."""
    for axis in range(log_time.ndim):
        log_time = np.maximum.accumulate(log_time, axis=axis)
    return log_time


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_BASE = len(_DIGITS)


def encode(values: Floats) -> str:
    """Non-negative numbers as integers of two base-36 digits each, 0 to 1295, row by row."""
    whole = np.clip(np.rint(values), 0, _BASE**2 - 1).astype(int).ravel()
    return "".join(_DIGITS[v // _BASE] + _DIGITS[v % _BASE] for v in whole)


def decode(text: str) -> Floats:
    """The numbers of `encode`."""
    table = np.zeros(128)
    table[[ord(c) for c in _DIGITS]] = np.arange(_BASE)
    digits = table[np.frombuffer(text.encode("ascii"), dtype=np.uint8)].reshape(-1, 2)
    numbers: Floats = digits @ np.array([float(_BASE), 1.0])
    return numbers
