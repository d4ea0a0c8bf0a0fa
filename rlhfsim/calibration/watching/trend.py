"""How a metric grows over steps, and when it reaches a limit at this growth, with its uncertainty.

Growth is read as a line, as a logarithm, which a running maximum of alike steps follows, and as a warm-up
that fills up:

    y(k) = a + b f(k) + noise,   f(k) = k, ln k or -1/k,   k: steps since the run began (again)

Each form counts by its likelihood, SSE^(-n/2). Futures are drawn from the posterior of (a, b, sigma) under a
flat prior, with noise of every step; the limit is reached where such a future first is above it.

Not known here: what a step holds that none before it held, as a first evaluation or a longer context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen

Floats = NDArray[np.float64]
Form = Callable[[Floats], Floats]
FORMS: Sequence[Form] = (lambda k: k, lambda k: np.log(k), lambda k: -1.0 / k)
Fit = tuple[Floats, Floats, float]
"""(a, b), the inverse of X'X, and the sum of squares that is left."""
DRAWS = 2000
MOST_AHEAD = 1000
"""Steps ahead that are drawn at most."""
LEAST, NEWEST = 5, 100
"""Steps that make a trend, and those that count: how a run grew long ago says little."""
STEADY = 0.01
"""Share by which what is called steady grows or falls at most."""
RESOLUTION = 1e-4
"""Relative size of noise below which logged numbers are rounded anyway."""


@frozen
class Trend:
    """A metric over steps, and its limit."""

    now: float
    """Fitted value of the newest step."""
    each_step: float | None = None
    """Growth by the next step, P50; None: the steps are too few to tell."""
    low: float | None = None
    """The same, P10."""
    high: float | None = None
    """The same, P90."""
    limit: float | None
    """None: not known."""
    ahead: int
    """Steps that were looked ahead."""
    risk: float = 0.0
    """Probability that the limit is reached within them."""
    reached: tuple[int, int, int] | None = None
    """Steps from now until then, P10, P50 and P90 of the futures that reach it; None: few do."""

    @property
    def steady(self) -> bool:
        """Whether the steps ahead change it by less than `STEADY`."""
        return self.each_step is not None and abs(self.each_step) * self.ahead < STEADY * abs(self.now)


def trend(values: Sequence[float], limit: float | None, ahead: int) -> Trend | None:
    """How `values` of consecutive steps go on; None where there are none."""
    ahead = min(max(1, ahead), MOST_AHEAD)
    if len(values) < LEAST:
        return Trend(now=values[-1], limit=limit, ahead=ahead) if values else None
    y = np.asarray(values[-NEWEST:], dtype=np.float64)
    steps = np.arange(1, len(values) + 1, dtype=np.float64)[-len(y) :]
    rng = np.random.default_rng(0)
    fits = {form: _fit(form(steps), y) for form in FORMS}
    futures, level = _futures(fits, len(values), len(y), ahead, rng)
    noise = math.sqrt(min(sse for _, _, sse in fits.values()) / (len(y) - 2))
    growth = futures[:, 0] - level
    low, middle, high = np.percentile(growth, [10, 50, 90])
    scattered = futures + noise * rng.standard_normal(futures.shape)
    risk, reached = (0.0, None) if limit is None else _crossing(scattered, limit)
    return Trend(
        now=float(np.median(level)),
        each_step=float(middle),
        low=float(low),
        high=float(high),
        limit=limit,
        ahead=ahead,
        risk=risk,
        reached=reached,
    )


def _futures(
    fits: Mapping[Form, Fit], newest: int, points: int, ahead: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Drawn means of the next steps, (draws, steps), and of the newest one."""
    later = newest + np.arange(ahead + 1, dtype=np.float64)
    logs = np.array([-points / 2 * math.log(sse) for _, _, sse in fits.values()])
    shares = np.exp(logs - logs.max())
    counts = rng.multinomial(DRAWS, shares / shares.sum())
    means = []
    for (f, (best, spread, sse)), count in zip(fits.items(), counts, strict=True):
        sigma = np.sqrt(sse / rng.chisquare(points - 2, count))
        drawn = best + sigma[:, None] * (rng.standard_normal((count, 2)) @ np.linalg.cholesky(spread).T)
        means.append(drawn[:, :1] + drawn[:, 1:] * f(later)[None, :])
    whole = np.concatenate(means)
    return whole[:, 1:], whole[:, 0]


def _fit(x: Floats, y: Floats) -> Fit:
    """Least squares; the sum of squares is never below what rounding leaves."""
    design = np.stack([np.ones_like(x), x], axis=1)
    spread = np.linalg.inv(design.T @ design)
    best = spread @ design.T @ y
    rest = float(np.square(y - design @ best).sum())
    return best, spread, max(rest, len(y) * (RESOLUTION * max(1e-12, float(np.abs(y).max()))) ** 2)


def _crossing(futures: Floats, limit: float) -> tuple[float, tuple[int, int, int] | None]:
    """The share of futures that reach the limit, and when."""
    above = futures >= limit
    reaches = above.any(axis=1)
    risk = float(reaches.mean())
    if reaches.sum() < DRAWS / 20:
        return risk, None
    low, middle, high = np.percentile(above[reaches].argmax(axis=1) + 1, [10, 50, 90])
    return risk, (int(low), int(middle), int(high))
