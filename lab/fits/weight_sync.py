"""Fit of the coefficients of weight syncs, each source left out once (`python -m lab.fits.weight_sync`).

Maximum a posteriori in logarithms: every coefficient starts at its prior, with the width of its interval
(P10 to P90); a framework may differ from the pooled value by a factor whose logarithm has deviation 1.
Residuals are robust (soft l1), so that rows with a mechanism that the paths do not have cannot bend it.

Prints the error of rows whose source gave nothing, and the values that all sources together give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import least_squares

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.costs import pooled
from rlhfsim.kernels.device import Device
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.kinds.weight_sync import KIND, Case, case_of, framework_of
from rlhfsim.validation.rows import shipped

SHARED = (
    "sync_gather_latency",
    "sync_unshard_latency",
    "sync_far_latency",
    "sync_network_efficiency",
    "sync_load_latency",
    "sync_scan_latency",
    "sync_quantise_latency",
    "sync_staging_time",
)
OWN = ("sync_gather_latency", "sync_unshard_latency", "sync_far_latency", "sync_staging_time")
"""Coefficients in which a framework may differ."""
FRAMEWORKS = ("nemo-rl", "verl")
P90 = 1.2816
OWN_DEVIATION, NOISE = 1.0, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A row, its source and its framework."""

    case: Case
    source: str
    framework: str | None


def data() -> list[Datum]:
    """All rows that can be predicted; layouts of one publication share a source."""
    rows = []
    for row in shipped(KIND):
        filled, _ = apply(KIND, row)
        try:
            case = case_of(filled)
        except RlhfsimError:
            continue
        rows.append(
            Datum(case=case, source=_publication(row.text("source") or ""), framework=framework_of(filled))
        )
    return rows


def _publication(source: str) -> str:
    """The page or thread, without section, table and commit; the two reshard threads are one author's feature."""
    page = source.split(" \u00a7")[0].split(" (")[0]
    return "NVIDIA-NeMo/RL reshard" if page.endswith(("#2808", "#2971")) else page


def _names() -> list[tuple[str | None, str]]:
    return [(None, n) for n in SHARED] + [(f, n) for f in FRAMEWORKS for n in OWN]


def _prior() -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the start values, and their deviations."""
    start, width = [], []
    for framework, name in _names():
        c = pooled()[name]
        start.append(math.log(c.value) if framework is None else 0.0)
        width.append((math.log(c.high) - math.log(c.low)) / 2 / P90 if framework is None else OWN_DEVIATION)
    return np.array(start), np.array(width)


def values(theta: np.ndarray, framework: str | None) -> Mapping[str, float]:
    """Coefficients of a framework."""
    given = dict(zip(_names(), theta, strict=True))
    own = {n: given[framework, n] for n in OWN} if framework in FRAMEWORKS else {}
    return {n: math.exp(given[None, n] + own.get(n, 0.0)) for n in SHARED}


@cache
def _tuned(device: Device, given: tuple[tuple[str, float], ...]) -> Device:
    known = dict(device.profile.coefficients)
    known |= {n: replace(known[n], value=v, low=v, high=v) for n, v in given}
    return replace(device, profile=replace(device.profile, coefficients=known))


def predicted(datum: Datum, theta: np.ndarray) -> float:
    """Seconds of a row."""
    given = tuple(values(theta, datum.framework).items())
    ends = datum.case.ends
    tuned = replace(ends, source=_tuned(ends.source, given), target=_tuned(ends.target, given))
    return datum.case.cost(tuned).seconds


def fit(rows: Sequence[Datum]) -> np.ndarray:
    """Logarithms of the values that explain the rows best."""
    start, width = _prior()

    def residuals(z: np.ndarray) -> np.ndarray:
        theta = start + z * width
        _tuned.cache_clear()
        missed = [math.log(predicted(d, theta) / d.case.measured) / NOISE for d in rows]
        robust = [math.copysign(math.sqrt(2 * (math.sqrt(1 + r * r) - 1)), r) for r in missed]
        return np.array([*robust, *z])

    found = least_squares(residuals, np.zeros(len(start)), diff_step=0.05, max_nfev=8)
    return np.asarray(start + found.x * width)


def main() -> None:
    """Print the errors of left-out sources and the fit of all."""
    rows = data()
    ratios = []
    for source in sorted({d.source for d in rows}):
        theta = fit([d for d in rows if d.source != source])
        for d in (d for d in rows if d.source == source):
            ratio = predicted(d, theta) / d.case.measured
            ratios.append(ratio)
            print(f"{ratio:6.2f}  {d.case.measured:7.2f} s  line {d.case.row.line:3d}  {source}")
    off = [abs(math.log(r)) for r in ratios]
    print(
        f"{len(ratios)} rows, source left out: {np.mean([o <= math.log(1.5) for o in off]):.0%} within 1.5, ",
        end="",
    )
    print(f"median error {np.median([abs(r - 1) for r in ratios]):.1%}, bias {np.median(ratios) - 1:+.1%}")
    theta = fit(rows)
    for framework in (None, *FRAMEWORKS):
        print(framework or "pooled", {n: f"{v:.3g}" for n, v in values(theta, framework).items()})


if __name__ == "__main__":
    main()
