"""What is believed of a coefficient before a fit, on the logarithm of its value.

    theta = ln value      mean ln c      standard deviation ln(high / c) / z above, ln(c / low) / z below
    z = `Z90`, the 90th percentile of a normal distribution

A coefficient whose value is 0 has no logarithm, and one without an interval is no question: neither is
fitted. An interval that ends at the value is a bound. Other bounds are the valid range of its kind
(`specs.hardware.hardware`), else a factor of `REACH` either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.hardware import AT_LEAST_ONE, AT_MOST_ONE, MAX_EFFICIENCY, SHARES, Profile
from rlhfsim.specs.quantities import Coefficient

NODES = "bias of "
"""How the name of a bias begins: `bias of verl > actor.train > packed`."""
REACH = 100.0
"""Most that a fit may move a coefficient without a range of its own, either way."""
LEAST_SHARE = 1e-3
"""Smallest efficiency, share or overlap that a fit may find."""
MAX_DOUBT = math.log(REACH) / Z90
"""Standard deviation where the interval begins at 0."""
DRIFT = Coefficient(
    value=0.2,
    low=0.1,
    high=0.4,
    source="prior: on 13 published GRPO rows five fitted coefficients err by 14 % with one row left out "
    "and by 30 % with one model left out, which is one to two e-folds of parameters away",
)
"""P90 of ln(true / predicted) added per e-fold of distance."""


@frozen
class Prior:
    """One coefficient before the fit."""

    name: str
    mean: float
    """ln of its value."""
    below: float
    """Standard deviation of ln value towards smaller values."""
    above: float
    """The same towards larger ones."""
    least: float
    """Smallest ln value that is valid."""
    most: float
    """Largest ln value that is valid."""

    def deviation(self, theta: float) -> float:
        """Standard deviation on the side of `theta`."""
        return self.above if theta >= self.mean else self.below

    @property
    def is_bias(self) -> bool:
        """Whether it is a bias of a framework, and no coefficient of the profile."""
        return self.name.startswith(NODES)

    @property
    def width(self) -> float:
        """Mean of the two standard deviations."""
        return (self.below + self.above) / 2


def priors(profile: Profile, names: Iterable[str] | None = None) -> dict[str, Prior]:
    """Priors of the profile's coefficients that can be fitted, by name."""
    wanted = profile.coefficients if names is None else names
    believed = {name: prior(name, profile.coefficient(name)) for name in wanted}
    return {name: item for name, item in believed.items() if item is not None}


def prior(name: str, coefficient: Coefficient) -> Prior | None:
    """The prior of one coefficient; None where its value is 0 or its interval a point."""
    value, low, high = coefficient.value, coefficient.low, coefficient.high
    if value <= 0 or high <= low:
        return None
    sides = (_side(low, value), _side(value, high))
    wide = max(sides)
    smallest, largest = bounds(name, value)
    return Prior(
        name=name,
        mean=math.log(value),
        below=sides[0] or wide,
        above=sides[1] or wide,
        least=min(math.log(smallest if sides[0] else value), math.log(value)),
        most=max(math.log(largest if sides[1] else value), math.log(value)),
    )


def _side(small: float, large: float) -> float:
    return min(MAX_DOUBT, math.log(large / small) / Z90) if small > 0 else MAX_DOUBT


def bounds(name: str, value: float) -> tuple[float, float]:
    """Smallest and largest valid value of a coefficient of this name."""
    if name.endswith(SHARES):
        return LEAST_SHARE, MAX_EFFICIENCY
    if name.startswith(AT_MOST_ONE):
        return LEAST_SHARE, 1.0
    if name in AT_LEAST_ONE:
        return 1.0, REACH * value
    return value / REACH, value * REACH
