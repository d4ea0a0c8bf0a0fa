"""Figures of a run beside its plan: the step on a time axis, and its phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlhfsim.calibration.comparison.phases import PhaseComparison
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.calibration.observation import step_windows
from rlhfsim.present import findings
from rlhfsim.present.figures.time import role_of
from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Cell, Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.trace import WAIT, Span

LABELLED = 0.08
"""Share of the axis from which a bar carries its name."""
SMALL = 0.01
"""Share of the step below which a phase says nothing about the prediction."""
PREDICTED, MEASURED = ("blue", "/"), ("red", "")
"""Colours of the two sides wherever both are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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


def both(answer: SideBySide) -> tuple[Work, ...]:
    """Predicted calls, and those of the typical measured step."""
    step = typical_step(answer)
    begin = step_windows(answer.trace)[step][0]
    spans: list[Span] = [s for s in answer.trace.spans if s.step == step and s.kind != WAIT]
    told = [
        Work(side="predicted", name=p.name, where=p.pool, start_s=p.start_s, seconds=p.seconds)
        for p in answer.plan.prediction.phases
    ]
    seen = [
        Work(
            side="measured",
            name=s.name,
            where=f"{s.pool}, {s.group}",
            start_s=s.start_s - begin,
            seconds=s.seconds,
        )
        for s in spans
    ]
    return (*told, *seen)


def timeline(answer: SideBySide) -> Figure:
    """Predicted and measured calls, row beside row."""
    work = both(answer)
    end = max(w.start_s + w.seconds for w in work)
    roles = dict.fromkeys(role_of(w.name) for w in work)
    names = [
        f"{role}, {side}"
        for role in roles
        for side in ("predicted", "measured")
        if any(w.row == f"{role}, {side}" for w in work)
    ]
    data = [_bars(side, [w for w in work if w.side == side], end) for side in ("predicted", "measured")]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=32, frame=110),
        x=f"seconds from the start of the step (measured: step {typical_step(answer)})",
        barmode="overlay",
        xaxis={"range": [0, rounded(end * 1.01)], "fixedrange": False},
        yaxis=theme.rows(names),
        dragmode="pan",
    )
    title = findings.sides(
        _totals([w for w in work if w.side == "predicted"]),
        _totals([w for w in work if w.side == "measured"]),
    )
    alt = "Bars on a time axis, a predicted and a measured row for each role, from 0 to " + words.seconds(end)
    how = "The predicted step above the measured step that is nearest to the median. Gaps between measured bars are time in which no call of that role ran."
    return Figure(
        key="timeline",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=_work_table(work),
        zoom=True,
    )


def _totals(work: Sequence[Work]) -> dict[str, float]:
    """Seconds by call: of the GPU group that was busy longest with it, as observations count."""
    busy: dict[tuple[str, str], float] = {}
    for w in work:
        busy[w.name, w.where] = busy.get((w.name, w.where), 0.0) + w.seconds
    found: dict[str, float] = {}
    for (name, _), seconds in busy.items():
        found[name] = max(found.get(name, 0.0), seconds)
    return found


def _bars(side: str, work: Sequence[Work], end: float) -> dict[str, Any]:
    labels = [
        plots.text(words.capital(words.call(w.name))) if w.seconds > LABELLED * end else "" for w in work
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": side,
        "y": [plots.text(w.row) for w in work],
        "x": compact([w.seconds for w in work]),
        "base": compact([w.start_s for w in work]),
        "marker": theme.fill(PREDICTED if side == "predicted" else MEASURED),
        "text": labels if side == "measured" else [""] * len(work),
        "textposition": "inside",
        "textfont": {"color": theme.colour("bg"), "size": 12},
        "constraintext": "inside",
        "textangle": 0,
        "hoverinfo": "text",
        "hovertext": [
            f"<b>{plots.text(w.name)}</b>, {side}<br>{plots.text(w.where)}<br>{w.start_s:.4g} s, takes {w.seconds:.3g} s"
            for w in work
        ],
    }


