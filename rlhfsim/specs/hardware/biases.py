"""How much longer a framework's calls take than the cost model says: the key `biases` of a profile.

    seconds of a call = priced seconds x factor of (framework, phase, engine mode)

A factor was measured on runs (`rlhfsim calibrate`). It stands beside the coefficients, which say what
hardware and software cost by themselves. The most specific entry holds: phase and mode, else phase, else
framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import Coefficient, CoefficientText

ANY = ""
"""Phase or mode of an entry that holds where no closer one is known."""


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
) -> Coefficient | None:
    """The factor of a phase in an engine mode; None where nothing is known of the framework.

    `own_mode`: runs of other modes say nothing of this one, whose costs were fitted on runs of its own.
    """
    if known is None:
        return None
    by_name = {(entry.phase, entry.mode): entry.factor for entry in known.phases}
    closest: Sequence[tuple[str, str]] = ((phase, mode), (phase, ANY), (ANY, ANY))
    return next((by_name[name] for name in closest[: 1 if own_mode else None] if name in by_name), None)
