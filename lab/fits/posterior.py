"""Posterior of a few coefficients from residuals and priors, and where it is written.

Maximum a posteriori with a robust loss; `lab.fits.training` supplies the residuals.
Needs scipy (development only).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.quantities import Coefficient

Floats = NDArray[np.float64]
SPREAD = 0.15
"""Standard deviation of log(predicted/measured) that is expected of a right model."""
QUARTILE = 0.6745
"""P75 of a standard normal."""
SHARE = 0.75
"""Share of a step that its kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A coefficient to fit, with the prior that it has without these rows."""

    name: str
    value: float
    low: float
    high: float
    unit: str = ""
    """Unit that the file shows."""
    scale: float = 1.0
    """Base units in one `unit`."""
    most: float = math.inf
    """Physical limit."""
    varies: bool = False
    """Takes the scatter between rows into its interval: it differs from run to run."""
    profiles: tuple[str, ...] = ()
    """Profiles that hold it; `common` when empty."""
    begin: float | None = None
    """Where the search starts instead of the prior: a floor that binds nowhere has no gradient."""

    @property
    def key(self) -> str:
        """Name, with the profile where it is not common."""
        return self.name + "".join(f"@{profile}" for profile in self.profiles[:1])

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.high / self.low) / (2 * Z90)


Residuals = Callable[[Sequence[float]], tuple[Floats, Floats]]
"""Values of the coefficients to log(predicted/measured) of the rows, and the rows' weights."""


def posterior(free: Sequence[Free], residuals: Residuals, source: str) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient.

        min  sum w 2 (sqrt(1 + (r/SPREAD)^2) - 1) + sum ((log theta - log prior) / sigma)^2

    P10 and P90 from the covariance at the optimum; where a coefficient `varies`, the scatter of the
    rows (half the width between their quartiles / 0.6745, over SHARE) is added, so that
    the interval of a prediction holds a single run and not only the mean of many.
    """
    from scipy.optimize import least_squares

    start = np.log([f.value for f in free])
    prior = np.array([f.deviation for f in free])
    top = np.log([f.most for f in free])

    def loss(theta: Floats) -> Floats:
        errors, weights = residuals(np.exp(theta).tolist())
        data = np.sign(errors) * np.sqrt(_soft(errors / SPREAD)) * weights
        return np.concatenate([data, (theta - start) / prior])

    begin = np.minimum(np.log([f.begin or f.value for f in free]), top - 1e-3)
    found = least_squares(loss, begin, bounds=(-np.inf, top), diff_step=0.02, xtol=1e-4)
    errors, _ = residuals(np.exp(found.x).tolist())
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    low, high = np.percentile(errors, (25, 75))
    scatter = (high - low) / 2 / QUARTILE / SHARE
    runs = np.array([scatter if f.varies else 0.0 for f in free])
    wide = np.hypot(np.sqrt(np.diag(covariance)), runs)
    return {
        f.key: Coefficient(
            value=float(np.exp(x)),
            low=float(np.exp(x - Z90 * s)),
            high=min(float(np.exp(x + Z90 * s)), f.most),
            source=f"{source}, n={errors.size}, prior {f.value / f.scale:g} {f.unit}".strip(),
        )
        for f, x, s in zip(free, found.x, wide, strict=True)
    }


def _soft(z: Floats) -> Floats:
    """Twice the soft-L1 loss, 2 (sqrt(1 + z^2) - 1): outliers count linearly."""
    return 2 * (np.sqrt(1 + z * z) - 1)


def written(text: str, free: Free, c: Coefficient) -> str:
    """The file with the fitted value, low, high and source in place of the old ones."""
    numbers = [f"{x / free.scale:.3g} {free.unit}".strip() for x in (c.value, c.low, c.high)]
    old = re.search(rf'^  {free.name}: {{.*source: "(.*?)"}}$', text, re.MULTILINE)
    assert old, f"the file has no {free.name}"
    kept = old[1].split(" | prior: ")[-1].removeprefix("prior: ")
    line = (
        f"  {free.name}: {{value: {numbers[0]}, low: {numbers[1]}, high: {numbers[2]}, "
        f'source: "{c.source} | prior: {kept}"}}'
    )
    return text[: old.start()] + line + text[old.end() :]
