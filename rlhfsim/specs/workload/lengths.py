"""Distributions of prompt and response lengths, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked, read_text

MAX_TOKENS = 100_000_000
Tokens = Annotated[float, Field(ge=1, le=MAX_TOKENS)]
Floats = NDArray[np.float64]
SIGMA = 0.8
"""Standard deviation of the log of a length where nobody gives one."""
SPREADS = (0.05, 2.0)
"""Standard deviations of the log of a length that a log may tell."""
GRID = 4096
"""Quantiles that represent a distribution in closed forms."""


@checked
@frozen
class Fixed:
    """Every sequence has the same length."""

    kind: Literal["fixed"] = "fixed"
    value: Tokens = 1024

    def quantile(self, q: Floats) -> Floats:
        """Lengths at the given levels."""
        return np.full_like(q, self.value)

    @property
    def maximum(self) -> float:
        """The longest possible sequence."""
        return self.value


@checked
@frozen
class LogNormal:
    """Log-normal lengths, cut at `max` (a response that reaches it is truncated there).

    `mean` is the mean before the cut; sigma is the standard deviation of the log.
    """

    kind: Literal["lognormal"] = "lognormal"
    mean: Tokens
    sigma: Annotated[float, Field(ge=0, le=4)] = SIGMA
    max: Tokens

    def quantile(self, q: Floats) -> Floats:
        """Lengths at the given levels."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        z = _normal_quantile(np.clip(q, 1e-9, 1 - 1e-9))
        return np.asarray(np.clip(np.exp(mu + self.sigma * z), 1.0, self.max))

    @property
    def maximum(self) -> float:
        """The longest possible sequence."""
        return self.max


@checked
@frozen
class Truncated:
    """Normal lengths cut to [`min`, `max`]."""

    kind: Literal["truncated"] = "truncated"
    mean: Tokens
    std: Annotated[float, Field(ge=0, le=10_000_000)]
    min: Tokens = 1
    max: Tokens

    def __post_init__(self) -> None:
        """Check that the bounds are in order."""
        if self.min > self.max:
            raise RlhfsimError(
                "empty-range",
                f"lengths from {self.min:g} to {self.max:g} tokens: the range is empty",
                help="give min <= max",
            )

    def quantile(self, q: Floats) -> Floats:
        """Lengths at the given levels."""
        z = _normal_quantile(np.clip(q, 1e-9, 1 - 1e-9))
        return np.asarray(np.clip(self.mean + self.std * z, self.min, self.max))

    @property
    def maximum(self) -> float:
        """The longest possible sequence."""
        return self.max


@checked
@frozen
class Empirical:
    """Lengths observed by the user: a text or CSV file with one number a line."""

    kind: Literal["empirical"] = "empirical"
    file: str

    def quantile(self, q: Floats) -> Floats:
        """Lengths at the given levels."""
        return np.asarray(np.quantile(_observed(self.file), q), dtype=np.float64)

    @property
    def maximum(self) -> float:
        """The longest observed sequence."""
        return float(_observed(self.file)[-1])


Lengths = Annotated[Fixed | LogNormal | Truncated | Empirical, Field(discriminator="kind")]
AnyLengths = Fixed | LogNormal | Truncated | Empirical


@dataclass(frozen=True)
class LengthStats:
    """Moments that the closed forms need."""

    lengths: AnyLengths

    @cached_property
    def _grid(self) -> Floats:
        return self.lengths.quantile((np.arange(GRID) + 0.5) / GRID)

    @cached_property
    def mean(self) -> float:
        """E[l], tokens."""
        return float(self._grid.mean())

    @cached_property
    def mean_square(self) -> float:
        """E[l^2], tokens squared."""
        return float((self._grid**2).mean())

    def expected_max(self, count: int) -> float:
        """E[max of `count` draws] at the level count/(count+1), tokens."""
        return float(self.lengths.quantile(np.array([count / (count + 1.0)]))[0])

    def representative(self, count: int) -> Floats:
        """`count` sorted lengths at evenly spaced levels: the expected order statistics."""
        return self.lengths.quantile((np.arange(count) + 0.5) / count)


@lru_cache(maxsize=256)
def stats(lengths: AnyLengths) -> LengthStats:
    """Cached moments of a distribution."""
    return LengthStats(lengths)


def draw(lengths: AnyLengths, count: int, rng: np.random.Generator) -> Floats:
    """`count` independent whole lengths, tokens."""
    return np.rint(lengths.quantile(rng.random(count)))


def _normal_quantile(q: Floats) -> Floats:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(level) for level in q.ravel().tolist()]).reshape(q.shape)


@lru_cache(maxsize=16)
def _observed(file: str) -> Floats:
    lines = read_text(Path(file)).splitlines()
    values = [
        _length(line, Place(file=file, line=i + 1, column=1, text=line))
        for i, line in enumerate(lines)
        if line.strip()
    ]
    if not values:
        raise RlhfsimError(
            "empty-file", "no lengths in the file", place=Place(file=file), help="one length in tokens a line"
        )
    return np.sort(np.array(values))


def _length(line: str, place: Place) -> float:
    try:
        value = float(line.strip().rstrip(","))
    except ValueError as error:
        raise RlhfsimError(
            "bad-length",
            f"{line.strip()[:40]!r} is not a length in tokens",
            place=place,
            help="one number a line, no header",
        ) from error
    if not 1 <= value <= 1e8:
        raise RlhfsimError(
            "bad-length",
            f"length {value} is not between 1 and 100,000,000 tokens",
            place=place,
            help="give lengths in tokens",
        )
    return value


FULL_SHARE = 0.985
"""A mean this close to the longest response means that nearly all are cut there: one length."""
_PHI = NormalDist().cdf


def log_spread(mean: float, longest: float, reached: float) -> float:
    """Sigma of log-normal lengths: mean `mean` after a cut at `longest`, which a share `reached` would pass.

        E[min(X, L)] / L = e^(s^2/2 - z s) Phi(z - s) + c,   z = Phi^-1(1 - c),   c = `reached`

    Falls with s; bisection within `SPREADS`.
    """
    z = NormalDist().inv_cdf(1 - reached)
    low, high = SPREADS
    for _ in range(40):
        middle = (low + high) / 2
        share = math.exp(middle**2 / 2 - z * middle) * _PHI(z - middle) + reached
        low, high = (middle, high) if share > mean / longest else (low, middle)
    return low


def cut_log_normal(mean: float, longest: float | None, sigma: float = SIGMA) -> AnyLengths:
    """Log-normal lengths whose mean after the cut at `longest` is `mean`; one length without a cut.

        E[min(X, L)] = e^(mu + s^2/2) Phi(z - s) + L (1 - Phi(z)),   z = (ln L - mu) / s

    Bisection on mu; s is `sigma`.
    """
    if longest is None or mean >= FULL_SHARE * longest:
        return Fixed(value=mean)
    low, high = math.log(mean) - sigma**2, math.log(longest) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        z = (math.log(longest) - middle) / sigma
        reached = math.exp(middle + sigma**2 / 2) * _PHI(z - sigma) + longest * (1 - _PHI(z))
        low, high = (middle, high) if reached < mean else (low, middle)
    return LogNormal(mean=math.exp(low + sigma**2 / 2), sigma=sigma, max=longest)
