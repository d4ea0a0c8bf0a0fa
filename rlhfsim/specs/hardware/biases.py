"""How much longer a framework's calls take than the cost model says: the key `biases` of a profile.

    seconds of a call = priced seconds x factor of (framework, phase, engine mode) x exp(e)
    e = rho_max sum_i rho_i log_i / sum_i rho_i        rho_i = exp(-(d_i / reach_i)^2 / 2)

A factor was measured on runs (`rlhfsim calibrate`). It stands beside the coefficients, which say what
hardware and software cost by themselves. The most specific entry holds: phase and mode, else phase, else
framework. e is what runs near the plan took beyond the factor (`log_i`, at a distance of d_i e-folds): their
mean with weights that fall with the distance (Nadaraya 1964, Theory Probab. Appl. 9, 141), faded by that of
the nearest; far from all runs the factor alone holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.calibrated import Point
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import CoefficientText

ANY = ""
"""Phase or mode of an entry that holds where no closer one is known."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class NearRun:
    """What one run took beyond the factor of its phase and mode."""

    at: Point
    """Where the run lies (`specs.hardware.calibrated.COORDINATES`)."""
    log: float
    """ln of measured over priced seconds with the factor."""
    reach: float
    """e-folds over which it fades."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
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
@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkBiases:
    """What runs of one framework on one kind of GPU showed."""

    version: Literal[1] = 1
    runs: int
    """How many runs."""
    phases: tuple[PhaseBias, ...]


def bias_of(
    known: FrameworkBiases | None, phase: str, mode: str, *, own_mode: bool = False
) -> PhaseBias | None:
    """The entry of a phase in an engine mode; None where nothing is known of the framework.

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
