"""Coefficients that explain observed seconds best, together with what was believed before.

Maximum a posteriori on logarithms, theta = ln coefficient, for datum i (phase f of a run) and coefficient k:

    minimise  sum_i rho(((y_i - ln t_i(theta)) / sigma_i)^2) + sum_k ((theta_k - mean_k) / s_k)^2
    sigma_i^2 = scatter_i^2 + tau_f^2        rho(z) = 2 (sqrt(1 + z) - 1), soft l1

within the bounds of each coefficient. A bias of a framework (`biases`) is such a theta as well; rho is then
also applied to its prior term, since one phase may be off by far more than the others. ln t is linear between
two visits to the cost model; visits repeat until theta rests, and derivatives are taken again where it
bends. tau_f, what the model gets wrong about phase f from run to run, is estimated from the residuals as
Paule & Mandel 1982 (J. Res. NBS 87, 377) do for laboratories that disagree, with clipped squares, and shrunk
to the mean over phases; data within one run (`evidence`) have none. Covariance of the posterior, with
weights w_i = rho':

    C = (J^T W J + P^-1)^-1 + A J_u P_u J_u^T A^T      A = (J^T W J + P^-1)^-1 J^T W

J_u: coefficients that are not fitted but uncertain; their doubt widens the intervals of those that are.

Not known here: correlation of phases within one run beyond what coefficients explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares
from scipy.special import stdtrit

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.predict import RunPricer, sensitivities
from rlhfsim.calibration.priors import Prior
from rlhfsim.frozen import frozen

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
        self.cases, self.data = cases, data
        self._seconds: dict[tuple[int, tuple[tuple[str, float], ...]], dict[str, float]] = {}
        self._slopes: dict[tuple[int, str, tuple[tuple[str, float], ...]], dict[str, float]] = {}

    def seconds(self, run: int, values: Mapping[str, float]) -> dict[str, float]:
        """Seconds by phase of one case."""
        key = (run, tuple(sorted(values.items())))
        if key not in self._seconds:
            self._seconds[key] = self.cases[run].seconds(values)
        return self._seconds[key]

    def log(self, values: Mapping[str, float]) -> Floats:
        """ln seconds of every datum; a phase that vanishes counts as `LEAST_S`."""
        times = (self.seconds(d.run, values).get(d.phase, 0.0) for d in self.data)
        seconds = np.fromiter(times, float, len(self.data))
        return np.asarray(np.log(np.maximum(seconds, LEAST_S)), dtype=np.float64)

    def read(self) -> frozenset[str]:
        """Coefficients that pricing reads in any run."""
        return frozenset().union(*(self.cases[run].read() for run in {d.run for d in self.data}))

    def slopes(self, values: Mapping[str, float], names: Sequence[str]) -> Floats:
        """d ln t / d ln theta, data by coefficients."""
        where = tuple(sorted(values.items()))
        runs = sorted({d.run for d in self.data})
        for run in runs:
            missing = [n for n in names if (run, n, where) not in self._slopes]
            if missing:
                found = sensitivities(self.cases[run], values, missing)
                self._slopes |= {(run, name, where): slopes for name, slopes in found.items()}
        rows = [[self._slopes[(d.run, n, where)].get(d.phase, 0.0) for n in names] for d in self.data]
        return np.array(rows).reshape(len(self.data), len(names))

    def only(self, rows: Sequence[int]) -> PriceModel:
        """The same for some data; prices are shared."""
        part = PriceModel(self.cases, [self.data[i] for i in rows])
        part._seconds, part._slopes = self._seconds, self._slopes
        return part


@frozen
class Linear:
    """ln seconds as a linear function of ln coefficients around theta."""

    priors: tuple[Prior, ...]
    """Fitted coefficients, in the order of the columns."""
    theta: Floats
    """ln of their values."""
    slopes: Floats
    """d ln t / d theta, data by coefficients."""
    sigma: Floats
    """Standard deviation of every datum: its scatter, and what the model does not explain."""

    @property
    def moved(self) -> dict[str, float]:
        """Coefficients that are not at their prior, by name: fits that begin alike share prices."""
        pairs = zip(self.priors, self.theta, strict=True)
        return {p.name: float(np.exp(t)) for p, t in pairs if t != p.mean}

    @property
    def deviations(self) -> Floats:
        """Standard deviations of the priors, on the side of theta."""
        return np.array([p.deviation(t) for p, t in zip(self.priors, self.theta, strict=True)])

    def weights_of(self, gap: Floats) -> Floats:
        """rho' of every datum, of which `gap` is left."""
        return np.asarray(1 / np.sqrt(1 + (gap / self.sigma) ** 2), dtype=np.float64)

    def information(self, weights: Floats) -> Floats:
        """J^T W J + P^-1, with the variances in W."""
        seen = (self.slopes.T * (weights / self.sigma**2)) @ self.slopes
        return np.asarray(seen + np.diag(1 / self.deviations**2), dtype=np.float64)

    def leverage(self) -> Floats:
        """Share of every datum that the coefficients take up, 0 to 1."""
        if not self.priors:
            return np.zeros(len(self.sigma))
        inverse = np.linalg.inv(self.information(np.ones_like(self.sigma)))
        return np.asarray(np.einsum("ij,jk,ik->i", self.slopes, inverse, self.slopes) / self.sigma**2)

    def beside(self, others: Sequence[Prior], slopes: Floats) -> Linear:
        """The same with further coefficients, at their priors."""
        return replace(
            self,
            priors=(*self.priors, *others),
            theta=np.concatenate([self.theta, [p.mean for p in others]]),
            slopes=np.hstack([self.slopes, slopes]),
        )

    def solved(self, gap: Floats) -> Floats:
        """theta that leaves least of `gap` in the linear problem, within bounds and `STRIDE`."""
        if not self.priors:
            return self.theta
        table = np.array([(p.mean, p.below, p.above, p.least, p.most) for p in self.priors])
        mean, below, above, smallest, largest = table.T
        low, high = np.maximum(smallest, self.theta - STRIDE), np.minimum(largest, self.theta + STRIDE)
        scaled = self.slopes / self.sigma[:, None]
        robust = np.array([True] * len(gap) + [p.is_bias for p in self.priors])

        def doubt(x: Floats) -> Floats:
            return np.asarray(np.where(x >= mean, above, below), dtype=np.float64)

        def residual(x: Floats) -> Floats:
            return np.concatenate([gap / self.sigma - scaled @ (x - self.theta), (x - mean) / doubt(x)])

        def jacobian(x: Floats) -> Floats:
            return np.vstack([-scaled, np.diag(1 / doubt(x))])

        def loss(z: Floats) -> Floats:
            root = np.sqrt(1 + z[robust])
            rho = np.vstack([z, np.ones_like(z), np.zeros_like(z)])  # priors of coefficients stay quadratic
            rho[:, robust] = 2 * (root - 1), 1 / root, -0.5 / root**3
            return rho

        inside = np.clip(self.theta, low + TINY, high - TINY)
        solved = least_squares(residual, inside, jac=jacobian, bounds=(low, high + TINY), loss=loss)
        return np.asarray(np.clip(solved.x, smallest, largest), dtype=np.float64)


