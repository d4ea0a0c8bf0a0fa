"""The interval of a mean over correlated steps: batch means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BATCHES = 8
"""Batches at most; steps of one batch are averaged, so that what is left is little correlated."""
QUANTILES = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415)
"""Student's t at 0.9 for 1, 2, ... degrees of freedom. Source: Abramowitz and Stegun, table 26.10."""


def interval_of(seconds: Sequence[float]) -> tuple[float, float] | None:
    """P10 and P90 of the mean step; None for one step or for steps that are all the same.

    mean -+ t sd / sqrt(m) over m batches        Source: Law, Simulation Modeling and Analysis, 9.5
    """
    count = min(BATCHES, len(seconds))
    if count < 2 or max(seconds) - min(seconds) <= 1e-12 * max(seconds):
        return None
    size = len(seconds) // count
    last = np.asarray(seconds[len(seconds) - size * count :])
    means = last.reshape(count, size).mean(axis=1)
    half = QUANTILES[count - 2] * float(means.std(ddof=1)) / count**0.5
    mean = float(np.mean(seconds))
    return mean - half, mean + half
