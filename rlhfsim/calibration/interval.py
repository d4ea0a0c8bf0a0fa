"""Ends of a fitted coefficient's interval, where the posterior bends away from its curvature at the best fit.

For coefficient k with posterior standard deviation s_k (data and priors) and q the wanted quantile:

    D(a) = F(theta + a e_k) - F(theta)      F: -2 ln posterior, the objective of map_fit
    end of the interval on each side: the smallest a >= q s_k with D(a) >= q^2

Of a normal posterior that is q s_k. It is further where a phase stops depending on the coefficient, such as
launches that hide behind kernels: there only the prior ends the interval. A profile likelihood, as in Venzon &
Moolgavkar 1988 (Appl. Statist. 37, 87), without a new fit of the others at every point: D is too large where they
would follow, so the interval is widened too little, never too much.

Not known here: other modes of the posterior.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.map_fit import Fit, Model
from rlhfsim.calibration.priors import Prior

Floats = NDArray[np.float64]
ENOUGH = 0.6
"""Share of q^2 from which an end counts as reached: soft l1 grows more slowly than a square."""
STRETCH = 1.6
"""Factor from one try to the next."""


def stretched(
    model: Model, data: Sequence[Datum], found: Fit, quantile: float
) -> tuple[Floats, Floats]:
    """Standard deviations of ln coefficient below and above, at least those of the curvature."""
    rows = [_sides(model, data, found, k, quantile) for k in range(len(found.priors))]
    carried = np.diag(found.covariance) - np.diag(found.own)
    below, above = (np.sqrt(np.array(side) ** 2 + carried) for side in zip(*rows, strict=True))
    return below, above


def _sides(
    model: Model, data: Sequence[Datum], found: Fit, k: int, quantile: float
) -> tuple[float, float]:
    return _side(model, data, found, k, -quantile), _side(model, data, found, k, quantile)


def _side(model: Model, data: Sequence[Datum], found: Fit, k: int, signed: float) -> float:
    """Standard deviation on one side, of which the posterior falls off as at `signed` quantiles."""
    prior, theta, best = found.priors[k], found.theta[k], objective(model, data, found, found.theta)
    limit = _limit(prior, theta, signed)
    deviation = min(float(np.sqrt(found.own[k, k])), limit)
    while deviation < limit:
        end = theta + signed * deviation
        if not prior.least < end < prior.most:
            break
        risen = objective(model, data, found, _moved(found.theta, k, end)) - best
        if risen >= ENOUGH * signed**2:
            break
        deviation = min(limit, STRETCH * deviation)
    return deviation


def _limit(prior: Prior, theta: float, signed: float) -> float:
    """Standard deviation without any data: to the prior's own end where that lies ahead, else as wide as the prior."""
    side = prior.above if signed > 0 else prior.below
    return max(side, (prior.mean - theta) / signed + side)


def _moved(theta: Floats, k: int, end: float) -> Floats:
    """theta with coefficient k at `end`."""
    moved = theta.copy()
    moved[k] = end
    return moved


def objective(model: Model, data: Sequence[Datum], found: Fit, theta: Floats) -> float:
    """-2 ln posterior up to a constant: soft l1 of the data, squares of the priors (map_fit)."""
    values = {p.name: float(np.exp(t)) for p, t in zip(found.priors, theta, strict=True) if t != p.mean}  # fmt: skip
    gap = np.array([d.log for d in data]) - model.log(values)
    rho = 2 * (np.sqrt(1 + (gap / found.sigma) ** 2) - 1)
    prior = sum(((t - p.mean) / p.deviation(t)) ** 2 for p, t in zip(found.priors, theta, strict=True))  # fmt: skip
    return float(rho.sum() + prior)
