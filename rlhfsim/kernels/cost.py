"""What a priced piece of work returns: seconds by the resource that bounds them, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from rlhfsim.frozen import frozen

Z90 = NormalDist().inv_cdf(0.9)
"""Standard deviations from the mean of a normal law to its P90, and from P10 to the mean."""
Resource = Literal[
    "compute",
    "hbm",
    "nvlink",
    "network",
    "wan",
    "pcie",
    "storage",
    "host",
    "environment",
    "rewards",
    "controller",
    "custom",
    "bubble",
    "tail",
    "overhead",
]
"""wan: the link to a second region; environment, rewards: workers that answer turns or score by rules;
controller: the process that drives the step; custom: the user's own parts of the algorithm in that process;
bubble: pipeline ramp; tail: GPUs waiting for the longest response; overhead: launch and framework."""


class Part(NamedTuple):
    """Exposed seconds on one resource; of many layouts an array with an entry each."""

    resource: Resource
    seconds: float
    rests_on: str
    """The curve or coefficient that decides it, as named in the profile."""
    spread: tuple[float, float]
    """P10 and P90 of true over predicted seconds."""

    @property
    def low(self) -> float:
        """P10 of `seconds`."""
        return self.seconds * self.spread[0]

    @property
    def high(self) -> float:
        """P90 of `seconds`."""
        return self.seconds * self.spread[1]


def part(
    resource: Resource, seconds: float, rests_on: str, *, spread: tuple[float, float] = (1.0, 1.0)
) -> Part:
    """A part whose interval is `seconds` times the spread (P10, P90 of true/predicted)."""
    return Part(resource, seconds, rests_on, spread)


@frozen
class Cost:
    """Time of one call: a sum of exposed parts."""

    parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        """Sum over the parts; an array with an entry a layout where theirs are."""
        each = [p.seconds for p in self.parts]
        if any(isinstance(seconds, np.ndarray) for seconds in each):
            rows = np.stack(np.broadcast_arrays(*each), axis=-1).tolist()
            return np.array([math.fsum(row) for row in rows])  # type: ignore[return-value]
        return math.fsum(each)

    @property
    def bound_by(self) -> Resource:
        """The resource with the most exposed time."""
        by = self.by_resource()
        return max(by, key=lambda r: by[r]) if by else "overhead"

    def by_resource(self) -> dict[Resource, float]:
        """Seconds per resource, in the order of first use."""
        total: dict[Resource, float] = {}
        for p in self.parts:
            total[p.resource] = total.get(p.resource, 0.0) + p.seconds
        return total

    @property
    def interval(self) -> tuple[float, float]:
        """P10 and P90: parts on the same coefficient move together, others independently."""
        low: dict[str, float] = {}
        high: dict[str, float] = {}
        for p in self.parts:
            low[p.rests_on] = low.get(p.rests_on, 0.0) + p.seconds - p.low
            high[p.rests_on] = high.get(p.rests_on, 0.0) + p.high - p.seconds
        s = self.seconds
        return max(0.0, s - math.hypot(*low.values())), s + math.hypot(*high.values())

    @property
    def rests_on(self) -> tuple[str, ...]:
        """Curves and coefficients, the heaviest first."""
        weight: dict[str, float] = {}
        for p in self.parts:
            weight[p.rests_on] = weight.get(p.rests_on, 0.0) + p.seconds
        return tuple(sorted(weight, key=lambda k: -weight[k]))

    def __add__(self, other: Cost) -> Cost:
        return Cost(parts=self.parts + other.parts)

    def scaled(self, factor: float) -> Cost:
        """The same work `factor` times."""
        if factor == 1:
            return self
        return Cost(
            parts=tuple(Part(p.resource, p.seconds * factor, p.rests_on, p.spread) for p in self.parts)
        )

    def widened(self, resource: Resource, spread: tuple[float, float]) -> Cost:
        """The same seconds; the interval of one resource is wider by P10 and P90 of a choice left open."""
        low, high = spread
        if spread == (1.0, 1.0):
            return self
        return Cost(
            parts=tuple(
                p._replace(spread=(p.spread[0] * low, p.spread[1] * high)) if p.resource == resource else p
                for p in self.parts
            )
        )


def total(costs: Iterable[Cost]) -> Cost:
    """One cost after the other."""
    return Cost(parts=tuple(p for cost in costs for p in cost.parts))
