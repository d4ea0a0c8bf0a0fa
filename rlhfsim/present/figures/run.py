"""Figures of a run next to its plan: the step on a time axis, and its phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from rlhfsim.calibration.comparison.phases import Comparison, PhaseComparison
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.calibration.observation import step_windows
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.figures.iteration import role_of
from rlhfsim.present.html import plots
from rlhfsim.present.tables import COUNT, ENDS, FIGURE, NUMBER, RATIO, added, compact, rounded
from rlhfsim.trace import WAIT

LABELLED = 0.08
"""Share of the axis from which a bar carries its name."""
SMALL = 0.01
"""Share of the step below which a phase says nothing about the prediction."""
PREDICTED, MEASURED = ("blue", "/"), ("red", "")
"""Colours of the two sides wherever both are drawn."""
SIDES = {"predicted": PREDICTED, "measured": MEASURED}


SECONDS_OF_PHASES = (
    Column("phase", "name"),
    Column("predicted", "predicted_s", NUMBER),
    Column("P10-P90", lambda r: (r.low_s, r.high_s), ENDS),
    Column("measured", "measured_s", NUMBER),
)


class TimedCall(NamedTuple):
    """A call on the time axis, predicted or measured."""

    side: str
    name: str
    where: str
    start_s: float
    seconds: float

    @property
    def row(self) -> str:
        """Its row."""
        return f"{role_of(self.name)}, {self.side}"


# --- the step on a time axis ------------------------------------------------------------------------


def typical_step(answer: SideBySide) -> int:
    """The counted step whose time is nearest to the median."""
    times = dict(zip(answer.run.counted, answer.run.step_s, strict=True))
    middle = median(times.values())
    return min(times, key=lambda step: (abs(times[step] - middle), step))


def both(answer: SideBySide) -> tuple[TimedCall, ...]:
    """Predicted calls, and those of the typical measured step."""
    step = typical_step(answer)
    begin = step_windows(answer.trace)[step][0]
    predicted = [
        TimedCall(side="predicted", name=p.name, where=p.pool, start_s=p.start_s, seconds=p.seconds)
        for p in answer.plan.prediction.phases
    ]
    measured = [
        TimedCall(
            side="measured",
            name=s.name,
            where=f"{s.pool}, {s.group}",
            start_s=s.start_s - begin,
            seconds=s.seconds,
        )
        for s in answer.trace.spans
        if s.step == step and s.kind != WAIT
    ]
    return (*predicted, *measured)


def timeline(answer: SideBySide) -> Figure:
    """Predicted and measured calls, in neighbouring rows."""
    calls = both(answer)
    end = max(c.start_s + c.seconds for c in calls)
    by_side = {side: [c for c in calls if c.side == side] for side in SIDES}
    present = {c.row for c in calls}
    rows = [f"{role}, {side}" for role in dict.fromkeys(role_of(c.name) for c in calls) for side in SIDES]
    layout = plots.rows(
        [row for row in rows if row in present],
        f"seconds from the start of the step (measured: step {typical_step(answer)})",
        each=32,
        barmode="overlay",
        xaxis={"range": [0, rounded(end * 1.01)], "fixedrange": False},
        dragmode="pan",
    )
    return Figure(
        "timeline",
        findings.sides(_totals(by_side["predicted"]), _totals(by_side["measured"])),
        alt="Bars on a time axis, a predicted and a measured row for each role, from 0 to "
        + words.seconds(end),
        how="The predicted step above the measured step that is nearest to the median. Gaps between measured"
        " bars are time in which no call of that role ran.",
        plot=plots.spec([_bars(side, by_side[side], end) for side in SIDES], layout),
        table=table_of(
            "Calls of the step",
            calls,
            Column("call", "name"),
            Column("side"),
            Column("where"),
            Column("starts at (s)", "start_s", FIGURE),
            Column("takes (s)", "seconds", FIGURE),
        ),
        zoom=True,
    )


def _totals(calls: Sequence[TimedCall]) -> dict[str, float]:
    """Seconds by call: of the GPU group that was busy longest with it, as observations count."""
    busy = added(((c.name, c.where), c.seconds) for c in calls)
    longest: dict[str, float] = {}
    for (name, _), seconds in busy.items():
        longest[name] = max(longest.get(name, 0.0), seconds)
    return longest


def _bars(side: str, calls: Sequence[TimedCall], end: float) -> plots.Trace:
    def label(c: TimedCall) -> str:
        long = side == "measured" and c.seconds > LABELLED * end
        return plots.text(words.capital(words.call(c.name))) if long else ""

    trace = plots.bars(
        side,
        [c.row for c in calls],
        [c.seconds for c in calls],
        SIDES[side],
        base=compact([c.start_s for c in calls]),
        text=[label(c) for c in calls],
        textposition="inside",
        textfont={"color": "bg", "size": 12},
        constraintext="inside",
        textangle=0,
        hoverinfo="text",
        hovertext=[
            f"<b>{plots.text(c.name)}</b>, {side}<br>{plots.text(c.where)}"
            f"<br>{c.start_s:.4g} s, takes {c.seconds:.3g} s"
            for c in calls
        ],
    )
    del trace["hovertemplate"]
    return trace


def inside(row: PhaseComparison) -> bool | None:
    """Whether the measured time lies in the predicted interval; None where a side is missing."""
    if row.measured_s is None or row.low_s is None or row.high_s is None:
        return None
    return row.low_s <= row.measured_s <= row.high_s


# --- phases -----------------------------------------------------------------------------------------


def phases(answer: SideBySide) -> Figure | None:
    """Predicted and measured seconds of every phase that both sides have; None: there is none."""
    step = answer.found.step
    rows = sorted((r for r in answer.found.rows if r.ratio is not None), key=lambda r: -(r.measured_s or 0.0))
    if not rows:
        return None
    names = [words.capital(words.call(r.name)) for r in rows]
    up, late = [_arm(r.predicted_s, r.high_s) for r in rows], [_arm(r.measured_s, r.p90_s) for r in rows]
    down = [_arm(r.low_s, r.predicted_s) for r in rows]
    data = [
        _side("predicted", PREDICTED, names, [r.predicted_s for r in rows], up, down),
        _side("measured (median)", MEASURED, names, [r.measured_s for r in rows], late, [0.0] * len(rows)),
    ]
    layout = plots.rows(names, "seconds", each=46, margin=130, barmode="group")
    least = SMALL * (step.predicted_s or 0.0)
    long = [r for r in rows if max(r.predicted_s or 0.0, r.measured_s or 0.0) > least]
    return Figure(
        "phases",
        findings.phases({r.name: r.ratio for r in long if r.ratio}),
        alt="Pairs of bars, one a phase: "
        + "; ".join(
            f"{n} {r.predicted_s:.3g} s predicted, {r.measured_s:.3g} s measured"
            for n, r in zip(names, rows, strict=True)
        ),
        how="Whiskers: the predicted P10 to P90, and the 90th percentile over the measured steps. The first"
        " step, which warms up, is left out.",
        plot=plots.spec(data, layout),
        table=table_of(
            "Phases in seconds, predicted and measured",
            (*rows, step),
            *SECONDS_OF_PHASES,
            Column("p90", "p90_s", NUMBER),
            Column("ratio", kind=RATIO),
            Column("P10-P90", lambda r: (r.ratio_low, r.ratio_high), ENDS),
            Column("steps", kind=COUNT),
            Column("spans", lambda r: r.spans or None, COUNT, spare=1),
            style=lambda r: "bold" * (r is step),
            notes=("measured: median and 90th percentile over the steps", *_one_sided(answer.found)),
        ),
    )


def _one_sided(found: Comparison) -> Iterator[str]:
    """What only one of the two has, and what one timer covers."""
    took = {r.name: words.short_seconds(r.predicted_s or r.measured_s or 0.0) for r in found.rows}
    sides = {"planned, not timed in the run": found.missing, "in the run, not planned": found.unplanned}
    for side, names in sides.items():
        if names:
            yield f"{side}: {', '.join(f'{name} ({took[name]})' for name in names)}"
    for r in found.rows:
        if r.ratio is not None and len(r.covers) > 1:
            yield f"timed together: {r.name} with {', '.join(c for c in r.covers if c != r.name)}"


def _arm(low: float | None, high: float | None) -> float:
    return max(0.0, high - low) if low is not None and high is not None else 0.0


def _side(
    name: str,
    look: tuple[str, str],
    names: list[str],
    x: Sequence[float | None],
    up: Sequence[float],
    down: Sequence[float],
) -> dict[str, Any]:
    arms = plots.whiskers(up, down, "text", width=3, thickness=1.2)
    return plots.bars(name, names, x, look, error_x=arms)
