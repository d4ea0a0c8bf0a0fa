"""Ends of a fitted coefficient's interval, where the posterior bends away from its curvature at the best fit.

For coefficient k with posterior standard deviation s_k (data and priors) and q the wanted quantile:

    D(a) = min_delta F(theta + a e_k + delta) - F(theta)      delta_k = 0
    end of the interval on each side: the smallest a >= q s_k with D(a) >= q^2

F: -2 ln posterior, the objective of `posterior.fit`. Of a normal posterior the end is q s_k. It is further
where a phase stops depending on the coefficient, such as launches that hide behind kernels: there only the
prior ends the interval. Profile likelihood, Venzon & Moolgavkar 1988 (Appl. Statist. 37, 87); a e_k is
priced anew, the others follow by the derivatives of the best fit.

Not known here: other modes of the posterior.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.posterior import Posterior, PriceModel
from rlhfsim.calibration.predict import NODES
from rlhfsim.calibration.priors import Prior

Floats = NDArray[np.float64]
ENOUGH = 0.6
"""Share of q^2 from which an end counts as reached: soft l1 grows more slowly than a square."""
MATTERS = 0.1
"""Doubt of another coefficient, in own standard deviations, from which it is priced at its ends."""
ROUNDS = 3
STRETCH = 1.6
"""Factor from one try to the next."""


def stretched(
    model: PriceModel, data: Sequence[Datum], fit: Posterior, quantile: float
) -> tuple[Floats, Floats]:
    """Standard deviations of ln coefficient below and above, at least those of the curvature."""
    own = np.sqrt(np.diag(fit.own))
    rows = [
        (own[k], own[k]) if p.name.startswith(NODES) else _sides(model, data, fit, k, quantile)
        for k, p in enumerate(fit.priors)
    ]
    carried = carried_squares(model, fit, quantile)
    below, above = (
        np.sqrt(np.array(side) ** 2 + doubt)
        for side, doubt in zip(zip(*rows, strict=True), carried, strict=True)
    )
    return below, above


def carried_squares(model: PriceModel, fit: Posterior, quantile: float) -> tuple[Floats, Floats]:
    """Variances of ln coefficient below and above that come from coefficients which are not fitted.

    One that matters is priced at both ends of its prior: where it is added to others, as latencies are, its
    upper end takes far more of a phase than its slope says.
    """
    below, above = (np.zeros(len(fit.priors)) for _ in range(2))
    known = dict(fit.values)
    here = model.log(known)
    own = np.sqrt(np.diag(fit.own))
    for column, other in zip(fit.carried.T, fit.others, strict=True):
        if np.all(np.abs(column) < MATTERS * own):
            below, above = below + column**2, above + column**2
            continue
        for signed, side in ((quantile, other.above), (-quantile, other.below)):
            end = np.clip(other.mean + signed * side, other.least, other.most)
            moved = model.log(known | {other.name: float(np.exp(end))}) - here
            shift = -(fit.gain @ moved) / quantile
            below += np.where(shift < 0, shift, 0.0) ** 2
            above += np.where(shift > 0, shift, 0.0) ** 2
    return below, above


def _sides(
    model: PriceModel, data: Sequence[Datum], fit: Posterior, k: int, quantile: float
) -> tuple[float, float]:
    return _side(model, data, fit, k, -quantile), _side(model, data, fit, k, quantile)


def _side(model: PriceModel, data: Sequence[Datum], fit: Posterior, k: int, signed: float) -> float:
    """Standard deviation on one side, of which the posterior falls off as at `signed` quantiles."""
    prior, theta = fit.priors[k], fit.theta[k]
    best = objective(fit, fit.theta, fit.residuals)
    limit = _limit(prior, theta, signed)
    deviation = min(float(np.sqrt(fit.own[k, k])), limit)
    while deviation < limit:
        end = theta + signed * deviation
        if not prior.least < end < prior.most:
            break
        risen = profile(model, data, fit, k, end) - best
        if risen >= ENOUGH * signed**2:
            break
        deviation = min(limit, STRETCH * deviation)
    return deviation


def _limit(prior: Prior, theta: float, signed: float) -> float:
    """Standard deviation without data: to the prior's own end where that lies ahead, else the prior's."""
    side = prior.above if signed > 0 else prior.below
    return max(side, (prior.mean - theta) / signed + side)


def profile(model: PriceModel, data: Sequence[Datum], fit: Posterior, k: int, end: float) -> float:
    """The objective with ln coefficient k at `end`, the others where they then fit best."""
    theta = fit.theta.copy()
    theta[k] = end
    values = {p.name: float(np.exp(t)) for p, t in zip(fit.priors, theta, strict=True) if t != p.mean}
    gap = np.array([d.log for d in data]) - model.log(values)
    slopes = fit.slopes.copy()
    slopes[:, k] = 0.0
    delta = np.zeros(len(theta))
    for _ in range(ROUNDS):  # iteratively reweighted least squares of soft l1
        weights = _weights(fit, gap - slopes @ delta) / fit.sigma**2
        doubt = np.array([1 / p.deviation(t) ** 2 for p, t in zip(fit.priors, theta + delta, strict=True)])
        away = np.array([p.mean for p in fit.priors]) - theta
        right = slopes.T @ (weights * gap) + doubt * away
        right[k] = 0.0
        delta = np.linalg.solve((slopes.T * weights) @ slopes + np.diag(doubt), right)
    return objective(fit, theta + delta, gap - slopes @ delta)


def _weights(fit: Posterior, gap: Floats) -> Floats:
    return np.asarray(1 / np.sqrt(1 + (gap / fit.sigma) ** 2), dtype=np.float64)


def objective(fit: Posterior, theta: Floats, gap: Floats) -> float:
    """-2 ln posterior up to a constant: soft l1 of what the coefficients leave, squares of the priors."""
    rho = 2 * (np.sqrt(1 + (gap / fit.sigma) ** 2) - 1)
    prior = sum(((t - p.mean) / p.deviation(t)) ** 2 for p, t in zip(fit.priors, theta, strict=True))
    return float(rho.sum() + prior)
