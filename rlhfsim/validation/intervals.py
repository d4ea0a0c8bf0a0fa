"""Intervals of a user's rows: those of a plan, with the model's discrepancy and the groups of the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.profiles import common_coefficients
from rlhfsim.step.groups import GroupLaw, laws
from rlhfsim.step.measured import COEFFICIENTS, FAR, Conditions, measured_runs, nearest, spread, widened
from rlhfsim.validation.outcome import Outcome, publisher

Law = tuple[float, GroupLaw | None]
"""The discrepancy next to a measured run, and what groups add."""
Interval = tuple[float, float, float]
"""P10, P50 and P90 of a prediction."""


def with_intervals(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of a user's rows with the intervals of their plans: the rows are in no fit and no law."""
    shipped = shipped_laws()
    return [_widened(o, shipped[o.kind]) if is_widened(o, shipped) else o for o in outcomes]


def shipped_laws() -> dict[str, Law]:
    """The law of every kind that has one, as a user's plan has it."""
    common = common_coefficients()
    return {kind: (common[name].value, laws().get(kind)) for kind, name in COEFFICIENTS.items()}


def is_widened(o: Outcome, known: dict[str, Law]) -> bool:
    """Whether a law adds to the interval of an outcome."""
    return o.kind in known and o.predicted is not None and o.conditions is not None


def _widened(o: Outcome, law: Law) -> Outcome:
    assert o.conditions is not None
    name = publisher(o.source)
    near = nearest(o.conditions, [run for run in measured_runs() if publisher(run.source) != name])
    low, median, high = interval(own_interval(o), o.conditions, law, near.distance if near else FAR)
    return replace(o, low=low, median=median, high=high)


def own_interval(o: Outcome) -> Interval:
    """The prediction between the ends that its coefficients give."""
    assert o.predicted is not None
    if o.low is None or o.high is None:
        return (o.predicted,) * 3
    return o.low, o.predicted, o.high


def interval(own: Interval, conditions: Conditions, law: Law, away: float) -> Interval:
    """P10, P50 and P90 of a prediction `away` from the nearest measured run, from its `own` interval."""
    low, value, high = own
    base, groups = law
    low, high = widened(value, low, high, Z90 * spread(base, away))
    return groups.quantiles(value, low, high, conditions) if groups else (low, value, high)
