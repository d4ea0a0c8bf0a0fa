"""Probability that a sum of uncertain sizes exceeds a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.kernels.cost import Z90

CERTAIN = 1e-12
"""Relative variance below which a sum counts as exact."""
NEVER = 1e-15
"""Smallest probability that is told from none."""
NORMAL = NormalDist()


class Item(NamedTuple):
    """An uncertain positive quantity."""

    value: float
    low: float
    """P10."""
    high: float
    """P90."""


@lru_cache(maxsize=4096)
def moments(item: Item) -> tuple[float, float]:
    """Mean and variance of a log-normal item.

    X ~ LogNormal(mu, s), mu = (ln low + ln high)/2, s = ln(high/low)/(2 z_90)
    """
    if item.high <= 0:
        return 0.0, 0.0
    low = max(item.low, item.value * 1e-3, item.high * 1e-3)
    mu, s = math.log(low * item.high) / 2, math.log(item.high / low) / (2 * Z90)
    mean = math.exp(mu + s * s / 2)
    return mean, mean * mean * math.expm1(s * s)


def probability_above(items: Iterable[Item], limit: float, doubt: float = 1.0, spread: float = 0.0) -> float:
    """P(sum of independent log-normal items > limit), its deviation `doubt` times that of the items.

    `spread`: deviation of ln sum that no item knows of; it moves the median nowhere.

    The sum is taken to be log-normal with the same mean and variance (Fenton 1960, IRE Trans.
    Commun. Syst. 8, 57-67), which is close where no single item dominates with s > 1.
    """
    mean, variance = 0.0, 0.0
    for item in items:
        m, v = moments(item)
        mean, variance = mean + m, variance + v
    if mean <= 0:
        return 0.0
    if limit <= 0:
        return 1.0
    s2 = math.log1p(doubt**2 * variance / mean**2)
    mu, s2 = math.log(mean) - s2 / 2, s2 + spread**2
    if s2 < CERTAIN:
        return float(mean > limit)
    return 1.0 - NORMAL.cdf((math.log(limit) - mu) / math.sqrt(s2))


def risky(
    mean: NDArray[np.float64],
    variance: NDArray[np.float64],
    limit: float,
    probability: float,
    doubt: float = 1.0,
) -> NDArray[np.bool_]:
    """Where `probability_above` of sums with these moments exceeds `probability`, elementwise.

    P > q  <=>  (ln limit - mu) / s < z_(1-q)
    """
    mean = np.maximum(mean, 1e-150)
    s2 = np.log1p(doubt**2 * variance / mean**2)
    s = np.sqrt(np.maximum(s2, CERTAIN))
    mu = np.log(mean) - s2 / 2
    accepted = min(max(probability, NEVER), 1 - NEVER)
    above = math.log(limit) - mu < NORMAL.inv_cdf(1 - accepted) * s
    return np.asarray(np.where(s2 < CERTAIN, mean > limit, above))


def fitting(
    state: NDArray[np.float64], usable: float, max_oom: float, doubt: float = 1.0
) -> NDArray[np.bool_]:
    """Which rows (..., stage, 3) of bytes, mean and variance fit on every stage with the accepted risk."""
    bytes_, mean, variance = state[..., 0], state[..., 1], state[..., 2]
    fits = (bytes_ <= usable) & ~risky(mean, variance, usable, max_oom, doubt)
    return np.asarray(fits.all(axis=-1))
