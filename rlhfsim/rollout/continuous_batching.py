"""Decode of many completions by integrating the step time, never token by token.

A replica advances from completion to completion. Between two of them n sequences run and their mean
context grows by one token a step, so the time is the integral of tau(n, c) over c (G8). Steps are
the clock of the schedule; seconds follow from the integral. Legend: l response lengths, p prompt
length, n running sequences, c mean context, s steps since the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size
from rlhfsim.kernels.cost import Resource
from rlhfsim.rollout.engine_step import RESOURCES, EngineStep, Floats

Ints = NDArray[np.int64]
_BOTH = np.arange(2)[:, None]
SIDE_BY_SIDE = 6
"""Replicas from which on all are scheduled in one array instead of one heap each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Step time on a grid of n and c, linear in between, with its integral over c.

    Arrays are (resource, n, c), resources in the order of `RESOURCES`, their sum last. Where it holds the
    tables of several replicas, one after the other, `first` is the row of n = 1 of the replica asked for.
    """

    sequences: Floats
    """Grid of n, ascending."""
    context: Floats
    """Grid of c, ascending, tokens; beyond its ends tau goes on linearly."""
    seconds: Floats
    """Seconds of one step."""
    slope: Floats
    """Its slope in the cell to the right, s/token."""
    integral: Floats
    """Integral of `seconds` from the first context on."""

    def tau(self, sequences: Floats, context: Floats) -> Floats:
        """Seconds of one step."""
        low, weight = _cell(self.sequences, sequences)
        cell, width = self._place(context)
        left, right = (
            self.seconds[-1, low + i, cell] + self.slope[-1, low + i, cell] * width for i in (0, 1)
        )
        return np.asarray(left + weight * (right - left))

    def between(self, sequences: Floats, start: Floats, end: Floats, first: Size = 0) -> Floats:
        """Integral of tau over contexts from `start` to `end` at constant n."""
        return np.asarray(self._between(slice(-1, None), sequences, start, end, first)[0])

    def parts(self, sequences: Floats, start: Floats, end: Floats, first: Size = 0) -> dict[Resource, Floats]:
        """The same by resource."""
        seconds = self._between(slice(len(RESOURCES)), sequences, start, end, first)
        return dict(zip(RESOURCES, seconds, strict=True))

    def rows(self, rows: slice) -> StepTable:
        """A view of some rows of the arrays, on the first points of the grid of n."""
        seconds, slope, integral = (a[:, rows] for a in (self.seconds, self.slope, self.integral))
        grid = self.sequences[: seconds.shape[1]]
        return replace(self, sequences=grid, seconds=seconds, slope=slope, integral=integral)

    def _place(self, context: Floats) -> tuple[Ints, Floats]:
        grid = self.context
        cell = _within(np.searchsorted(grid, context, side="right") - 1, 0, len(grid) - 2)
        return cell, context - grid[cell]

    def _between(self, which: slice, sequences: Floats, start: Floats, end: Floats, first: Size) -> Floats:
        """(resource, interval) integrals."""
        low, weight = _cell(self.sequences, sequences)
        rows = first + low + _BOTH
        whole = self._primitive(which, rows, *self._place(end))
        left, right = np.moveaxis(whole - self._primitive(which, rows, *self._place(start)), 1, 0)
        return np.asarray(left + weight * (right - left))

    def _primitive(self, which: slice, rows: Ints, cell: Ints, width: Floats) -> Floats:
        """(resource, row, interval) integrals up to the cell's left edge plus a trapezoid."""
        flat = rows * len(self.context) + cell
        tau, slope, area = (
            a[which].reshape(-1, a[0].size)[:, flat] for a in (self.seconds, self.slope, self.integral)
        )
        return np.asarray(area + width * (tau + slope * width / 2))


