"""Where one quantity passes another along an input: sampled, then narrowed.

Both sides are designed anew at every value that is tried, so they jump where another plan wins. What is
followed is the relative difference

    g(x) = (a - b) / (a + b)        1 where a does not fit, -1 where b does not

at `SAMPLES` values over the range. Where g changes sign between two of them it has a crossing, narrowed
by Brent's method (Brent 1973, ch. 4; scipy.optimize.brentq), which halves the bracket across a jump;
where it leaves or reaches 0 (both sides choose the same plan), or counts whole things, by halving.
Two crossings between neighbouring samples are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from rlhfsim.frozen import frozen
from rlhfsim.what_if.points import Line, edge, geometric
from rlhfsim.what_if.scenarios.result import Tried

SAMPLES = 9
WIDE = 4.0
"""Ends with a larger ratio are sampled in equal factors, others in equal steps."""
SAME = 1e-9
"""Difference below which both sides are the same."""
JUMP = 0.01
"""Difference on both sides of a crossing above which it is a jump."""
State = Literal["less", "same", "more", "nothing"]
"""a against b; nothing: neither fits."""


class _Undefined(Exception):
    """Neither side fits."""


@frozen
class Crossing:
    """A value at which the state changes."""

    x: float
    jump: bool
    """Whether the quantities step over each other there."""


def samples(low: float, high: float, *, whole: bool) -> list[float]:
    """Values over a range, both ends among them."""
    spread = np.geomspace if low > 0 and high / low >= WIDE else np.linspace
    values = [float(x) for x in spread(low, high, SAMPLES)]
    values[0], values[-1] = low, high
    return sorted({float(round(x)) for x in values}) if whole else values


def difference(tried: Tried) -> float | None:
    """g of one value; positive where a is more; None where neither side fits."""
    a, b = tried.a, tried.b
    if a is None or b is None:
        return None if a is b else 1.0 if a is None else -1.0
    return (a - b) / (a + b) if a + b else 0.0


def state(tried: Tried) -> State:
    """How a compares with b."""
    g = difference(tried)
    if g is None:
        return "nothing"
    return "same" if abs(g) <= SAME else "less" if g < 0 else "more"


class Curve(Line[Tried]):
    """Both sides at the values that were tried."""

    def crossings(self, tolerance: float, *, whole: bool) -> Iterator[Crossing]:
        """Every change of state between neighbouring samples, narrowed to `tolerance`."""
        for left, right in list(pairwise(self.ordered)):
            if state(left) != state(right):
                yield self._narrowed(left, right, tolerance, whole)

    def _narrowed(self, left: Tried, right: Tried, tolerance: float, whole: bool) -> Crossing:
        if not whole and {state(left), state(right)} == {"less", "more"}:
            try:
                return self._brent(left.x, right.x, tolerance)
            except _Undefined:
                pass
        return self._halved(left, right, tolerance, whole)

    def _brent(self, low: float, high: float, tolerance: float) -> Crossing:
        def g(x: float) -> float:
            value = difference(self.at(float(x)))
            if value is None:
                raise _Undefined
            return value

        smallest = min(abs(low), abs(high)) or abs(high - low)
        x = float(brentq(g, low, high, xtol=tolerance * smallest, rtol=tolerance))
        below = max(t for t in self.answers if t < x or t == low)
        above = min(t for t in self.answers if t > x or t == high)
        apart = above - below > 4 * tolerance * max(abs(below), abs(above))
        return Crossing(x=x, jump=min(abs(g(below)), abs(g(above))) > JUMP and not apart)

    def _halved(self, left: Tried, right: Tried, tolerance: float, whole: bool) -> Crossing:
        """The first value with another state than `left`, by halving."""

        def middle(low: float, high: float) -> float:
            if high - low <= (1 if whole else tolerance * max(abs(low), abs(high))):
                return high
            between = geometric(low, high) if low > 0 and high / low >= WIDE else (low + high) / 2
            return float(round(between)) if whole else between

        x = edge(left.x, right.x, lambda x: state(self.at(x)) != state(left), middle)
        g = difference(self.at(x))
        return Crossing(x=x, jump=g is None or abs(g) > JUMP)


def stretches(tried: Sequence[Tried]) -> list[tuple[State, list[Tried]]]:
    """Neighbouring values with one state, ascending."""
    return [(s, list(group)) for s, group in groupby(tried, key=state)]
