"""Where a calibrated profile comes from, and the region in which it was seen to hold.

The key `calibration` of a profile (docs/calibration.md). A run is a point in the logarithms of what decides
its time, one set of points a phase; a prediction between the points stands on measurements, one far from
their hull on the cost model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import CoefficientText, Seconds, Text

Measurable = Literal[
    "reward.rules.seconds_per_sample",
    "environment.seconds_per_turn",
    "environment.mean_turns",
    "custom.loss",
    "custom.sampler",
    "custom.filter",
    "custom.advantages",
    "custom.logger",
]
"""Fields of a workload that a run measures, dotted; seconds, but for the turns."""
COORDINATES = ("params", "sequences", "prompt", "response", "gpus")
"""Logarithms of: parameters of the role's model, sequences of a step, mean prompt and response tokens,
GPUs of the pool."""
Point = tuple[float, float, float, float, float]
Floats = NDArray[np.float64]
ROUNDS = 100
"""Most vertices that join."""
NEAR_ENOUGH = 1e-9
"""Gap, in squared distance, at which the nearest point is found."""
ROUNDING = 1e-12


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Key `calibration` of a profile that `rlhfsim calibrate` wrote."""

    base: Text
    """Name of the profile before."""
    date: str
    device: Text
    """What the runs used, in words."""
    interconnect: Text
    versions: dict[str, str] = field(default_factory=dict)
    """Engine -> version of the runs."""
    runs: tuple[str, ...]
    data: Annotated[int, Field(ge=1)]
    """Times that were fitted."""
    phase_error: tuple[float, float] | None = None
    """Median |predicted / measured - 1| of phases in runs left out: before, after."""
    step_error: tuple[float, float] | None = None
    """The same of the step."""
    drift: CoefficientText
    """P90 of ln(true / predicted) added per e-fold of distance from the region."""
    region: dict[str, tuple[Point, ...]]
    """Phase -> a point (`COORDINATES`) a run."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMeasured:
    """What a field of the workload was in runs that had stated something else for it."""

    name: Measurable
    stated: Seconds
    """Value that their workload stated, in seconds or turns: what states the same takes what was measured."""
    measured: CoefficientText


def distance(points: Sequence[Point], x: Point) -> float:
    """Distance of `x` from the convex hull of `points`, in e-folds: 0 inside, 0.69 for a factor of 2.

    Wolfe 1976 (Math. Programming 11, 128): the point nearest to x of the hull of a few vertices; vertices
    that lie further in the direction of x join, those that it does not need leave.
    """
    vertices = np.unique(np.array(points, dtype=float), axis=0) - np.array(x, dtype=float)
    used = [int(np.argmin((vertices**2).sum(axis=1)))]
    weights = np.ones(1)
    for _ in range(ROUNDS):
        nearest = weights @ vertices[used]
        further = int(np.argmin(vertices @ nearest))
        if further in used or nearest @ (nearest - vertices[further]) <= NEAR_ENOUGH:
            break
        used, weights = _needed(vertices, [*used, further], np.append(weights, 0.0))
    return float(np.linalg.norm(weights @ vertices[used]))


def _needed(vertices: Floats, used: list[int], weights: Floats) -> tuple[list[int], Floats]:
    """The nearest point of the hull of `used` that lies inside a face: its vertices and their weights."""
    while (best := _on_the_plane(vertices[used])).min() <= 0:
        falling = best <= 0
        share = float((weights[falling] / (weights[falling] - best[falling])).min())
        weights = weights + share * (best - weights)
        weights[falling & (weights <= ROUNDING)] = 0.0
        used = [i for i, weight in zip(used, weights, strict=True) if weight > 0]
        weights = weights[weights > 0] / weights.sum()
    return used, best


def _on_the_plane(vertices: Floats) -> Floats:
    """Weights that sum to 1, of either sign, of the point nearest to 0."""
    n = len(vertices)
    table = np.block([[vertices @ vertices.T, np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
    solution = np.linalg.lstsq(table, np.append(np.zeros(n), 1.0), rcond=None)[0]
    return np.asarray(solution[:n], dtype=np.float64)
