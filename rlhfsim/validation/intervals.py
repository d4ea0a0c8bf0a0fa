"""Intervals of scored rows: that of a user's plan, and one that knows nothing of the row's publisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.profiles import common_coefficients
from rlhfsim.step.groups import GroupLaw, laws
from rlhfsim.step.measured import COEFFICIENTS, FAR, Conditions, measured_runs, nearest, spread, widened
from rlhfsim.validation.discrepancy import Residuals, base_of, runs_of, unseen
from rlhfsim.validation.group_law import law_of
from rlhfsim.validation.left_out import publisher
from rlhfsim.validation.outcome import Outcome

GROUPED = ("training", "rlhf.step")
"""Kinds whose intervals are centred and widened by group."""
Law = tuple[float, GroupLaw | None]
"""The discrepancy next to a measured run, and what groups add."""


def estimated(kind: str, rows: Residuals) -> Law:
    """The law of a kind from rows that were predicted without their publisher."""
    return law_of(rows) if kind in GROUPED else (base_of(rows), None)


def with_intervals(outcomes: Sequence[Outcome], *, own_rows: bool = False) -> list[Outcome]:
    """The outcomes with the model's discrepancy and the groups of the row in their intervals.

    P10 to P90 is that of a user's plan; P10 to P90 of the blind prediction knows no row of the publisher. A
    user's own rows are in no fit and no law, so they have the user's in both.
    """
    shipped = _shipped()
    rows = {} if own_rows else {kind: unseen(outcomes, kind) for kind in shipped}
    runs = measured_runs() if own_rows else runs_of(outcomes)

    @cache
    def without(kind: str, name: str) -> Law:
        return shipped[kind] if own_rows else estimated(kind, rows[kind].without(name))

    def its(o: Outcome) -> Outcome:
        if o.kind not in shipped or o.predicted is None or o.conditions is None:
            return o
        name = publisher(o.source)
        near = nearest(o.conditions, [r for r in runs if publisher(r.source) != name])
        away = near.distance if near else FAR
        own = _interval(o.conditions, shipped[o.kind], away if own_rows else 0.0)
        return _with(o, own, _interval(o.conditions, without(o.kind, name), away))

    return [its(o) for o in outcomes]


def _shipped() -> dict[str, Law]:
    common = common_coefficients()
    return {kind: (common[name].value, laws().get(kind)) for kind, name in COEFFICIENTS.items()}


Interval = Callable[[float, float, float], tuple[float, float, float]]
"""P10, P50 and P90 of a prediction from its value and the ends that its coefficients give."""


def _interval(conditions: Conditions, law: Law, away: float) -> Interval:
    base, groups = law

    def interval(value: float, low: float, high: float) -> tuple[float, float, float]:
        low, high = widened(value, low, high, Z90 * spread(base, away))
        return groups.quantiles(value, low, high, conditions) if groups else (low, value, high)

    return interval


def _with(o: Outcome, own: Interval, other: Interval) -> Outcome:
    """Both intervals of one outcome: the user's, and that which knows nothing of the publisher."""
    assert o.predicted is not None
    value, low, high = o.predicted, o.low, o.high
    if low is None or high is None:
        low = high = value
    unseen_value, unseen_low, unseen_high = value, low, high
    if o.blind is not None:
        unseen_value = o.blind
        if o.blind_low and o.blind_high:
            unseen_low, unseen_high = o.blind_low, o.blind_high
    mine, blind = own(value, low, high), other(unseen_value, unseen_low, unseen_high)
    return replace(
        o,
        low=mine[0],
        median=mine[1],
        high=mine[2],
        blind=unseen_value,
        blind_low=blind[0],
        blind_median=blind[1],
        blind_high=blind[2],
    )
