"""Coefficients that explain observed seconds best, together with what was believed before.

Maximum a posteriori on logarithms, theta = ln coefficient, for datum i (phase f of a run) and coefficient k:

    minimise  sum_i rho(((y_i - ln t_i(theta)) / sigma_i)^2) + sum_k ((theta_k - mean_k) / s_k)^2
    sigma_i^2 = scatter_i^2 + tau_f^2        rho(z) = 2 (sqrt(1 + z) - 1), soft l1

within the bounds of each coefficient. A bias of a framework (`biases`) is such a theta as well; rho then
also stands around its prior, since one phase may be off by far more than the others. ln t is linear between
two visits to the cost model; visits repeat until theta rests, and derivatives are taken again where it
bends. tau_f, what the model gets wrong about phase f from run to run, is estimated from the residuals as
Paule & Mandel 1982 (J. Res. NBS 87, 377) do for laboratories that disagree, with clipped squares, and shrunk
to the mean over phases; data within one run (`by_length`) have none. Covariance of the posterior, with
weights w_i = rho':

    C = (J^T W J + P^-1)^-1 + A J_u P_u J_u^T A^T      A = (J^T W J + P^-1)^-1 J^T W

J_u: coefficients that are not fitted but uncertain; their doubt widens the intervals of those that are.

Not known here: correlation of phases within one run beyond what coefficients explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares
from scipy.special import stdtrit

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.predict import NODES, RunPricer, sensitivities
from rlhfsim.calibration.priors import Prior

Floats = NDArray[np.float64]
UNKNOWN_MISMATCH = 0.15
"""tau where data are too few to tell: prior, the scoreboard's median phase error."""
CLIP = 2.5
"""Standardised residuals count at most this much in tau."""
CLIPPED_SQUARE = 0.9776
"""E[min(z^2, CLIP^2)] of a standard normal z: erf(c/sqrt 2) - 2 c phi(c) + c^2 (1 - erf(c/sqrt 2))."""
SHRINK = 4.0
"""Data of a phase that weigh as much as the mean over phases in its tau."""
STRIDE = 1.5
"""Most that ln theta moves between two visits to the cost model."""
AT_REST = 0.005
"""Change of every ln theta below which the fit is done."""
VISITS = 10
"""Most visits to the cost model."""
BENT = 0.5
"""Error of the linear model, in sigma of a datum, from which derivatives are taken again: a phase
bends where another part of it becomes the longest."""
REFINEMENTS = 3
"""Most times that they are."""
SETTLING = 3
"""Visits after which tau rests, so that theta may."""
TAU_ROUNDS = 3
MAX_TAU = 3.0
TINY = 1e-12
LEAST_SPARE = 2.0
"""Fewer degrees of freedom than this are counted as this: the t distribution has no spread below."""
LEAST_S = 1e-9
"""A phase that takes no time has no logarithm."""