@frozen
class Posterior(Linear):
    """Where the fit came to rest."""

    own: Floats
    """Covariance of theta: data and model mismatch, without the doubt of what is not fitted."""
    residuals: Floats
    """ln measured - ln predicted."""
    tau: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of ln seconds between runs that the model does not explain, by phase."""
    spare: float = 0.0
    """Data less effective coefficients: degrees of freedom of tau."""
    others: tuple[Prior, ...] = ()
    """Coefficients that are not fitted."""
    gain: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Change of theta for one of each ln measured, coefficients by data."""
    carried: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Doubt of theta that one standard deviation of each of `others` leaves, to first order."""
    doubted: Set[str] = frozenset()
    """Coefficients that may be as their priors say: another explains the same times about as well."""
    tau_known: bool = True
    """False: too few data to estimate tau; it is the prior `UNKNOWN_MISMATCH`."""

    def of(self, kept: Sequence[Prior]) -> Posterior:
        """Where a fit of some of the coefficients may start."""
        rows = [self.priors.index(p) for p in kept]
        return replace(self, priors=tuple(kept), theta=self.theta[rows], slopes=self.slopes[:, rows])

    @property
    def weights(self) -> Floats:
        """rho' of every datum: near 1 for those that fit, small for outliers."""
        return self.weights_of(self.residuals)

    @property
    def values(self) -> dict[str, float]:
        """Coefficient by name."""
        return {p.name: float(np.exp(t)) for p, t in zip(self.priors, self.theta, strict=True)}