def tabulate(sequences: Floats, context: Floats, step: EngineStep) -> StepTable:
    """A table from a step evaluated on the outer grid `sequences[:, None]`, `context[None, :]`, of one
    replica or of several, one after the other."""
    arrays = np.broadcast_arrays(*step, step.seconds, np.zeros((len(sequences), len(context))))[:-1]
    seconds = np.stack(arrays).reshape(len(arrays), -1, len(context))
    width = np.diff(context)
    pieces = (seconds[:, :, 1:] + seconds[:, :, :-1]) / 2 * width
    slope = np.diff(seconds, axis=2) / width
    zero = np.zeros((*seconds.shape[:2], 1))
    return StepTable(
        sequences=sequences,
        context=context,
        seconds=seconds,
        slope=np.concatenate([slope, slope[:, :, -1:]], axis=2),
        integral=np.concatenate([zero, np.cumsum(pieces, axis=2)], axis=2),
    )


def stacked(tables: Sequence[StepTable]) -> tuple[StepTable, Ints]:
    """Tables on grids that begin alike as one, and the row at which each begins."""
    longest = max(tables, key=lambda table: len(table.sequences))
    firsts = np.cumsum([0, *(len(table.sequences) for table in tables[:-1])])
    if len(tables) == 1:
        return longest, firsts
    seconds, slope, integral = (
        np.concatenate([getattr(table, name) for table in tables], axis=1)
        for name in ("seconds", "slope", "integral")
    )
    return replace(longest, seconds=seconds, slope=slope, integral=integral), firsts


def _cell(grid: Floats, x: Floats) -> tuple[Ints, Floats]:
    """Cell that ends at or after each x, and its place in it, clipped to the grid in n: the same cell however
    far the grid goes on."""
    low = _within(np.searchsorted(grid, x, side="left") - 1, 0, len(grid) - 2)
    weight = (_within(x, grid[0], grid[-1]) - grid[low]) / (grid[low + 1] - grid[low])
    return low, weight


