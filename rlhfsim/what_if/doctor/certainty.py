"""How likely a user's configuration runs out of memory, and how near to 0 or 1 that may be said.

Peaks of users' runs lie further from the ledger than its components know: fragments of an allocator that
cannot grow its segments on the same GPU as a sleeping engine, what that engine keeps, copies of logits that a
release had, turns that add up (docs/validation_memory.md). `USERS_SPREAD` is how far; an extreme risk is said
as far as public cases were right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhfsim.memory.ledger import Ledger, LedgerPhase

USERS_SPREAD = 0.34
"""Deviation of ln peak beyond that of the components (P10 to P90: 0.28 to 0.42): maximum likelihood of the
fitted half of the public cases (`python -m lab.fits.oom`). It leaves 50 % at 50 %."""
EXTREME = 0.01
"""No risk is said nearer to 0 or 1; answers that were nearer are scored here."""
UNSURE = 0.05
"""Share of such answers that may have been wrong; where more were, no risk is said nearer to 0 or 1."""
LEAST = 20
"""Answers from which a framework counts alone: among fewer, 95 of 100 are not told from all."""
OTHERS = "the other frameworks"


@dataclass(frozen=True, slots=True)
class ExtremeAnswers:
    """Extreme answers to public cases of one framework."""

    right: int
    of: int

    @property
    def supports(self) -> bool:
        """Whether an extreme risk may be said."""
        return self.of >= LEAST and self.right >= (1 - UNSURE) * self.of


SCORED: Mapping[str, tuple[ExtremeAnswers, ExtremeAnswers]] = {
    "nemo-rl": (ExtremeAnswers(3, 3), ExtremeAnswers(0, 1)),
    OTHERS: (ExtremeAnswers(0, 1), ExtremeAnswers(4, 4)),
}
"""Framework -> answers `it fits` and `it does not` to the cases of oom_cases*.csv; a test counts them."""


def computed(memory: Ledger) -> float:
    """The risk of a user's run with this ledger."""
    return memory.risk(USERS_SPREAD)


def riskiest(memory: Ledger) -> LedgerPhase:
    """The phase on which that risk rests."""
    return memory.riskiest(USERS_SPREAD)


def scored(framework: str) -> tuple[ExtremeAnswers, ExtremeAnswers]:
    """Extreme answers to cases of a framework, or of all those that have too few of their own."""
    return SCORED.get(framework, SCORED[OTHERS])


def bounds(framework: str) -> tuple[float, float]:
    """The lowest and the highest risk that is said of a configuration of a framework."""
    fits, fails = scored(framework)
    low, high = (EXTREME if side.supports else UNSURE for side in (fits, fails))
    return low, 1 - high


def said(risk: float, framework: str) -> float:
    """The risk as it is said: one that is not extreme, or a bound."""
    if EXTREME <= risk <= 1 - EXTREME:
        return risk
    low, high = bounds(framework)
    return max(low, min(high, risk))


def reasons(risk: float, framework: str) -> Iterator[str]:
    """Why a risk is not said as it was computed; nothing where it is."""
    side = scored(framework)[risk > 0.5]
    if EXTREME <= risk <= 1 - EXTREME or side.supports:
        return
    who, bound = framework if framework in SCORED else OTHERS, said(risk, framework)
    yield (
        f"the risk of running out is not said nearer to {risk > 0.5:d} than {bound:.0%}: of such answers "
        f"to public cases of {who} {side.right} of {side.of} were right; asked for are 95 % of {LEAST}"
    )
