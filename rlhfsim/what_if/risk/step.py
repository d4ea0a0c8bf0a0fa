"""The step of a plan in draws: what is uncertain about it, drawn once for all plans that are compared.

    T' = (s + sum_k d_k) e^(b z)      T = Q(rank of T')

d_k is what coefficient k adds to the critical chain in a draw: log-normal to both sides of its seconds, P10
and P90 at its interval; one draw of it for all phases and for every plan. Q is log-normal to both sides of
the plan's P50, P10 and P90 at the plan's own interval. The P50 is s times the bias of published steps like it
(`step.groups`): steps took 8 % longer than s in the median.

b is what the plan's interval holds beyond its coefficients: the discrepancy of the model (`step.measured`),
which plans for one question share. The intervals of plans were compared with measurements
(lab.fits.discrepancy), so they decide how far the draws reach (Q); the draws say what comes with what.

T' is not T. Parts are skewed upwards, and the median of a sum of such parts lies above the sum of their
medians, which s is: by 8 % for 70B PPO on 64 H100, 9 % for 8B on 8, 20 % for 0.5B on 2, where what is most
skewed (host, controller) weighs most; P10 and P90 go with it. Draws keep the plan's P10, P50 and P90
nevertheless: those were held against published runs (reports/accuracy.md), and phases do not ask for the
sum. Median errors of drawn sums against sums of medians, on phases of publishers left out: log-probs +14
against -2 % (19 rows), references +33 against +10 % (13), weight syncs in a step +43 against +14 % (6);
generation -21 against -24 % (20), training -4 against -14 % (20), whole steps +1 against -8 % (63). The
centre is therefore one of whole steps, by the bias of steps.

First order: a coefficient acts on the chain that is critical now. Compared with plain Monte Carlo through the
pricer in tests/what_if/test_risk.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90, Cost
from rlhfsim.plan import Plan
from rlhfsim.simulation.noise import generator

Floats = NDArray[np.float64]
"""(draws,)"""
DRAWS = 4096
SEED = 0
Seconds3 = tuple[float, float, float]
"""Value, P10 and P90."""
MODEL = "model"
"""What no coefficient says: the discrepancy of the model."""
LEAST = 1e-3
"""Least value: a lower end below it counts as this, since a time is above 0."""


@lru_cache(maxsize=512)
def normals(name: str, seed: int = SEED) -> Floats:
    """(draws,) standard normals of what has this name, stratified: its quantiles are exact."""
    return _quantiles()[generator(seed, name).permutation(DRAWS)]


@cache
def _quantiles() -> Floats:
    """(draws,) of a standard normal in the middle of each stratum, rising."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / DRAWS) for i in range(DRAWS)])


def two_sided(value: float, low: float, high: float, z: Floats) -> Floats:
    """(draws,) log-normal to both sides of `value`, P10 at `low` and P90 at `high`."""
    if value <= 0:
        return np.zeros_like(z)
    down = math.log(value / min(value, max(low, LEAST * value))) / Z90
    up = math.log(max(high, value) / value) / Z90
    drawn: Floats = value * np.exp(np.where(z > 0, up, down) * z)
    return drawn


@frozen
class StepLaw:
    """What is known about the mean step of a plan."""

    seconds: float
    """As predicted."""
    low: float
    """P10."""
    high: float
    """P90."""
    median: float
    """P50."""
    by_coefficient: Mapping[str, Seconds3]
    """Coefficient -> seconds of the critical chain that rest on it, P10 and P90 of them; empty where only the
    plan is known."""

    def draws(self, seed: int = SEED) -> Floats:
        """(draws,) seconds, with the plan's own P10, P50 and P90."""
        order = np.empty(DRAWS)
        order[np.argsort(self.chain(seed), kind="stable")] = np.sort(normals(MODEL, seed))
        return two_sided(self.median, self.low, self.high, order)

    def chain(self, seed: int = SEED) -> Floats:
        """(draws,) seconds of the critical chain, coefficients and discrepancy drawn (T')."""
        drawn = sum(
            (two_sided(*each, normals(name, seed)) for name, each in self.by_coefficient.items()),
            np.full(DRAWS, 0.0 if self.by_coefficient else self.seconds),
        )
        chain: Floats = drawn * np.exp(self.discrepancy / Z90 * normals(MODEL, seed))
        return chain

    @property
    def discrepancy(self) -> float:
        """Half the P10-P90 width in ln that the coefficients leave."""
        own = math.hypot(*((high - low) / 2 for _, low, high in self.by_coefficient.values()))
        whole = math.log(self.high / max(self.low, LEAST * self.high)) / 2 if self.high > 0 else 0.0
        return math.sqrt(max(0.0, whole**2 - (own / self.seconds) ** 2)) if self.seconds > 0 else 0.0


def law_of(plan: Plan, cost: Cost | None = None) -> StepLaw:
    """The law of a plan's step; with the cost of its critical chain it can be compared with other plans."""
    p = plan.prediction
    parts: dict[str, Seconds3] = {}
    for each in cost.parts if cost else ():
        a, b, c = parts.get(each.rests_on, (0.0, 0.0, 0.0))
        parts[each.rests_on] = (a + each.seconds, b + each.low, c + each.high)
    median = min(max(p.step_s * p.centre, p.low_s), p.high_s)
    return StepLaw(seconds=p.step_s, low=p.low_s, high=p.high_s, median=median, by_coefficient=parts)


def probability_faster(one: StepLaw, other: StepLaw) -> float:
    """P(step of `one` < step of `other`): what both rest on moves them together."""
    first, second = one.draws(), other.draws()
    return float(np.mean(first < second) + np.mean(first == second) / 2)
