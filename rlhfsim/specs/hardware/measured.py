"""What micro-benchmarks found on a machine: numbers with interval, what was not measured, and which machine.

One rule makes every interval: P10 to P90 of the repeats, widened by a factor for what one session cannot
know (`WIDENING`). The executor fills these types, `calibration.micro_benchmarks.profile` makes a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from rlhfsim import units
from rlhfsim.frozen import frozen

WIDENING = 1.15
"""Factor on both sides of P10 to P90. Prior: clock, neighbours and placement of memory differ by about
15 % between two sessions on one machine, which repeats within a session do not show."""
FEW, FEW_WIDENING = 3, 1.5
"""Below so many repeats percentiles say little, and the factor is this one; prior."""
HIDDEN, HEADS, KV_HEADS = 256, 4, 2
"""Sizes of the tiny models whose decode steps are timed, with `TINY_FFN` and `TINY_VOCAB`."""
TINY_FFN, TINY_VOCAB = 512, 64


@frozen
class Measured:
    """One number: the median of its repeats, with its interval."""

    name: str
    """What was measured, as `gemm`; the same for all points of a sweep."""
    value: float
    low: float
    high: float
    n: int
    """Repeats."""
    unit: units.Dimension
    how: str
    """In words, with what decides the number: sizes, library, number of processes."""
    at: tuple[float, ...] = ()
    """The point of a sweep, as (m, n, k)."""


@frozen
class MissingProbe:
    """A probe without a result; what it would have measured keeps its prior."""

    probe: str
    reason: str


@frozen
class Machine:
    """Where it was measured."""

    kind: str
    """`cpu` or `cuda`."""
    title: str
    """CPU model or GPU name."""
    date: str
    cores: int
    memory: float
    """Bytes of host memory."""
    free: float
    """Bytes of it that were free."""
    peak: float
    """FLOP/s of one core in FP32 by its vector units and clock; 0: unknown, and on GPUs."""
    peak_source: str
    gpus: int = 0
    gpu_memory: float = 0.0
    versions: tuple[tuple[str, str], ...] = ()
    """Libraries that decide times."""

    @property
    def words(self) -> str:
        """`AMD EPYC 9654, 2 cores, torch 2.13.0, vllm 0.32.0`."""
        count = f"{self.gpus} GPUs" if self.gpus > 1 else f"{self.cores} cores" if not self.gpus else "1 GPU"
        return ", ".join([self.title, count, *(f"{name} {version}" for name, version in self.versions)])


@frozen
class Session:
    """One run of the benchmarks."""

    machine: Machine
    measured: tuple[Measured, ...]
    missing: tuple[MissingProbe, ...]


def summarise(
    name: str, samples: Sequence[float], unit: units.Dimension, how: str, at: tuple[float, ...] = ()
) -> Measured:
    """Median of the repeats, and P10 / w to P90 w, w = 1.15 (1.5 below three repeats)."""
    assert samples, f"{name} has no samples"
    wide = WIDENING if len(samples) >= FEW else FEW_WIDENING
    low, high = np.percentile(np.asarray(samples, dtype=np.float64), [10, 90])
    return Measured(
        name=name,
        value=float(median(samples)),
        low=float(low) / wide,
        high=float(high) * wide,
        n=len(samples),
        unit=unit,
        how=how,
        at=at,
    )
