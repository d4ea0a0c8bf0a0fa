"""How far off the model is beside what its coefficients say: by kind, from publishers that were left out.

    r_i = ln(measured / predicted), predicted without a row of the publisher in any fit
    e_i = r_i less the centre of its groups (`group_law`); r_i itself for memory
    v_i = variance of ln of that prediction's own interval, on the side of e_i
    d_i = distance to the nearest run of another publisher
    x_i = sqrt(max(0, (e_i / z_90)^2 - v_i) / (1 + d_i^2))        the base that row i asks for
    base = 80 % quantile of the x_i

80 % of the e_i then lie inside +- z_90 sqrt(v_i + base^2 (1 + d_i^2)). The quantile is interpolated between
rows (Hazen 1914, Trans. ASCE 77, 1539). What few publishers leave open is in the widths of groups.

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

from lab.scoreboard.blind import blind
from rlhfsim.kernels.cost import Z90
from rlhfsim.step.groups import Group, groups_of
from rlhfsim.step.measured import FAR, MeasuredRun, nearest
from rlhfsim.validation.outcome import Outcome, publisher

Floats = NDArray[np.float64]
INSIDE = 0.8
"""Share of the true values that P10 to P90 holds."""
MOST = 2.0
"""A spread of ln above this is no law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Rows of one kind as the law sees them, (n,) each."""

    error: Floats
    """ln(measured / predicted)."""
    down: Floats
    """Standard deviation of the prediction's own interval below it, ln."""
    up: Floats
    """The same above it."""
    distance: Floats
    publisher: tuple[str, ...]
    groups: tuple[tuple[Group, ...], ...] = ()
    """Groups of each row, from wide to narrow."""

    @property
    def variance(self) -> Floats:
        """Variance of the own interval on the side of the error: costs have longer intervals above than below."""
        return np.asarray(np.where(self.error > 0, self.up, self.down) ** 2, dtype=np.float64)

    def at(self, rows: NDArray[np.bool_]) -> Residuals:
        """Some of the rows."""
        kept = np.flatnonzero(rows)
        return Residuals(
            error=self.error[kept],
            down=self.down[kept],
            up=self.up[kept],
            distance=self.distance[kept],
            publisher=tuple(self.publisher[i] for i in kept),
            groups=tuple(self.groups[i] for i in kept) if self.groups else (),
        )

    def has(self, group: Group) -> NDArray[np.bool_]:
        """(n,) whether a row is of the group."""
        return np.array([group in groups for groups in self.groups], dtype=bool)

    def without(self, name: str) -> Residuals:
        """Those of other publishers."""
        return self.at(np.array([p != name for p in self.publisher], dtype=bool))

    def around(self, centre: Floats) -> Residuals:
        """The same with the errors around a centre."""
        return replace(self, error=self.error - centre)

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
    if rows.publishers < 2:
        return MOST
    asked = np.sqrt(np.maximum(0.0, (rows.error / Z90) ** 2 - rows.variance) / (1 + rows.distance**2))
    return min(MOST, weighted_quantile(asked, rows.weights, INSIDE))


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The value below which this share of the weight lies, interpolated between rows."""
    order = np.argsort(values, kind="stable")
    middle = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share, middle / weights.sum(), values[order]))


def unseen(outcomes: Iterable[Outcome], kind: str) -> Residuals:
    """Rows of one kind predicted with no row of their publisher in any fit."""
    rows = [o for o in blind(outcomes) if o.kind == kind and o.measured and o.predicted and o.conditions]
    runs = [_run(o) for o in rows]
    return Residuals(
        error=np.array([math.log((o.measured or 1) / (o.predicted or 1)) for o in rows]),
        down=np.array([_side(o.predicted, o.low) for o in rows]),
        up=np.array([_side(o.high, o.predicted) for o in rows]),
        distance=np.array([_away(run, runs) for run in runs]),
        publisher=tuple(publisher(o.source) for o in rows),
        groups=tuple(groups_of(run.conditions) for run in runs),
    )


def runs_of(outcomes: Iterable[Outcome]) -> list[MeasuredRun]:
    """The measured runs that a user's question is compared with."""
    rows = [o for o in blind(outcomes) if o.conditions and o.measured and o.predicted]
    return [_run(o) for o in rows]


def _run(o: Outcome) -> MeasuredRun:
    assert o.conditions is not None
    assert o.error is not None
    return MeasuredRun(conditions=o.conditions, release=o.release, error=o.error, source=o.source)


def _side(above: float | None, below: float | None) -> float:
    """Standard deviation of one side of an interval, ln."""
    return max(0.0, math.log(above / below)) / Z90 if above and below and below > 0 else 0.0


def _away(run: MeasuredRun, runs: Sequence[MeasuredRun]) -> float:
    """Distance to the nearest run of another publisher."""
    own = publisher(run.source)
    found = nearest(run.conditions, [r for r in runs if publisher(r.source) != own])
    return found.distance if found else FAR
