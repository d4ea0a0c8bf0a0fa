"""Intervals of published rows: that of a user's plan, and one that knows nothing of the row's publisher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from lab.scoreboard.discrepancy import Residuals, base_of, runs_of, unseen
from lab.scoreboard.group_law import law_of
from rlhfsim.step.measured import FAR, nearest
from rlhfsim.validation.intervals import Interval, Law, interval, is_widened, own_interval, shipped_laws
from rlhfsim.validation.outcome import Outcome, publisher

GROUPED = ("training", "rlhf.step")
"""Kinds whose intervals are centred and widened by group."""


def estimated(kind: str, rows: Residuals) -> Law:
    """The law of a kind from rows that were predicted without their publisher."""
    return law_of(rows) if kind in GROUPED else (base_of(rows), None)


def with_intervals(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with the model's discrepancy and the groups of the row in their intervals.

    P10 to P90 is that of a user's plan; P10 to P90 of the blind prediction knows no row of the publisher.
    """
    shipped = shipped_laws()
    rows = {kind: unseen(outcomes, kind) for kind in shipped}
    runs = runs_of(outcomes)

    @cache
    def without(kind: str, name: str) -> Law:
        return estimated(kind, rows[kind].without(name))

    def its(o: Outcome) -> Outcome:
        if not is_widened(o, shipped):
            return o
        assert o.conditions is not None
        name = publisher(o.source)
        near = nearest(o.conditions, [run for run in runs if publisher(run.source) != name])
        own = interval(own_interval(o), o.conditions, shipped[o.kind], 0.0)
        away = near.distance if near else FAR
        return _with(o, own, interval(_blind(o), o.conditions, without(o.kind, name), away))

    return [its(o) for o in outcomes]


def _blind(o: Outcome) -> Interval:
    """What fits without the publisher say; the prediction itself where no fit read its rows."""
    low, value, high = own_interval(o)
    if o.blind is None:
        return low, value, high
    if o.blind_low and o.blind_high:
        low, high = o.blind_low, o.blind_high
    return low, o.blind, high


def _with(o: Outcome, own: Interval, blind: Interval) -> Outcome:
    """Both intervals of one outcome; the blind prediction itself stays where its own interval has it."""
    low, median, high = own
    return replace(
        o,
        low=low,
        median=median,
        high=high,
        blind=o.predicted if o.blind is None else o.blind,
        blind_low=blind[0],
        blind_median=blind[1],
        blind_high=blind[2],
    )
