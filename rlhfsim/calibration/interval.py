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

from dataclasses import replace

import numpy as np

from rlhfsim.calibration.posterior import Floats, Linear, Posterior, PriceModel
from rlhfsim.calibration.priors import Prior

ENOUGH = 0.6
"""Share of q^2 from which an end counts as reached: soft l1 grows more slowly than a square."""
MATTERS = 0.1
"""Doubt of another coefficient, in own standard deviations, from which it is priced at its ends."""
ROUNDS = 3
STRETCH = 1.6
"""Factor from one try to the next."""


def stretched(model: PriceModel, fit: Posterior, quantile: float) -> tuple[Floats, Floats]:
    """Standard deviations of ln coefficient below and above, at least those of the curvature."""
    own = np.sqrt(np.diag(fit.own))
    sides = (
        [own[k] if p.is_bias else _side(model, fit, k, signed) for k, p in enumerate(fit.priors)]
        for signed in (-quantile, quantile)
    )
    carried = carried_squares(model, fit, quantile)
    below, above = (np.sqrt(np.square(side) + doubt) for side, doubt in zip(sides, carried, strict=True))
    away = [t - p.mean if p.name in fit.doubted else 0.0 for t, p in zip(fit.theta, fit.priors, strict=True)]
    return np.maximum(below, np.array(away) / quantile), np.maximum(above, -np.array(away) / quantile)


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


def _side(model: PriceModel, fit: Posterior, k: int, signed: float) -> float:
    """Standard deviation on one side, of which the posterior falls off as at `signed` quantiles."""
    prior, theta = fit.priors[k], fit.theta[k]
    best = objective(fit, fit.residuals)
    limit = _limit(prior, theta, signed)
    deviation = min(float(np.sqrt(fit.own[k, k])), limit)
    while deviation < limit:
        end = theta + signed * deviation
        if not prior.least < end < prior.most:
            break
        risen = profile(model, fit, k, end) - best
        if risen >= ENOUGH * signed**2:
            break
        deviation = min(limit, STRETCH * deviation)
    return deviation


def _limit(prior: Prior, theta: float, signed: float) -> float:
    """Standard deviation without data: to the prior's own end where that lies ahead, else the prior's."""
    side = prior.above if signed > 0 else prior.below
    return max(side, (prior.mean - theta) / signed + side)


def profile(model: PriceModel, fit: Posterior, k: int, end: float) -> float:
    """The objective with ln coefficient k at `end`, the others where they then fit best."""
    theta, slopes = fit.theta.copy(), fit.slopes.copy()
    theta[k], slopes[:, k] = end, 0.0
    at = Linear(priors=fit.priors, theta=theta, slopes=slopes, sigma=fit.sigma)
    left = gap = np.array([d.log for d in model.data]) - model.log(at.moved)
    away = np.array([p.mean for p in fit.priors]) - theta
    for _ in range(ROUNDS):  # iteratively reweighted least squares of soft l1
        weights = at.weights_of(left)
        right = slopes.T @ (weights / fit.sigma**2 * gap) + away / at.deviations**2
        right[k] = 0.0
        delta = np.linalg.solve(at.information(weights), right)
        at, left = replace(at, theta=theta + delta), gap - slopes @ delta
    return objective(at, left)


def objective(at: Linear, gap: Floats) -> float:
    """-2 ln posterior up to a constant: soft l1 of what the coefficients leave, squares of the priors."""
    rho = 2 * (np.sqrt(1 + (gap / at.sigma) ** 2) - 1)
    away = at.theta - [p.mean for p in at.priors]
    return float(rho.sum() + ((away / at.deviations) ** 2).sum())