def _work_table(work: Sequence[Work]) -> Table:
    rows = tuple(
        (
            cell(w.name),
            cell(w.side),
            cell(w.where),
            number(w.start_s, f"{w.start_s:.4g}"),
            number(w.seconds, f"{w.seconds:.3g}"),
        )
        for w in work
    )
    return Table(
        caption="Calls of the step", head=("call", "side", "where", "starts at (s)", "takes (s)"), rows=rows
    )


def inside(row: PhaseComparison) -> bool | None:
    """Whether the measured time lies in the predicted interval; None where a side is missing."""
    if row.measured_s is None or row.low_s is None or row.high_s is None:
        return None
    return row.low_s <= row.measured_s <= row.high_s


# --- phases -----------------------------------------------------------------------------------------


def phases(answer: SideBySide) -> Figure | None:
    """Predicted and measured seconds of every phase that both sides have; None: there is none."""
    rows = sorted((r for r in answer.found.rows if r.ratio is not None), key=lambda r: -(r.measured_s or 0.0))
    if not rows:
        return None
    names = [words.capital(words.call(r.name)) for r in rows]
    data = [
        _side(
            "predicted",
            PREDICTED,
            names,
            [r.predicted_s for r in rows],
            [r.low_s for r in rows],
            [r.high_s for r in rows],
        ),
        _side(
            "measured (median)", MEASURED, names, [r.measured_s for r in rows], None, [r.p90_s for r in rows]
        ),
    ]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=46, frame=130),
        x="seconds",
        barmode="group",
        yaxis=theme.rows(names),
    )
    body = tuple(_phase(r) for r in (*rows, answer.found.step))
    head = (
        "phase",
        "predicted (s)",
        "P10 (s)",
        "P90 (s)",
        "measured (s)",
        "90th percentile (s)",
        "measured / predicted",
        "steps",
    )
    least = SMALL * (answer.found.step.predicted_s or 0.0)
    title = findings.phases(
        {r.name: r.ratio for r in rows if r.ratio and max(r.predicted_s or 0.0, r.measured_s or 0.0) > least}
    )
    alt = "Pairs of bars, one a phase: " + "; ".join(
        f"{n} {r.predicted_s:.3g} s predicted, {r.measured_s:.3g} s measured"
        for n, r in zip(names, rows, strict=True)
    )
    how = "Whiskers: the predicted P10 to P90, and the 90th percentile over the measured steps. The first step, which warms up, is left out."
    return Figure(
        key="phases",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(caption="Phases, predicted and measured", head=head, rows=body),
    )


def _side(
    name: str,
    pair: tuple[str, str],
    names: list[str],
    x: Sequence[float | None],
    low: Sequence[float | None] | None,
    high: Sequence[float | None],
) -> dict[str, Any]:
    up = [max(0.0, h - v) if h is not None and v is not None else 0.0 for h, v in zip(high, x, strict=True)]
    down = (
        [max(0.0, v - w) if w is not None and v is not None else 0.0 for w, v in zip(low, x, strict=True)]
        if low
        else [0.0] * len(up)
    )
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [plots.text(n) for n in names],
        "x": compact(x),
        "marker": theme.fill(pair),
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": compact(up),
            "arrayminus": compact(down),
            "color": theme.colour("text"),
            "thickness": 1.2,
            "width": 3,
        },
        "hovertemplate": "%{y}: %{x:.3s} s<extra>%{fullData.name}</extra>",
    }


def _phase(r: PhaseComparison) -> tuple[Cell, ...]:
    def seconds(value: float | None) -> Cell:
        return number(value, "-" if value is None else f"{value:.3g}")

    return (
        cell(r.name),
        seconds(r.predicted_s),
        seconds(r.low_s),
        seconds(r.high_s),
        seconds(r.measured_s),
        seconds(r.p90_s),
        cell(f"{r.ratio:.2f}" if r.ratio else "-"),
        cell(str(r.steps)),
    )