def fit(
    model: PriceModel, fitted: Sequence[Prior], others: Sequence[Prior] = (), start: Linear | None = None
) -> Posterior:
    """The posterior of `fitted`; `others` keep their values but not their certainty.

    `start` of the same coefficients saves visits: the fit begins there, with its derivatives.
    """
    names, y = [p.name for p in fitted], np.array([d.log for d in model.data])
    doubt = model.slopes({}, [p.name for p in others])
    tau, known = _unknown(model.data), False
    at = Linear(
        priors=tuple(fitted),
        theta=np.array([p.mean for p in fitted]) if start is None else start.theta,
        slopes=model.slopes({}, names) if start is None else start.slopes,
        sigma=_sigma(model.data, tau),
    )
    taken, predicted, refined = at.theta, model.log(at.moved), 0
    for visit in range(VISITS):
        here = model.log(at.moved)
        bent = np.abs(here - predicted - at.slopes @ (at.theta - taken)) / at.sigma
        if bent.max(initial=0.0) > BENT and refined < REFINEMENTS:
            at = replace(at, slopes=model.slopes(at.moved, names))
            taken, predicted, refined = at.theta, here, refined + 1
        for _ in range(TAU_ROUNDS if visit < SETTLING else 0):
            tau, known = _unexplained(model.data, y - here, at.beside(others, doubt))
            at = replace(at, sigma=_sigma(model.data, tau))
        solved = at.solved(y - here)
        rests = bool(np.all(np.abs(solved - at.theta) < AT_REST))
        at = replace(at, theta=solved)
        if rests:
            break
    residuals = y - model.log(at.moved)
    weights = at.weights_of(residuals)
    own = np.asarray(np.linalg.inv(at.information(weights)), dtype=np.float64)
    gain = own @ (at.slopes.T * (weights / at.sigma**2))
    return Posterior(
        priors=at.priors,
        theta=at.theta,
        slopes=at.slopes,
        sigma=at.sigma,
        own=own,
        others=tuple(others),
        gain=gain,
        carried=gain @ (doubt * np.array([p.width for p in others])),
        residuals=residuals,
        tau=tau,
        tau_known=known,
        spare=float((1 - at.leverage()) @ _between(model.data)),
    )


def _sigma(data: Sequence[Datum], tau: Mapping[str, float]) -> Floats:
    return np.array([np.hypot(d.scatter, tau.get(d.phase, 0.0)) for d in data])


def _unknown(data: Sequence[Datum]) -> dict[str, float]:
    """tau of every phase before any is estimated."""
    return {d.phase: UNKNOWN_MISMATCH for d in data if not d.within}


def _between(data: Sequence[Datum]) -> Floats:
    """1 for data of a run, 0 for those that compare steps of one and say nothing of how runs differ."""
    return np.array([float(not d.within) for d in data])


def _unexplained(data: Sequence[Datum], gap: Floats, whole: Linear) -> tuple[dict[str, float], bool]:
    """tau by phase after one round, and whether the data were enough to estimate any.

    From residuals of a fit of all coefficients, so that a wrong one is no mismatch.
    """
    moved = whole.solved(gap)
    residuals = gap - whole.slopes @ (moved - whole.theta)
    free = np.clip(1 - replace(whole, theta=moved).leverage(), 0.0, 1.0) * _between(data)
    if free.sum() < 2:
        return _unknown(data), False
    scatter = np.array([d.scatter for d in data])

    def tau_of(rows: NDArray[np.bool_]) -> float:
        return _paule_mandel(residuals[rows], scatter[rows], free[rows])

    pooled = tau_of(free > 0)
    taus = {}
    for phase in _unknown(data):
        rows = np.array([d.phase == phase for d in data])
        n = float(free[rows].sum())
        of_phase = tau_of(rows) if n > 1 else pooled
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


def quantile(spare: float) -> float:
    """90th percentile of a t distribution: wider than the normal one where tau rests on few data."""
    return float(stdtrit(max(LEAST_SPARE, spare), 0.9))