class PriceModel:
    """Runs priced at any theta, with a memory of prices and derivatives."""

    def __init__(self, cases: Sequence[RunPricer], data: Sequence[Datum]) -> None:
        """`data` say which phase of which case each row of an answer is."""
        self._cases, self._data = cases, data
        self._seconds: dict[tuple[int, tuple[tuple[str, float], ...]], dict[str, float]] = {}
        self._slopes: dict[tuple[int, str, tuple[tuple[str, float], ...]], dict[str, float]] = {}

    def seconds(self, run: int, values: Mapping[str, float]) -> dict[str, float]:
        """Seconds by phase of one case."""
        key = (run, tuple(sorted(values.items())))
        if key not in self._seconds:
            self._seconds[key] = self._cases[run].seconds(values)
        return self._seconds[key]

    def log(self, values: Mapping[str, float]) -> Floats:
        """ln seconds of every datum; a phase that vanishes counts as `LEAST_S`."""
        times = (self.seconds(d.run, values).get(d.phase, 0.0) for d in self._data)
        seconds = np.fromiter(times, float, len(self._data))
        return np.asarray(np.log(np.maximum(seconds, LEAST_S)), dtype=np.float64)

    def read(self) -> frozenset[str]:
        """Coefficients that pricing reads in any run."""
        return frozenset().union(*(self._cases[run].read() for run in {d.run for d in self._data}))

    def slopes(self, values: Mapping[str, float], names: Sequence[str]) -> Floats:
        """d ln t / d ln theta, data by coefficients."""
        where = tuple(sorted(values.items()))
        runs = sorted({d.run for d in self._data})
        for run in runs:
            missing = [n for n in names if (run, n, where) not in self._slopes]
            if missing:
                _, elasticities = sensitivities(self._cases[run], values, missing)
                self._slopes |= {(run, name, where): elasticities[name] for name in missing}
        rows = [[self._slopes[(d.run, n, where)].get(d.phase, 0.0) for n in names] for d in self._data]
        return np.array(rows).reshape(len(self._data), len(names))

    def only(self, rows: Sequence[int]) -> PriceModel:
        """The same for some data; prices are shared."""
        part = PriceModel(self._cases, [self._data[i] for i in rows])
        part._seconds, part._slopes = self._seconds, self._slopes
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Where the fit came to rest."""

    priors: tuple[Prior, ...]
    """Fitted coefficients, in the order of the columns."""
    theta: Floats
    """ln of their values."""
    covariance: Floats
    """Covariance of theta: data, model mismatch, and the doubt of coefficients that are not fitted."""
    own: Floats
    """The same without that last doubt."""
    residuals: Floats
    """ln measured - ln predicted."""
    sigma: Floats
    weights: Floats
    """rho' of every datum: near 1 for those that fit, small for outliers."""
    tau: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of ln seconds between runs that the model does not explain, by phase."""
    spare: float = 0.0
    """Data less effective coefficients: degrees of freedom of tau."""
    slopes: Floats
    others: tuple[Prior, ...] = ()
    """Coefficients that are not fitted."""
    gain: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Change of theta for one of each ln measured, coefficients by data."""
    carried: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Doubt of theta that one standard deviation of each of `others` leaves, to first order."""
    tau_known: bool = True
    """False: too few data to estimate tau; it is the prior `UNKNOWN_MISMATCH`."""

    def of(self, kept: Sequence[Prior]) -> Posterior:
        """Where a fit of some of the coefficients may start."""
        rows = [self.priors.index(p) for p in kept]
        return replace(self, priors=tuple(kept), theta=self.theta[rows], slopes=self.slopes[:, rows])

    @property
    def values(self) -> dict[str, float]:
        """Coefficient by name."""
        return {p.name: float(np.exp(t)) for p, t in zip(self.priors, self.theta, strict=True)}


def fit(
    model: PriceModel,
    data: Sequence[Datum],
    fitted: Sequence[Prior],
    others: Sequence[Prior] = (),
    start: Posterior | None = None,
) -> Posterior:
    """The posterior of `fitted`; `others` keep their values but not their certainty.

    `start` of the same coefficients saves visits: the fit begins there, with its derivatives.
    """
    names = [p.name for p in fitted]
    y = np.array([d.log for d in data])
    theta = np.array([p.mean for p in fitted]) if start is None else start.theta.copy()
    slopes = model.slopes(_values(fitted, theta), names) if start is None else start.slopes
    taken, predicted, refined = theta, model.log(_values(fitted, theta)), 0
    doubt = model.slopes({}, [p.name for p in others])
    tau, known = _unknown(data), False
    for visit in range(VISITS):
        here = model.log(_values(fitted, theta))
        bent = np.abs(here - predicted - slopes @ (theta - taken)) / _sigma(data, tau)
        if bent.max(initial=0.0) > BENT and refined < REFINEMENTS:
            slopes = model.slopes(_values(fitted, theta), names)
            taken, predicted, refined = theta, here, refined + 1
        for _ in range(TAU_ROUNDS if visit < SETTLING else 0):
            tau, known = _unexplained(data, y - here, slopes, doubt, tau, fitted, others, theta)
        moved = _solve(y - here, slopes, _sigma(data, tau), fitted, theta)
        rests = bool(np.all(np.abs(moved - theta) < AT_REST))
        theta = moved
        if rests:
            break
    residuals = y - model.log(_values(fitted, theta))
    return _posterior(data, fitted, others, theta, residuals, slopes, doubt, (tau, known))


def _values(fitted: Sequence[Prior], theta: Floats) -> dict[str, float]:
    """Coefficients that are not at their prior: fits that begin alike share prices."""
    return {p.name: float(np.exp(t)) for p, t in zip(fitted, theta, strict=True) if t != p.mean}


def _sigma(data: Sequence[Datum], tau: Mapping[str, float]) -> Floats:
    return np.array([np.hypot(d.scatter, tau.get(d.phase, 0.0)) for d in data])


def _solve(gap: Floats, slopes: Floats, sigma: Floats, fitted: Sequence[Prior], theta: Floats) -> Floats:
    """theta that minimises the linear problem around `theta`, within bounds and `STRIDE`."""
    if not fitted:
        return theta
    table = np.array([(p.mean, p.below, p.above, p.least, p.most) for p in fitted])
    mean, below, above, smallest, largest = table.T
    low, high = np.maximum(smallest, theta - STRIDE), np.minimum(largest, theta + STRIDE)
    count, scaled = len(gap), slopes / sigma[:, None]
    robust = np.array([True] * count + [p.name.startswith(NODES) for p in fitted])

    def doubt(x: Floats) -> Floats:
        return np.asarray(np.where(x >= mean, above, below), dtype=np.float64)

    def residual(x: Floats) -> Floats:
        return np.concatenate([gap / sigma - scaled @ (x - theta), (x - mean) / doubt(x)])

    def jacobian(x: Floats) -> Floats:
        return np.vstack([-scaled, np.diag(1 / doubt(x))])

    def loss(z: Floats) -> Floats:
        root = np.sqrt(1 + z[robust])
        rho = np.vstack([z, np.ones_like(z), np.zeros_like(z)])  # priors of coefficients stay quadratic
        rho[:, robust] = 2 * (root - 1), 1 / root, -0.5 / root**3
        return rho

    inside = np.clip(theta, low + TINY, high - TINY)
    solved = least_squares(residual, inside, jac=jacobian, bounds=(low, high + TINY), loss=loss)
    return np.asarray(np.clip(solved.x, smallest, largest), dtype=np.float64)


def _information(
    slopes: Floats, sigma: Floats, weights: Floats, fitted: Sequence[Prior], theta: Floats
) -> Floats:
    """J^T W J + P^-1, with the variances in W."""
    believed = np.array([1 / p.deviation(t) ** 2 for p, t in zip(fitted, theta, strict=True)])
    seen = (slopes.T * (weights / sigma**2)) @ slopes
    return np.asarray(seen + np.diag(believed), dtype=np.float64)


def _leverage(slopes: Floats, sigma: Floats, fitted: Sequence[Prior], theta: Floats) -> Floats:
    """Share of every datum that the coefficients take up, 0 to 1."""
    if not fitted:
        return np.zeros(len(sigma))
    inverse = np.linalg.inv(_information(slopes, sigma, np.ones_like(sigma), fitted, theta))
    return np.asarray(np.einsum("ij,jk,ik->i", slopes, inverse, slopes) / sigma**2)


def _unexplained(
    data: Sequence[Datum],
    gap: Floats,
    slopes: Floats,
    doubt: Floats,
    tau: Mapping[str, float],
    fitted: Sequence[Prior],
    others: Sequence[Prior],
    theta: Floats,
) -> tuple[dict[str, float], bool]:
    """tau after one round: residuals of a fit of all coefficients, so that a wrong one is no mismatch."""
    both, together = [*fitted, *others], np.hstack([slopes, doubt])
    sigma, start = _sigma(data, tau), np.concatenate([theta, [p.mean for p in others]])
    moved = _solve(gap, together, sigma, both, start)
    residuals = gap - together @ (moved - start)
    return _mismatch(data, residuals, _leverage(together, sigma, both, moved))


def _between(data: Sequence[Datum]) -> Floats:
    """1 for data of a run, 0 for those that compare steps of one and say nothing of how runs differ."""
    return np.array([float(not d.within) for d in data])


def _unknown(data: Sequence[Datum]) -> dict[str, float]:
    """tau of every phase before any is estimated."""
    return {d.phase: UNKNOWN_MISMATCH for d in data if not d.within}


def _mismatch(data: Sequence[Datum], residuals: Floats, leverage: Floats) -> tuple[dict[str, float], bool]:
    """tau by phase, and whether the data were enough to estimate any."""
    free = np.clip(1 - leverage, 0.0, 1.0) * _between(data)
    scatter = np.array([d.scatter for d in data])
    if free.sum() < 2:
        return _unknown(data), False
    rows = free > 0
    pooled = _paule_mandel(residuals[rows], scatter[rows], free[rows])
    taus = {}
    for phase in _unknown(data):
        rows = np.array([d.phase == phase for d in data])
        n = float(free[rows].sum())
        of_phase = _paule_mandel(residuals[rows], scatter[rows], free[rows]) if n > 1 else pooled
        taus[phase] = float(np.sqrt((n * of_phase**2 + SHRINK * pooled**2) / (n + SHRINK)))
    return taus, True


def _paule_mandel(residuals: Floats, scatter: Floats, free: Floats) -> float:
    """tau with sum min(r^2 / (s^2 + tau^2), c^2) = sum of the degrees of freedom, at least 0."""

    def excess(tau: float) -> float:
        squares = residuals**2 / (scatter**2 + tau**2)
        return float(np.minimum(squares, CLIP**2).sum() - CLIPPED_SQUARE * free.sum())

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, MAX_TAU)) if excess(MAX_TAU) < 0 else MAX_TAU


def _posterior(
    data: Sequence[Datum],
    fitted: Sequence[Prior],
    others: Sequence[Prior],
    theta: Floats,
    residuals: Floats,
    slopes: Floats,
    doubt: Floats,
    unexplained: tuple[Mapping[str, float], bool],
) -> Posterior:
    tau, known = unexplained
    sigma = _sigma(data, tau)
    weights = 1 / np.sqrt(1 + (residuals / sigma) ** 2)
    covariance = np.asarray(
        np.linalg.inv(_information(slopes, sigma, weights, fitted, theta)), dtype=np.float64
    )
    gain = covariance @ (slopes.T * (weights / sigma**2))
    carried = gain @ (doubt * np.array([p.width for p in others]))
    return Posterior(
        priors=tuple(fitted),
        theta=theta,
        covariance=covariance + carried @ carried.T,
        own=covariance,
        others=tuple(others),
        gain=gain,
        carried=carried,
        residuals=residuals,
        sigma=sigma,
        weights=weights,
        tau=tau,
        tau_known=known,
        slopes=slopes,
        spare=float((1 - _leverage(slopes, sigma, fitted, theta)) @ _between(data)),
    )


def quantile(spare: float) -> float:
    """90th percentile of a t distribution: wider than the normal one where tau rests on few data."""
    return float(stdtrit(max(LEAST_SPARE, spare), 0.9))
