"""How far off the model is beside what its coefficients say: by kind, from publishers that were left out.

    r_i = ln(measured / predicted), predicted without a row of the publisher in any fit
    v_i = variance of ln of that prediction's own interval, on the side of r_i
    d_i = distance to the nearest run of another publisher
    x_i = sqrt(max(0, (r_i / z_90)^2 - v_i) / (1 + d_i^2))        the base that row i asks for
    base = 80 % quantile of the x_i, times t_k / z_90             for k publishers

80 % of the r_i then lie inside +- z_90 sqrt(v_i + base^2 (1 + d_i^2)). No mean is taken off the r_i, so that
k publishers leave k degrees of freedom. The quantile is interpolated between rows (Hazen 1914, Trans. ASCE
77, 1539): the smallest base that holds 80 % of a few rows holds more than 80 % of others.

A row counts 1 / sqrt(n) where its publisher has n, so that no large table decides alone. The interval of a
row is made of the base of all other publishers; that of a user's plan of all (`common.yaml`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.profiles import common_coefficients
from rlhfsim.step.measured import COEFFICIENTS, FAR, MeasuredRun, measured_runs, nearest, spread, widened
from rlhfsim.validation.left_out import publisher
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.statistics import blind

Floats = NDArray[np.float64]
INSIDE = 0.8
"""Share of the true values that P10 to P90 holds."""
MOST = 2.0
"""A spread of ln above this is no law."""
T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""P90 of Student's t with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Rows of one kind as the law sees them, (n,) each."""

    error: Floats
    """ln(measured / predicted)."""
    variance: Floats
    """Of the prediction's own interval, in ln, on the side of the error."""
    distance: Floats
    publisher: tuple[str, ...]

    def without(self, name: str) -> Residuals:
        """Those of other publishers."""
        keep = np.array([p != name for p in self.publisher], dtype=bool)
        return Residuals(
            error=self.error[keep],
            variance=self.variance[keep],
            distance=self.distance[keep],
            publisher=tuple(p for p in self.publisher if p != name),
        )

    @property
    def publishers(self) -> int:
        """How many."""
        return len(set(self.publisher))

    @property
    def weights(self) -> Floats:
        """1 / sqrt(rows of the publisher), summing to 1."""
        count = Counter(self.publisher)
        raw = np.array([1 / math.sqrt(count[p]) for p in self.publisher])
        return np.asarray(raw / raw.sum(), dtype=np.float64)


def base_of(rows: Residuals) -> float:
    """Standard deviation of ln(true / predicted) next to a measured run, beside what the coefficients say."""
    k = rows.publishers
    if k < 2:
        return MOST
    asked = np.sqrt(np.maximum(0.0, (rows.error / Z90) ** 2 - rows.variance) / (1 + rows.distance**2))
    order, weights = np.argsort(asked), rows.weights
    middle = np.cumsum(weights[order]) - weights[order] / 2
    base = float(np.interp(INSIDE, middle, asked[order]))
    return min(MOST, base * T90[min(k, len(T90)) - 1] / Z90)


def unseen(outcomes: Iterable[Outcome], kind: str) -> Residuals:
    """Rows of one kind predicted with no row of their publisher in any fit."""
    rows = [o for o in blind(outcomes) if o.kind == kind and o.measured and o.predicted and o.conditions]
    runs = [_run(o) for o in rows]
    return Residuals(
        error=np.array([math.log((o.measured or 1) / (o.predicted or 1)) for o in rows]),
        variance=np.array([_variance(o) for o in rows]),
        distance=np.array([_away(run, runs) for run in runs]),
        publisher=tuple(publisher(o.source) for o in rows),
    )


def runs_of(outcomes: Iterable[Outcome]) -> list[MeasuredRun]:
    """The measured runs that a user's question is compared with."""
    rows = [o for o in blind(outcomes) if o.conditions and o.measured and o.predicted]
    return [_run(o) for o in rows]


def _run(o: Outcome) -> MeasuredRun:
    assert o.conditions is not None
    assert o.error is not None
    return MeasuredRun(conditions=o.conditions, release=o.release, error=o.error, source=o.source)


def _variance(o: Outcome) -> float:
    """Of the side on which the measured value lies: intervals of costs are longer above than below."""
    if not o.low or not o.high or not o.predicted or o.low <= 0:
        return 0.0
    side = o.high / o.predicted if (o.measured or 0.0) > o.predicted else o.predicted / o.low
    return (max(0.0, math.log(side)) / Z90) ** 2


def _away(run: MeasuredRun, runs: Sequence[MeasuredRun]) -> float:
    """Distance to the nearest run of another publisher."""
    own = publisher(run.source)
    found = nearest(run.conditions, [r for r in runs if publisher(r.source) != own])
    return found.distance if found else FAR


def with_intervals(outcomes: Sequence[Outcome], *, own_rows: bool = False) -> list[Outcome]:
    """The outcomes with the model's discrepancy in their intervals.

    P10 to P90 is that of a user's plan; P10 to P90 of the blind prediction knows no row of the publisher. A
    user's own rows are in no fit and no law, so they have the user's in both.
    """
    common = common_coefficients()
    shipped = {kind: common[name].value for kind, name in COEFFICIENTS.items()}
    rows = {} if own_rows else {kind: unseen(outcomes, kind) for kind in shipped}
    runs = measured_runs() if own_rows else runs_of(outcomes)
    bases: dict[tuple[str, str], float] = {}
    found = []
    for o in outcomes:
        if o.kind not in shipped or o.predicted is None or o.conditions is None:
            found.append(o)
            continue
        name = publisher(o.source)
        if (o.kind, name) not in bases:
            bases[o.kind, name] = shipped[o.kind] if own_rows else base_of(rows[o.kind].without(name))
        near = nearest(o.conditions, [r for r in runs if publisher(r.source) != name])
        away = near.distance if near else FAR
        mine = spread(shipped[o.kind], away if own_rows else 0.0)
        found.append(_wider(o, mine, spread(bases[o.kind, name], away)))
    return found


def _wider(o: Outcome, mine: float, its: float) -> Outcome:
    """Both intervals of one outcome: the user's, and that which knows nothing of the publisher."""
    assert o.predicted is not None
    value, low, high = o.predicted, o.low, o.high
    if low is None or high is None:
        low = high = value
    blind_value = value if o.blind is None else o.blind
    blind_low, blind_high = (
        (o.blind_low, o.blind_high) if o.blind is not None and o.blind_low and o.blind_high else (low, high)
    )
    own = widened(value, low, high, Z90 * mine)
    other = widened(blind_value, blind_low, blind_high, Z90 * its)
    return replace(o, low=own[0], high=own[1], blind=blind_value, blind_low=other[0], blind_high=other[1])
