"""Fit of the engine coefficients of decode on the even rows of the measured serving points.

    python -m lab.fits.decode            prints the lines for hardware_profiles/common.yaml

Four numbers an engine (step, sequence and prefill overheads, prefill interference) and one per layer
for all; no constant of a model or of a GPU. The residual is log(predicted / measured), soft-L1, every
combination of model, system and engine with the same weight up to the root of its rows; a weak
prior keeps what the rows do not decide. Odd rows are never read here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from lab.decode.load import left_out, terms
from lab.decode.points import ENGINES, Serving, servings, skip_reason
from lab.decode.serving import Terms, output_time
from rlhfsim.rollout.decode import Engine
from rlhfsim.units import MICROSECOND, MILLISECOND

Floats = NDArray[np.float64]
SHARED = ("decode_layer_overhead",)
NAMES = ("decode_step_overhead", "decode_sequence_overhead", "prefill_interference", "prefill_overhead")
START = np.array([5 * MICROSECOND] + [0.8 * MILLISECOND, 4 * MICROSECOND, 1.0, 2 * MILLISECOND] * 3)
LOW = np.array([0.0] + [0.0, 0.0, 0.3, 0.0] * 3)
HIGH = np.array([60 * MICROSECOND] + [8 * MILLISECOND, 50 * MICROSECOND, 1.5, 30 * MILLISECOND] * 3)
PRIOR_WEIGHT, LOSS_SCALE, ROW_WEIGHT = 0.02, 0.3, 5.0
LEFT_OUT = {"gb200"}
"""Systems whose even rows are not fitted: 15 rows of one sweep, 3 to 7 times slower than one HBM
pass over the weights; they are shown, not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of the fit."""

    values: Floats
    sigma: Floats
    """One standard deviation from the Jacobian and the residuals."""
    rows: dict[Engine, int]
    """Rows per engine."""
    median_error: float


def chosen(points: Sequence[Serving]) -> list[Serving]:
    """Even rows that can be predicted and do not contradict physics or each other."""
    excluded = left_out(points)
    return [
        p
        for p in points
        if p.fitted and skip_reason(p) is None and p.id not in excluded and p.system not in LEFT_OUT
    ]


def fit(points: Sequence[Serving]) -> Fit:
    """Robust least squares on log time."""
    least_squares = import_module("scipy.optimize").least_squares
    known = [terms(p) for p in points]
    engines = np.array([ENGINES.index(p.engine) for p in points])
    measured = np.array([p.tpot for p in points])
    count = Counter((p.model, p.system, p.engine) for p in points)
    weight = ROW_WEIGHT / np.sqrt([count[p.model, p.system, p.engine] for p in points])

    def residuals(x: Floats) -> Floats:
        ratio = np.log(_times(known, engines, x) / measured)
        prior = PRIOR_WEIGHT * np.log(np.maximum(x, 1e-9) / START)
        return np.concatenate([ratio * weight, prior])

    found = least_squares(
        residuals, START, bounds=(LOW, HIGH), loss="soft_l1", f_scale=LOSS_SCALE, x_scale=START
    )
    error = np.abs(_times(known, engines, found.x) / measured - 1)
    spread = float(np.sum(found.fun[: len(points)] ** 2)) / max(1, len(points) - len(START))
    covariance = np.linalg.pinv(found.jac.T @ found.jac) * spread
    rows = {engine: int(np.sum(engines == i)) for i, engine in enumerate(ENGINES)}
    return Fit(
        values=found.x, sigma=np.sqrt(np.diag(covariance)), rows=rows, median_error=float(np.median(error))
    )


def _times(known: Sequence[Terms], engines: NDArray[np.int64], x: Floats) -> Floats:
    own = x[1:].reshape(3, 4)[engines]
    return np.array(
        [
            output_time(t, layer=x[0], step=o[0], sequence=o[1], interference=o[2], overhead=o[3])
            for t, o in zip(known, own, strict=True)
        ]
    )


def lines(result: Fit) -> list[str]:
    """YAML lines: value, P10 and P90 (1.28 sigma), source."""
    names = [*SHARED, *(f"{name}_{engine}" for engine in ENGINES for name in NAMES)]
    total = sum(result.rows.values())
    out = []
    for i, name in enumerate(names):
        engine: Engine | None = next((e for e in ENGINES if name.endswith(e)), None)
        rows = result.rows[engine] if engine else total
        value, half = float(result.values[i]), 1.28 * float(result.sigma[i])
        low, high = max(0.0, value - half), value + half
        shown = [
            f"{v:.3f}" if "interference" in name else f"{_significant(v / MICROSECOND)} us"
            for v in (value, low, high)
        ]
        out.append(
            f'  {name}: {{value: {shown[0]}, low: {shown[1]}, high: {shown[2]}, source: "fitted on {rows} even rows of silicon_sample.csv in aiconfigurator-core 0.12.0 (lab.fits.decode)"}}'
        )
    return out


def _significant(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 6)}f}"


def main() -> None:
    """Print the lines and the error on the fitted rows."""
    import sys

    result = fit(chosen(servings()))
    sys.stdout.write(
        "\n".join(lines(result)) + f"\n# median error on fitted rows {result.median_error:.3f}\n"
    )


if __name__ == "__main__":
    main()