def _within(x: Any, low: float, high: float) -> Any:
    """`np.clip`, which takes three times as long for few."""
    return np.minimum(np.maximum(x, low), high)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Intervals of constant n on every replica, one after the other."""

    replica: Ints
    """Replica of each interval."""
    running: Floats
    """Sequences that run on it."""
    start: Floats
    """Mean context when the interval begins, tokens."""
    steps: Floats
    """Decode steps of the interval."""
    completions: Floats
    """Sequences that finish at its end."""

    @property
    def kv_tokens(self) -> float:
        """Most tokens of context that one replica holds at a time."""
        return float(np.max(self.running * (self.start + self.steps), initial=0.0))

    @property
    def tokens(self) -> float:
        """Response tokens."""
        return float(np.sum(self.running * self.steps))


def joined(lines: Sequence[Timeline], replicas: Sequence[int]) -> tuple[Timeline, Ints]:
    """Timelines of so many replicas each one after the other, and which of them each interval is of."""
    of = np.repeat(np.arange(len(lines)), [len(line.steps) for line in lines])
    columns = {
        field.name: np.concatenate([getattr(line, field.name) for line in lines])
        for field in fields(Timeline)
    }
    begins = np.cumsum([0, *replicas[:-1]])
    return Timeline(**columns | {"replica": columns["replica"] + begins[of]}), of


def one_wave(lengths: Floats, prompt: float) -> Timeline:
    """All sequences of a replica start together: (R, n) response lengths, NaN-free, 0 = no sequence.

    sum_k (l_k - l_{k-1}) tau(n-k+1, p + l)      with l sorted ascending      (G8)
    """
    ordered = np.sort(lengths, axis=1)
    replicas, count = ordered.shape
    begin = np.concatenate([np.zeros((replicas, 1)), ordered[:, :-1]], axis=1)
    steps = ordered - begin
    running = np.broadcast_to(np.arange(count, 0, -1, dtype=np.float64), ordered.shape)
    replica = np.broadcast_to(np.arange(replicas)[:, None], ordered.shape)
    some = (steps > 0).ravel()
    # sequences that finish at the same step end one interval together
    finished = _finished_with(ordered)
    return Timeline(
        replica=replica.ravel()[some],
        running=running.ravel()[some],
        start=(prompt + begin).ravel()[some],
        steps=steps.ravel()[some],
        completions=finished.ravel()[some],
    )


def _finished_with(ordered: Floats) -> Floats:
    """For each sorted length, how many of its row are equal to it (counted at the first of them)."""
    replicas, count = ordered.shape
    new = np.ones_like(ordered, dtype=bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.flatnonzero(new.ravel())
    sizes = np.diff(np.append(first, replicas * count))
    out = np.zeros(replicas * count)
    out[first] = sizes
    return out.reshape(replicas, count)


def continuous_timeline(lengths: Floats, slots: int, prompt: float) -> Timeline:
    """Continuous batching: `slots` sequences run on each replica, a finished one is replaced (G9).

    List scheduling in the order given, steps as the clock: every running sequence gains one token
    a step whatever the step takes.
    """
    starts = start_steps(lengths, slots)
    real = lengths > 0
    when = np.concatenate([starts, starts + lengths], axis=1)
    order = np.argsort(when, axis=1, kind="stable")
    sign = np.concatenate([real * 1.0, real * -1.0], axis=1)
    begun = np.concatenate([starts, starts], axis=1)
    when, change, begun = (np.take_along_axis(x, order, axis=1) for x in (when, sign, begun))
    running, sum_starts = np.cumsum(change, axis=1), np.cumsum(change * begun, axis=1)
    steps = np.diff(when, axis=1, append=when[:, -1:])
    some = steps > 0
    n = running[some]
    replica = np.broadcast_to(np.arange(len(lengths))[:, None], steps.shape)[some]
    return Timeline(
        replica=np.asarray(replica),
        running=n,
        start=prompt + when[some] - sum_starts[some] / n,
        steps=steps[some],
        completions=_completions(np.cumsum(change < 0, axis=1), some, replica),
    )


def _completions(ended: Ints, some: NDArray[np.bool_], replica: Ints) -> Floats:
    """Sequences that finish between each interval's begin and that of the next one on its replica."""
    so_far = ended[some].astype(np.float64)
    last = np.append(replica[1:] != replica[:-1], True)
    after = np.append(so_far[1:], 0.0)
    after[last] = ended[replica[last], -1]
    return np.asarray(after - so_far)


def start_steps(lengths: Floats, slots: int) -> Floats:
    """When each sequence of each replica starts, steps: in the order given, as slots fall free."""
    replicas, count = lengths.shape
    real, longest = lengths > 0, lengths.max(initial=0.0)
    whole = float(longest).is_integer()  # so that a wave begins exactly where the one before it ends
    if whole and (lengths[real] == longest).all():  # what pads a replica starts as its last one ends
        before = np.minimum(np.arange(count), real.sum(axis=1, keepdims=True))
        return np.asarray(before // slots * longest)
    starts = np.zeros((replicas, count))
    if replicas < SIDE_BY_SIDE:
        for row, row_starts in zip(lengths, starts, strict=True):
            row_starts[slots:] = _starts_one(row.tolist(), slots)
        return starts
    ends = lengths[:, :slots].copy()
    rows = np.arange(replicas)
    for j in range(slots, count):
        first = ends.argmin(axis=1)
        starts[:, j] = ends[rows, first]
        ends[rows, first] += lengths[:, j]
    return starts


def _starts_one(lengths: list[float], slots: int) -> list[float]:
    ends = lengths[:slots]
    heapq.heapify(ends)
    starts = []
    replace = heapq.heapreplace
    for length in lengths[slots:]:
        now = ends[0]
        starts.append(now)
        replace(ends, now + length)
    return starts


def lower_bound(table: StepTable, longest: Floats, prompt: Floats, first: Size = 0) -> Floats:
    """No schedule is faster than the longest response alone: l_max tau(1) (G8)."""
    return table.between(np.ones_like(longest), prompt, prompt + longest, first)
