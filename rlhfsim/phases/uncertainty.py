"""Probability that a sum of uncertain sizes exceeds a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

Z90 = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An uncertain positive quantity."""

    value: float
    low: float
    """P10."""
    high: float
    """P90."""


def probability_above(items: Iterable[Item], limit: float) -> float:
    """P(sum of independent log-normal items > limit).

        X_i ~ LogNormal(mu, s), mu = (ln low + ln high)/2, s = ln(high/low)/(2 z_90)

    The sum is taken to be log-normal with the same mean and variance (Fenton 1960, IRE Trans.
    Commun. Syst. 8, 57-67), which is close where no single item dominates with s > 1.
    """
    mean, variance = 0.0, 0.0
    for item in items:
        if item.high <= 0:
            continue
        low = max(item.low, item.value * 1e-3, item.high * 1e-3)
        mu, s = math.log(low * item.high) / 2, math.log(item.high / low) / (2 * Z90)
        m = math.exp(mu + s * s / 2)
        mean += m
        variance += m * m * math.expm1(s * s)
    if mean <= 0:
        return 0.0
    if limit <= 0:
        return 1.0
    s2 = math.log1p(variance / mean**2)
    if s2 < 1e-12:
        return float(mean > limit)
    mu = math.log(mean) - s2 / 2
    return 1.0 - NormalDist().cdf((math.log(limit) - mu) / math.sqrt(s2))
