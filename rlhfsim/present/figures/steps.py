"""Figures of a run: why its step differs, what its memory held, and its steps one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhfsim.calibration.comparison.gap import CAUSES, Gap
from rlhfsim.calibration.comparison.memory import PhaseMemory
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.figures.run import MEASURED, PREDICTED
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import AMOUNTS, COUNT, DIFFERENCE, ENDS, FIGURE, RATIO, compact, rounded
from rlhfsim.units import GB

TINY = 5e-4
"""Share of the step below which time in no call is not said."""


def gap(gap: Gap) -> Figure:
    """From the predicted to the measured mean step, cause by cause."""
    causes = [c for c in CAUSES if rounded(gap.parts[c])]
    parts = [(words.CAUSES[c].label, gap.parts[c]) for c in causes]
    rows = [("predicted", gap.predicted_s), *parts, ("measured", gap.measured_s)]
    ends, meanings = (rows[0], rows[-1]), {c.label: c.meaning for c in words.CAUSES.values()}
    bridge = {
        "type": "waterfall",
        "x": [name for name, _ in rows],
        "y": compact([seconds for _, seconds in rows]),
        "measure": ["absolute", *["relative"] * len(causes), "total"],
        "connector": {"line": {"color": "grey", "width": 1}},
        "increasing": {"marker": {"color": "red"}},
        "decreasing": {"marker": {"color": "green"}},
        "totals": {"marker": {"color": "blue"}},
        "text": [f"{row[1]:.3g} s" if row in ends else f"{row[1]:+.2g} s" for row in rows],
        "textposition": "outside",
        "hovertemplate": "%{x}: %{text}<extra></extra>",
        "cliponaxis": False,
    }
    layout = theme.layout(
        height=380,
        x="",
        y="seconds of the mean step",
        legend=False,
        xaxis={"type": "category"},
        margin={"t": 24},
    )
    return Figure(
        "gap",
        findings.gap(gap.parts, gap.predicted_s, gap.measured_s),
        alt="A bridge from the predicted to the measured step: "
        + "; ".join(f"{name} {seconds:+.2g} s" for name, seconds in rows),
        how="Up is longer than predicted, down is shorter; the pieces add up exactly. A phase's difference is"
        " split as its prediction splits that phase's time: no counter of the GPU was read.",
        plot=plots.spec([bridge], layout),
        table=table_of(
            "Where the gap comes from",
            rows,
            Column("cause", 0),
            Column("seconds", 1, DIFFERENCE),
            Column("that is", lambda row: meanings.get(row[0], "mean step")),
            style=lambda row: "bold" * (row in ends),
            notes=tuple(_notes(gap)),
        ),
    )


def _notes(gap: Gap) -> Iterator[str]:
    more = {p.name: p.measured_s - p.predicted_s for p in gap.phases if p.measured_s is not None}
    if worst := sorted(more, key=lambda name: -abs(more[name]))[:3]:
        yield f"largest differences: {', '.join(f'{name} {more[name]:+.3g} s' for name in worst)}"
    if gap.untimed_s > 0 or gap.idle_s > TINY * gap.measured_s:
        idle, untimed = map(words.short_seconds, (gap.idle_s, gap.untimed_s))
        planned = f", where the plan has {untimed} of work that the run does not time"
        yield f"in no call: {idle} of the step{planned * (gap.untimed_s > 0)}"


def memory(held: Sequence[PhaseMemory]) -> Figure | None:
    """Predicted and measured bytes by phase; None where the run recorded none."""
    known = [h for h in held if h.measured is not None]
    rows = [
        (f"{h.phase}, pool {h.pool}", h.predicted / GB, h.measured / GB, h.phase)
        for h in known
        if h.measured is not None and h.predicted is not None
    ]
    if not rows:
        return None
    names = [name for name, *_ in rows]
    data = [
        plots.bars("predicted", names, [row[1] for row in rows], PREDICTED, "GB"),
        plots.bars("measured", names, [row[2] for row in rows], MEASURED, "GB"),
    ]
    layout = plots.rows(names, "GB on the fullest GPU of the pool", each=42, margin=130, barmode="group")
    _, predicted, measured, phase = max(rows, key=lambda row: row[2] / row[1] if row[1] else 0.0)
    return Figure(
        "memory",
        f"Measured memory is {measured / predicted:.2g} times the prediction at most, in {phase}",
        alt="Pairs of bars, one a phase and pool: "
        + "; ".join(f"{n} {a:.3g} GB predicted, {b:.3g} GB measured" for n, a, b, _ in rows),
        how="The most that any GPU of the pool held while the phase ran. On a machine without GPUs the "
        "counter is the whole process, libraries included, of which the plan counts the model's part.",
        plot=plots.spec(data, layout),
        table=table_of(
            "Memory, predicted and measured",
            known,
            Column("phase"),
            Column("pool"),
            Column("predicted (GB)", lambda h: _gb(h.predicted), FIGURE),
            Column("P10-P90 (GB)", lambda h: (_gb(h.low), _gb(h.high)), ENDS),
            Column("measured (GB)", lambda h: _gb(h.measured), FIGURE),
            Column("ratio", kind=RATIO),
            Column("predicted by role (GB)", lambda h: {r: b / GB for r, b in h.roles.items() if b}, AMOUNTS),
        ),
    )


def _gb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / GB


def steps(answer: SideBySide, reward: dict[int, float]) -> Figure:
    """Seconds of every counted step with the predicted band, and the mean reward."""
    p, by_step = answer.plan.prediction, dict(zip(answer.run.counted, answer.run.step_s, strict=True))
    times = list(by_step.values())
    more: dict[str, Any] = {"yaxis2": _REWARD_AXIS} if reward else {}
    layout = theme.layout(
        height=360,
        x="step",
        y="seconds",
        shapes=[_BAND | {"y0": rounded(p.low_s), "y1": rounded(p.high_s)}],
        yaxis={"rangemode": "tozero"},
        xaxis={"dtick": max(1, len(by_step) // 12)},
        **more,
    )
    rewards = "; mean reward: " + ", ".join(f"{r:.3g}" for r in reward.values()) if reward else ""
    return Figure(
        "steps",
        findings.steps(times, list(reward.values())),
        alt="A line of seconds per step: " + ", ".join(f"{t:.3g}" for t in times) + rewards,
        how="The band is the predicted P10 to P90. Steps that do not count (the first warms up) are left out "
        "of the line of seconds.",
        plot=plots.spec(_lines(by_step, p.step_s, reward), layout),
        table=table_of(
            "Every step",
            sorted({*by_step, *reward}),
            Column("step", lambda step: step, COUNT),
            Column("seconds", lambda step: by_step.get(step), FIGURE.where("not counted")),
            Column("mean reward", lambda step: reward.get(step), FIGURE),
        ),
    )


def _lines(by_step: dict[int, float], predicted_s: float, reward: dict[int, float]) -> list[plots.Trace]:
    counted = list(by_step)
    measured = _line("measured step", by_step, "red", None, "step %{x}: %{y:.3s} s<extra></extra>")
    predicted = {
        "type": "scatter",
        "mode": "lines",
        "name": "predicted",
        "x": [counted[0], counted[-1]],
        "y": compact([predicted_s] * 2),
        "line": {"color": "blue", "dash": "dash"},
        "hoverinfo": "skip",
        "meta": "guide",
    }
    if not reward:
        return [measured, predicted]
    hover = "step %{x}: reward %{y:.3g}<extra></extra>"
    learnt = _line("mean reward (right axis)", reward, "green", "dot", hover)
    learnt["marker"]["symbol"] = "diamond"
    return [measured, predicted, {**learnt, "yaxis": "y2"}]


def _line(name: str, by_step: dict[int, float], colour: str, dash: str | None, hover: str) -> plots.Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(by_step),
        "y": compact(by_step.values()),
        "line": {"color": colour} | ({"dash": dash} if dash else {}),
        "marker": {"size": 8},
        "hovertemplate": hover,
    }


_REWARD_AXIS: dict[str, Any] = {
    "overlaying": "y",
    "tickmode": "auto",
    "rangemode": "tozero",
    "side": "right",
    "showgrid": False,
    "title": {"text": "mean reward", "font": {"size": 12}},
    "automargin": True,
    "fixedrange": True,
}


_BAND: dict[str, Any] = {
    "type": "rect",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "fillcolor": "blue",
    "opacity": 0.12,
    "line": {"width": 0},
    "layer": "below",
}
