"""Seats that share a pool: the fastest combinations that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfsim.search.options import Option, thinned

Floats = NDArray[np.float64]
MOST = 250_000
"""Combinations that are compared at most; seats with more options are thinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One option for each seat of a pool."""

    options: tuple[Option, ...]
    seconds: float
    """Their calls one after the other."""
    needed: float
    """Most bytes on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """The best combinations of a pool and how many did not fit."""

    best: tuple[Combination, ...]
    compared: int
    unfit: int
    shortfall: float
    """Least bytes that are missing when nothing fits; 0 when something does."""


def combine(seats: Sequence[Sequence[Option]], usable: float, count: int) -> Combined:
    """The `count` fastest combinations whose memory fits at every call.

    fits  <=>  max_i (busy_i - idle_i) + sum_j idle_j <= usable
    """
    each = int(MOST ** (1 / len(seats)))
    seats = [thinned(options, each) for options in seats]
    if any(not options for options in seats):
        return Combined(best=(), compared=0, unfit=0, shortfall=0.0)
    seconds = _outer([np.array([o.seconds for o in options]) for options in seats], np.add)
    idle = _outer([np.array([o.idle for o in options]) for options in seats], np.add)
    added = _outer([np.array([o.busy - o.idle for o in options]) for options in seats], np.maximum)
    needed = idle + added
    fits = needed <= usable
    order = np.flatnonzero(fits)
    if not len(order):
        return Combined(
            best=(), compared=fits.size, unfit=fits.size, shortfall=float(needed.min() - usable)
        )
    fastest = seconds.reshape(-1)[order]
    head = np.argpartition(fastest, min(count, len(order)) - 1)[:count]
    chosen = order[head[np.argsort(fastest[head], kind="stable")]]
    best = tuple(
        Combination(
            options=tuple(options[i] for options, i in zip(seats, index, strict=True)),
            seconds=float(seconds[index]),
            needed=float(needed[index]),
        )
        for index in zip(*np.unravel_index(chosen, seconds.shape), strict=True)
    )
    return Combined(best=best, compared=fits.size, unfit=int(fits.size - len(order)), shortfall=0.0)


def _outer(arrays: list[Floats], operation: np.ufunc) -> Floats:
    result = arrays[0]
    for array in arrays[1:]:
        result = operation(result[..., None], array)
    return result
