"""Fit of `certainty.USERS_SPREAD`: how far peaks of users' runs lie from the ledger.

    python -m lab.fits.oom          prints value and interval, and the Brier scores of both halves

    maximise   sum of ln p (ran out of memory) + sum of ln (1 - p) (worked),   p = ledger.risk(spread)

over the fitted half of the public cases alone; the interval is where the likelihood falls by z_90^2 / 2.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from lab.scoreboard.rows import rows_of
from rlhfsim.kernels.cost import Z90
from rlhfsim.memory.ledger import Ledger
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.cases.oom_settings import FITTED, HELD_OUT, half
from rlhfsim.validation.kinds.oom import OUTCOME, excluded, memory_of
from rlhfsim.validation.outcome import Skip

BOUNDS = (0.05, 1.0)
SUREST = 1e-6
"""No answer counts as surer than this: one case must not decide the fit."""


class Case(NamedTuple):
    """A public case."""

    memory: Ledger
    ran_out: bool


def cases() -> dict[str, list[Case]]:
    """The cases of both halves."""
    found: dict[str, list[Case]] = {FITTED: [], HELD_OUT: []}
    for row in rows_of("oom_cases"):
        if excluded(row) is None:
            with suppress(Skip):
                memory = memory_of(row, apply("oom", row)[0])
                found[half(row)].append(Case(memory, OUTCOME[row.text("kind") or ""] > 0))
    return found


def risks(of: list[Case], spread: float) -> np.ndarray:
    """Probabilities of what did not happen."""
    return np.array([abs(case.ran_out - case.memory.risk(spread)) for case in of])


def loss(of: list[Case], spread: float) -> float:
    """Minus the log-likelihood."""
    return -float(np.log(np.maximum(SUREST, 1 - risks(of, spread))).sum())


def brier(of: list[Case], spread: float) -> float:
    """Mean squared error of the probabilities."""
    return float((risks(of, spread) ** 2).mean())


def fitted(of: list[Case]) -> tuple[float, float, float]:
    """Value, P10 and P90."""
    best = float(minimize_scalar(lambda x: loss(of, x), bounds=BOUNDS, method="bounded").x)
    least = loss(of, best) + Z90**2 / 2
    low, high = (brentq(lambda x: loss(of, x) - least, *sorted((best, end))) for end in BOUNDS)
    return best, float(low), float(high)


if __name__ == "__main__":
    both = cases()
    value, low, high = fitted(both[FITTED])
    print(f"USERS_SPREAD = {value:.2f}  # {low:.2f} to {high:.2f}")
    for name, of in both.items():
        print(f"{name}: Brier {brier(of, 0.0):.3f} without, {brier(of, value):.3f} with it")
