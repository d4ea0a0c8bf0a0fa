"""Where a calibrated profile comes from, and the region in which it was seen to hold.

The key `calibration` of a profile (docs/calibration.md). A run is a point in the logarithms of what decides
its time, one set of points a phase; a prediction between the points stands on measurements, one far from
their hull on the cost model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import CoefficientText, Text

COORDINATES = ("params", "sequences", "prompt", "response", "gpus")
"""ln parameters of the role's model, sequences of a step, mean prompt and response tokens, GPUs of the pool."""
Point = tuple[float, float, float, float, float]
ROUNDS = 300
"""Most steps towards the nearest point of a hull."""
NEAR_ENOUGH = 1e-6
"""Gap, in squared distance, at which the nearest point is found."""


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


def distance(points: Sequence[Point], x: Point) -> float:
    """Distance of `x` from the convex hull of `points`, in e-folds: 0 inside, 0.69 for a factor of 2.

    Frank & Wolfe 1956 with exact line search: y moves towards the vertex that is nearest in the
    direction of x until none lies further on.
    """
    vertices, target = np.array(points, dtype=float), np.array(x, dtype=float)
    nearest = vertices[np.argmin(((vertices - target) ** 2).sum(axis=1))]
    for _ in range(ROUNDS):
        away = target - nearest
        best = vertices[np.argmax(vertices @ away)]
        path = best - nearest
        gain = float(path @ away)
        if gain <= NEAR_ENOUGH:
            break
        nearest = nearest + min(1.0, gain / float(path @ path)) * path
    return float(np.linalg.norm(target - nearest))
