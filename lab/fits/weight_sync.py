"""Fit of the coefficients of weight syncs, each source left out once (`python -m lab.fits.weight_sync`).

`lab.fits.leave_one_out` writes them without one publisher at a time for the errors of `lab.scoreboard`.

Maximum a posteriori in logarithms: every coefficient starts at its prior, with the width of its interval
(P10 to P90); a framework may differ from the pooled value by a factor whose logarithm has deviation 1.
Residuals are robust (soft l1), so that rows with a mechanism that the paths do not have cannot bend it; every
source has the same total weight.

Prints the error of rows whose source gave nothing, and the values that all sources together give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import least_squares

from lab.scoreboard.rows import rows_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.device import Device
from rlhfsim.specs.frameworks.costs import pooled
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.kinds.weight_sync import KIND, SyncCase, case_of, framework_of, kind_of
from rlhfsim.validation.rows import Row

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

    case: SyncCase
    source: str
    framework: str | None


def data() -> list[Datum]:
    """All rows that can be predicted; layouts of one publication share a source."""
    return [datum(row) for row in fit_rows()]


def fit_rows() -> list[Row]:
    """The rows of a transfer or a refit that can be predicted, blanks filled."""
    rows = (apply(KIND, row)[0] for row in rows_of(KIND))
    return [row for row in rows if kind_of(row) == KIND and _case(row)]


def datum(row: Row) -> Datum:
    """A row of `fit_rows`."""
    case = _case(row)
    assert case is not None
    return Datum(case=case, source=page(row), framework=framework_of(row))


def _case(row: Row) -> SyncCase | None:
    try:
        return case_of(row)
    except RlhfsimError:
        return None


def page(row: Row) -> str:
    """The page or thread, without section, table and commit; the two reshard threads are one author's feature."""
    source = row.text("source") or ""
    found = source.split(" \u00a7")[0].split(" (")[0]
    return "NVIDIA-NeMo/RL reshard" if found.endswith(("#2808", "#2971")) else found


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


def coefficients(rows: Sequence[Row]) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient from the rows given, as `name` pooled and as `name@framework`."""
    theta, covariance = posterior([datum(row) for row in rows])
    names, found = _names(), {}
    for framework in (None, *FRAMEWORKS):
        for name in SHARED if framework is None else OWN:
            parts = [names.index((None, name))] + ([names.index((framework, name))] if framework else [])
            middle = float(theta[parts].sum())
            deviation = math.sqrt(float(covariance[np.ix_(parts, parts)].sum()))
            low, value, high = (math.exp(middle + z * deviation) for z in (-P90, 0.0, P90))
            key = f"{name}@{framework}" if framework else name
            found[key] = Coefficient(value=value, low=low, high=high, source="fitted (lab.fits.weight_sync)")
    return found


def fit(rows: Sequence[Datum]) -> np.ndarray:
    """Logarithms of the values that explain the rows best."""
    return posterior(rows)[0]


def posterior(rows: Sequence[Datum]) -> tuple[np.ndarray, np.ndarray]:
    """The same with their covariance."""
    start, width = _prior()
    count = Counter(d.source for d in rows)
    weighted = [(math.sqrt(len(rows) / len(count) / count[d.source]), d) for d in rows]

    def residuals(z: np.ndarray) -> np.ndarray:
        theta = start + z * width
        _tuned.cache_clear()
        missed = [w * math.log(predicted(d, theta) / d.case.measured) / NOISE for w, d in weighted]
        robust = [math.copysign(math.sqrt(2 * (math.sqrt(1 + r * r) - 1)), r) for r in missed]
        return np.array([*robust, *z])

    found = least_squares(residuals, np.zeros(len(start)), diff_step=0.05, max_nfev=8)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * np.outer(width, width)
    return np.asarray(start + found.x * width), np.asarray(covariance)


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
