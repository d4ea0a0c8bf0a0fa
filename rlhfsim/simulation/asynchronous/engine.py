"""A rollout replica, priced: seconds of decode steps, prefill, prefill again, slots and KV capacity.

`StepClock` is `rollout.continuous_batching.StepTable` for single values, because a simulation asks for one
interval at a time. Not known here: what runs on the replica (`rollout`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from rlhfsim.kernels.device import Device
from rlhfsim.rollout.continuous_batching import StepTable
from rlhfsim.rollout.generation import kv_capacity, step_table
from rlhfsim.rollout.prefill import prefill, prompts
from rlhfsim.rollout.schedule import Requests, most_running
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import stats

REPREFILL_CONTEXTS = 8
"""Columns of the table of prefill seconds by context."""
Row = tuple[list[float], list[float], list[float]]


class StepClock:
    """Seconds of decode steps of one replica: `StepTable.between` and its inverse for single values."""

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.grid = [float(c) for c in table.context]
        self.last = len(self.grid) - 1
        """Cells beyond the last column go on with its slope."""
        self.rows: dict[int, Row] = {}

    def row(self, n: int) -> Row:
        """tau, half its slope and its integral at every column, for n sequences."""
        cached_row = self.rows.get(n)
        if cached_row is None:
            grid, t = self.table.sequences, self.table
            low = min(max(int(np.searchsorted(grid, n, side="right")) - 1, 0), len(grid) - 2)
            place = (min(max(n, grid[0]), grid[-1]) - grid[low]) / (grid[low + 1] - grid[low])
            both = (t.seconds[-1], t.slope[-1] / 2, t.integral[-1])
            tau, half, area = ((a[low] + place * (a[low + 1] - a[low])).tolist() for a in both)
            cached_row = self.rows[n] = (tau, half, area)
        return cached_row

    def _primitive(self, row: Row, context: float) -> float:
        cell = bisect_right(self.grid, context, 1, self.last) - 1
        width = context - self.grid[cell]
        return row[2][cell] + width * (row[0][cell] + width * row[1][cell])

    def seconds(self, n: int, context: float, steps: float) -> float:
        """Integral of tau(n, c) from `context` on over `steps` steps."""
        row = self.row(n)
        return self._primitive(row, context + steps) - self._primitive(row, context)

    def steps(self, n: int, context: float, seconds: float) -> float:
        """Steps that fit into `seconds`: the inverse of `seconds`."""
        tau, half, area = row = self.row(n)
        target = self._primitive(row, context) + seconds
        cell = bisect_right(area, target, 1, self.last) - 1
        left = target - area[cell]
        root = math.sqrt(max(0.0, tau[cell] ** 2 + 4 * half[cell] * left))
        return max(0.0, self.grid[cell] + 2 * left / (tau[cell] + root) - context)


class Reprefill(Protocol):
    """Seconds to compute again what `sequences` sequences of `context` tokens had in their KV cache."""

    def __call__(self, sequences: float, context: float) -> float:
        """Seconds on one replica."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaEngine:
    """What one rollout replica can do, priced."""

    clock: StepClock
    slots: int
    """Sequences that run at a time, at most."""
    capacity: float
    """KV cache, tokens."""
    prompt: float
    """Mean prompt, tokens."""
    own: float
    """KV tokens of a sequence other than its response: its part of the prompt and half a block."""
    prefill: float
    """Seconds to prefill the prompt of one group."""
    again: Reprefill

    def slower(self, factor: float) -> ReplicaEngine:
        """The replica with every time `factor` times as long."""
        if factor == 1:
            return self
        t, again = self.clock.table, self.again
        table = replace(t, seconds=t.seconds * factor, slope=t.slope * factor, integral=t.integral * factor)
        return replace(
            self,
            clock=StepClock(table),
            prefill=self.prefill * factor,
            again=lambda sequences, context: factor * again(sequences, context),
        )


@lru_cache(maxsize=256)
def engine_of(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    kv_tokens: float | None,
    longest: float,
    admitted: float,
    *,
    worker: bool = True,
) -> ReplicaEngine:
    """The replica of a rollout role, priced as `rollout.steady_state` prices it.

    slots = min(max_num_seqs, C / (p / G + E[l^2] / 2 E[l] + half a block))

    The second is what fits on average; a cache that is full all the same evicts the latest sequence.
    `longest` response, tokens; `admitted`: most sequences that staleness lets into the pool; `worker`
    as in `rollout.generation.generate`.
    """
    prompt, response = stats(requests.prompt_lengths).mean, stats(requests.response_lengths)
    own = prompt / requests.samples + VLLM.block_tokens / 2
    age = response.mean_square / (2 * response.mean)
    capacity = kv_capacity(device, model, layout) if kv_tokens is None else kv_tokens
    limit = most_running(layout, requests)
    slots = max(1, min(limit, int(capacity / (own + age)), math.ceil(admitted)))
    share = requests.sequences / (layout.dp * layout.attention_dp)
    first = prompts(device, model, layout, share, requests, prompt)
    adapters, reach, most = requests.adapters, prompt + longest, float(slots)
    return ReplicaEngine(
        clock=StepClock(step_table(device, model, layout, most, reach, worker=worker, adapters=adapters)),
        slots=slots,
        capacity=capacity,
        prompt=prompt,
        own=own,
        prefill=first.cost(device).seconds / max(1.0, requests.prompts / layout.dp),
        again=_Reprefill(device, model, layout, prompt + longest),
    )


class _Reprefill:
    """`rollout.prefill.prefill` between powers of two in n and a geometric grid of contexts, bilinear."""

    def __init__(self, device: Device, model: ModelSpec, layout: RolloutLayout, longest: float) -> None:
        self._of = (device, model, layout)
        low = min(64.0, longest / 2)
        self._seconds: dict[tuple[float, int], float] = {}
        self._contexts = [float(c) for c in np.geomspace(low, max(longest, 2 * low), REPREFILL_CONTEXTS)]

    def __call__(self, sequences: float, context: float) -> float:
        if sequences <= 0:
            return 0.0
        grid = self._contexts
        i = min(max(bisect_right(grid, context) - 1, 0), len(grid) - 2)
        low = 2.0 ** math.floor(math.log2(max(1.0, sequences)))
        x = (context - grid[i]) / (grid[i + 1] - grid[i])
        y = (max(1.0, sequences) - low) / low
        a, b = self._at(low, i), self._at(low, i + 1)
        below = a + x * (b - a)
        if y <= 0:
            return max(0.0, below)
        a, b = self._at(2 * low, i), self._at(2 * low, i + 1)
        return max(0.0, below + y * (a + x * (b - a) - below))

    def _at(self, n: float, column: int) -> float:
        seconds = self._seconds.get((n, column))
        if seconds is None:
            seconds = _prefill_seconds(*self._of, n, self._contexts[column])
            self._seconds[n, column] = seconds
        return seconds


@lru_cache(maxsize=65536)
def _prefill_seconds(
    device: Device, model: ModelSpec, layout: RolloutLayout, n: float, context: float
) -> float:
    each = n / layout.attention_dp
    return prefill(device, model, layout, each, context).cost(device).seconds
