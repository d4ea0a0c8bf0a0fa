"""What runs say of a profile: its origin, the region where it was seen to hold, biases of frameworks.

The key `calibration` of a profile (docs/calibration.md). A run is a point in the logarithms of what decides
its time, one set of points a phase; a prediction between the points rests on measurements, one far from
their hull on the cost model alone.

The key `biases`: how much longer a framework's calls take than the cost model says.

    seconds of a call = priced seconds x factor of (framework, phase, engine mode) x exp(e)
    e = rho_max sum_i rho_i log_i / sum_i rho_i        rho_i = exp(-(d_i / reach_i)^2 / 2)

A factor was measured on runs (`rlhfsim calibrate`). It is separate from the coefficients, which say what
hardware and software cost by themselves. The most specific entry holds: phase and mode, else phase, else
framework. e is what runs near the plan took beyond the factor (`log_i`, at a distance of d_i e-folds): their
mean with weights that fall with the distance (Nadaraya 1964, Theory Probab. Appl. 9, 141), faded by that of
the nearest; far from all runs the factor alone holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
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
@frozen
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
@frozen
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


# --- biases of frameworks ---------------------------------------------------------------------------

ANY = ""
"""Phase or mode of an entry that holds where no closer one is known."""


@checked
@frozen
class NearRun:
    """What one run took beyond the factor of its phase and mode."""

    at: Point
    """Where the run lies (`COORDINATES`)."""
    log: float
    """ln of measured over priced seconds with the factor."""
    reach: float
    """e-folds over which it fades."""


@checked
@frozen
class PhaseBias:
    """Measured over priced seconds of one phase in one engine mode."""

    phase: str = ANY
    """`actor.generate`, ...; empty: any that has no entry."""
    mode: str = ANY
    """`eager`, `packed lora`, ... (`step.engine_mode`); empty: any that has no entry."""
    factor: CoefficientText
    """Interval: P10 to P90 of a run that was not measured."""
    common: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the variance of ln factor that all calls of a step have in common."""
    near: tuple[NearRun, ...] = ()
    """Runs that say more of plans near them; a weight sync has none."""

    def __post_init__(self) -> None:
        """Check that a factor is one."""
        if self.factor.low <= 0 or self.factor.dimension != "1":
            raise RlhfsimError(
                "coefficient-out-of-range",
                f"the factor of phase {self.phase or 'any'!r} begins at {self.factor.low:g}",
                help="measured over priced seconds is a number above 0, such as 1.4",
            )


@checked
@frozen
class FrameworkBiases:
    """What runs of one framework on one kind of GPU showed."""

    version: Literal[1] = 1
    runs: int
    """How many runs."""
    phases: tuple[PhaseBias, ...]


def bias_of(
    known: FrameworkBiases | None, phase: str, mode: str, *, own_mode: bool = False
) -> PhaseBias | None:
    """The entry of a phase in an engine mode; None where nothing is known about the framework.

    `own_mode`: runs of other modes say nothing of this one, whose costs were fitted on runs of its own.
    """
    if known is None:
        return None
    by_name = {(entry.phase, entry.mode): entry for entry in known.phases}
    closest: Sequence[tuple[str, str]] = ((phase, mode), (phase, ANY), (ANY, ANY))
    return next((by_name[name] for name in closest[: 1 if own_mode else None] if name in by_name), None)


def beyond(runs: Sequence[NearRun], at: Point) -> float:
    """e: ln of what runs near a point took beyond the factor; 0 far from all."""
    closeness = [math.exp(-((math.dist(run.at, at) / run.reach) ** 2) / 2) for run in runs]
    total = math.fsum(closeness)
    if total <= 0:
        return 0.0
    logs = (rho * run.log for rho, run in zip(closeness, runs, strict=True))
    return max(closeness) * math.fsum(logs) / total
