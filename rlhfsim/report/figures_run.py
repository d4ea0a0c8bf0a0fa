"""Figures of a run beside its plan: the step on a time axis, phases, the gap, memory, steps over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlhfsim.calibration.compare import Row
from rlhfsim.calibration.footprint import Held
from rlhfsim.calibration.gap import CAUSES, Gap
from rlhfsim.calibration.observation import step_windows
from rlhfsim.calibration.side_by_side import SideBySide
from rlhfsim.report import findings, plots, theme, words
from rlhfsim.report.content import Cell, Figure, Table, compact, number, rounded
from rlhfsim.report.content import words as cell
from rlhfsim.report.figures_time import role_of
from rlhfsim.trace import Span
from rlhfsim.units import GB

LABELLED = 0.08
"""Share of the axis from which a bar carries its name."""
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
    spans: list[Span] = [s for s in answer.trace.spans if s.step == step and s.kind != "wait"]
    told = [Work(side="predicted", name=p.name, where=p.pool, start_s=p.start_s, seconds=p.seconds) for p in answer.plan.prediction.phases]  # fmt: skip
    seen = [Work(side="measured", name=s.name, where=f"{s.pool}, {s.group}", start_s=s.start_s - begin, seconds=s.seconds) for s in spans]  # fmt: skip
    return (*told, *seen)


def timeline(answer: SideBySide) -> Figure:
    """Predicted and measured calls, row beside row."""
    work = both(answer)
    end = max(w.start_s + w.seconds for w in work)
    roles = dict.fromkeys(role_of(w.name) for w in work)
    names = [f"{role}, {side}" for role in roles for side in ("predicted", "measured") if any(w.row == f"{role}, {side}" for w in work)]  # fmt: skip
    data = [
        _bars(side, [w for w in work if w.side == side], end) for side in ("predicted", "measured")
    ]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=32, frame=110), x=f"seconds from the start of the step (measured: step {typical_step(answer)})", barmode="overlay",
        xaxis={"range": [0, rounded(end * 1.01)], "fixedrange": False}, yaxis=theme.rows(names), dragmode="pan",
    )  # fmt: skip
    step = answer.found.step
    title = f"A step takes {words.seconds(step.measured_s or 0.0)} where {words.seconds(step.predicted_s or 0.0)} were predicted: {findings.against(step.ratio or 1.0, inside(step))}"
    alt = (
        "Bars on a time axis, a predicted and a measured row for each role, from 0 to "
        + words.seconds(end)
    )
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


def _bars(side: str, work: Sequence[Work], end: float) -> dict[str, Any]:
    labels = [
        plots.text(words.capital(words.call(w.name))) if w.seconds > LABELLED * end else ""
        for w in work
    ]
    return {
        "type": "bar", "orientation": "h", "name": side, "y": [w.row for w in work], "x": compact([w.seconds for w in work]), "base": compact([w.start_s for w in work]),
        "marker": theme.fill(PREDICTED if side == "predicted" else MEASURED), "text": labels if side == "measured" else [""] * len(work), "textposition": "inside",
        "textfont": {"color": theme.colour("bg"), "size": 12}, "constraintext": "inside", "textangle": 0, "hoverinfo": "text",
        "hovertext": [f"<b>{plots.text(w.name)}</b>, {side}<br>{plots.text(w.where)}<br>{w.start_s:.4g} s, takes {w.seconds:.3g} s" for w in work],
    }  # fmt: skip


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
        caption="Calls of the step",
        head=("call", "side", "where", "starts at (s)", "takes (s)"),
        rows=rows,
    )


def inside(row: Row) -> bool | None:
    """Whether the measured time lies in the predicted interval; None where a side is missing."""
    if row.measured_s is None or row.low_s is None or row.high_s is None:
        return None
    return row.low_s <= row.measured_s <= row.high_s


# --- phases -----------------------------------------------------------------------------------------


def phases(answer: SideBySide) -> Figure | None:
    """Predicted and measured seconds of every phase that both sides have; None: there is none."""
    rows = sorted(
        (r for r in answer.found.rows if r.ratio is not None), key=lambda r: -(r.measured_s or 0.0)
    )
    if not rows:
        return None
    names = [words.capital(words.call(r.name)) for r in rows]
    data = [
        _side("predicted", PREDICTED, names, [r.predicted_s for r in rows], [r.low_s for r in rows], [r.high_s for r in rows]),
        _side("measured (median)", MEASURED, names, [r.measured_s for r in rows], None, [r.p90_s for r in rows]),
    ]  # fmt: skip
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
    title = findings.phases({r.name: r.ratio for r in rows if r.ratio})
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


def _side(name: str, pair: tuple[str, str], names: list[str], x: Sequence[float | None], low: Sequence[float | None] | None, high: Sequence[float | None]) -> dict[str, Any]:  # fmt: skip
    up = [
        max(0.0, h - v) if h is not None and v is not None else 0.0
        for h, v in zip(high, x, strict=True)
    ]
    down = (
        [
            max(0.0, v - w) if w is not None and v is not None else 0.0
            for w, v in zip(low, x, strict=True)
        ]
        if low
        else [0.0] * len(up)
    )
    return {
        "type": "bar", "orientation": "h", "name": name, "y": [plots.text(n) for n in names], "x": compact(x), "marker": theme.fill(pair),
        "error_x": {"type": "data", "symmetric": False, "array": compact(up), "arrayminus": compact(down), "color": theme.colour("text"), "thickness": 1.2, "width": 3},
        "hovertemplate": "%{y}: %{x:.3s} s<extra>%{fullData.name}</extra>",
    }  # fmt: skip


def _phase(r: Row) -> tuple[Cell, ...]:
    def seconds(value: float | None) -> Cell:
        return number(value, "-" if value is None else f"{value:.3g}")

    return cell(r.name), seconds(r.predicted_s), seconds(r.low_s), seconds(r.high_s), seconds(r.measured_s), seconds(r.p90_s), cell(f"{r.ratio:.2f}" if r.ratio else "-"), cell(str(r.steps))  # fmt: skip


# --- the gap ----------------------------------------------------------------------------------------


def gap(found: Gap) -> Figure:
    """From the predicted to the measured mean step, cause by cause."""
    causes = [c for c in CAUSES if rounded(found.parts[c])]
    names = ["predicted", *(GAP_NAMES[c] for c in causes), "measured"]
    values = [found.predicted_s, *(found.parts[c] for c in causes), found.measured_s]
    data: list[dict[str, Any]] = [{
        "type": "waterfall", "x": names, "y": compact(values), "measure": ["absolute", *["relative"] * len(causes), "total"],
        "connector": {"line": {"color": theme.colour("grey"), "width": 1}}, "increasing": {"marker": {"color": theme.colour("red")}},
        "decreasing": {"marker": {"color": theme.colour("green")}}, "totals": {"marker": {"color": theme.colour("blue")}},
        "text": [f"{v:.3g} s" if n in ("predicted", "measured") else f"{v:+.2g} s" for n, v in zip(names, values, strict=True)], "textposition": "outside",
        "hovertemplate": "%{x}: %{text}<extra></extra>", "cliponaxis": False,
    }]  # fmt: skip
    layout = theme.layout(
        height=380,
        x="",
        y="seconds of the mean step",
        legend=False,
        xaxis={"type": "category"},
        margin={"t": 24},
    )
    rows = tuple(
        (cell(n), number(v, f"{v:.3g}" if n in ("predicted", "measured") else f"{v:+.3g}"))
        for n, v in zip(names, values, strict=True)
    )
    alt = "A bridge from the predicted to the measured step: " + "; ".join(
        f"{n} {v:+.2g} s" for n, v in zip(names, values, strict=True)
    )
    how = "Up is longer than predicted, down is shorter; the pieces add up exactly. A phase's difference is split as its prediction splits that phase's time: no counter of the GPU was read."
    title = findings.gap(found.parts, found.predicted_s, found.measured_s)
    return Figure(
        key="gap",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(caption="Where the gap comes from", head=("cause", "seconds"), rows=rows),
    )


GAP_NAMES = {
    "lengths": "lengths", "compute": "arithmetic", "hbm": "GPU memory", "network": "links", "overhead": "overhead", "waiting": "waiting", "order": "order",
}  # fmt: skip
"""Cause -> label."""


# --- memory, steps ----------------------------------------------------------------------------------


def memory(held: Sequence[Held]) -> Figure | None:
    """Predicted and measured bytes by phase; None where the run recorded none."""
    known = [h for h in held if h.measured is not None and h.predicted is not None]
    if not known:
        return None
    names = [f"{h.phase}, pool {h.pool}" for h in known]
    told, seen = (
        [(h.predicted or 0.0) / GB for h in known],
        [(h.measured or 0.0) / GB for h in known],
    )
    data = [
        {"type": "bar", "orientation": "h", "name": side, "y": [plots.text(n) for n in names], "x": compact(x), "marker": theme.fill(pair), "hovertemplate": "%{y}: %{x:.3s} GB<extra>%{fullData.name}</extra>"}
        for side, x, pair in (("predicted", told, PREDICTED), ("measured", seen, MEASURED))
    ]  # fmt: skip
    layout = theme.layout(
        height=theme.by_rows(len(names), each=42, frame=130),
        x="GB on the fullest GPU of the pool",
        barmode="group",
        yaxis=theme.rows(names),
    )
    worst = max(range(len(known)), key=lambda i: seen[i] / told[i] if told[i] else 0.0)
    title = f"Measured memory is {seen[worst] / told[worst]:.2g} times the prediction at most, in {known[worst].phase}"
    rows = tuple(
        (cell(n), number(a, f"{a:.3g}"), number(b, f"{b:.3g}"), cell(f"{b / a:.2f}"))
        for n, a, b in zip(names, told, seen, strict=True)
    )
    alt = "Pairs of bars, one a phase and pool: " + "; ".join(
        f"{n} {a:.3g} GB predicted, {b:.3g} GB measured"
        for n, a, b in zip(names, told, seen, strict=True)
    )
    how = "The most that any GPU of the pool held while the phase ran. On a machine without GPUs the counter is the whole process, libraries included, of which the plan counts the model's part."
    return Figure(key="memory", title=title, alt=alt, how=how, plot=plots.spec(data, layout), table=Table(caption="Memory, predicted and measured", head=("phase and pool", "predicted (GB)", "measured (GB)", "measured / predicted"), rows=rows))  # fmt: skip


def steps(answer: SideBySide, reward: dict[int, float]) -> Figure:
    """Seconds of every counted step with the predicted band, and the mean reward."""
    p, counted, times = answer.plan.prediction, list(answer.run.counted), list(answer.run.step_s)
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines+markers", "name": "measured step", "x": counted, "y": compact(times), "line": {"color": theme.colour("red")}, "marker": {"size": 8}, "hovertemplate": "step %{x}: %{y:.3s} s<extra></extra>"},
        {"type": "scatter", "mode": "lines", "name": "predicted", "x": [counted[0], counted[-1]], "y": compact([p.step_s] * 2), "line": {"color": theme.colour("blue"), "dash": "dash"}, "hoverinfo": "skip", "meta": "guide"},
    ]  # fmt: skip
    more: dict[str, Any] = {}
    if reward:
        data.append({"type": "scatter", "mode": "lines+markers", "name": "mean reward (right axis)", "x": list(reward), "y": compact(list(reward.values())), "yaxis": "y2", "line": {"color": theme.colour("green"), "dash": "dot"}, "marker": {"symbol": "diamond", "size": 8}, "hovertemplate": "step %{x}: reward %{y:.3g}<extra></extra>"})  # fmt: skip
        more["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "showgrid": False,
            "title": {"text": "mean reward", "font": {"size": 12}},
            "automargin": True,
            "fixedrange": True,
        }
    band = {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": rounded(p.low_s),
        "y1": rounded(p.high_s),
        "fillcolor": theme.colour("blue"),
        "opacity": 0.12,
        "line": {"width": 0},
        "layer": "below",
    }
    layout = theme.layout(
        height=360,
        x="step",
        y="seconds",
        shapes=[band],
        yaxis={"rangemode": "tozero"},
        xaxis={"dtick": max(1, len(counted) // 12)},
        **more,
    )
    by_step = dict(zip(counted, times, strict=True))
    rows = tuple((cell(str(s)), number(by_step.get(s), f"{by_step[s]:.4g}" if s in by_step else "not counted"), number(reward.get(s), f"{reward[s]:.4g}" if s in reward else "-")) for s in sorted({*by_step, *reward}))  # fmt: skip
    alt = (
        "A line of seconds per step: "
        + ", ".join(f"{t:.3g}" for t in times)
        + ("; mean reward: " + ", ".join(f"{r:.3g}" for r in reward.values()) if reward else "")
    )
    how = "The band is the predicted P10 to P90. Steps that do not count (the first warms up) are left out of the line of seconds."
    return Figure(key="steps", title=findings.steps(times, list(reward.values())), alt=alt, how=how, plot=plots.spec(data, layout), table=Table(caption="Every step", head=("step", "seconds", "mean reward"), rows=rows))  # fmt: skip
