"""Figures of a run: why its step differs, what its memory held, and its steps one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfsim.calibration.comparison.gap import CAUSES, Gap
from rlhfsim.calibration.comparison.memory import PhaseMemory
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.present import findings
from rlhfsim.present.figures.run import MEASURED, PREDICTED
from rlhfsim.present.html import plots, theme
from rlhfsim.present.html.content import Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.units import GB

# --- the gap ----------------------------------------------------------------------------------------


def gap(found: Gap) -> Figure:
    """From the predicted to the measured mean step, cause by cause."""
    causes = [c for c in CAUSES if rounded(found.parts[c])]
    names = ["predicted", *(GAP_NAMES[c] for c in causes), "measured"]
    values = [found.predicted_s, *(found.parts[c] for c in causes), found.measured_s]
    data: list[dict[str, Any]] = [
        {
            "type": "waterfall",
            "x": names,
            "y": compact(values),
            "measure": ["absolute", *["relative"] * len(causes), "total"],
            "connector": {"line": {"color": theme.colour("grey"), "width": 1}},
            "increasing": {"marker": {"color": theme.colour("red")}},
            "decreasing": {"marker": {"color": theme.colour("green")}},
            "totals": {"marker": {"color": theme.colour("blue")}},
            "text": [
                f"{v:.3g} s" if n in ("predicted", "measured") else f"{v:+.2g} s"
                for n, v in zip(names, values, strict=True)
            ],
            "textposition": "outside",
            "hovertemplate": "%{x}: %{text}<extra></extra>",
            "cliponaxis": False,
        }
    ]
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
    "lengths": "lengths",
    "compute": "arithmetic",
    "hbm": "GPU memory",
    "network": "links",
    "overhead": "overhead",
    "waiting": "waiting",
    "order": "order",
}
"""Cause -> label."""


# --- memory, steps ----------------------------------------------------------------------------------


def memory(held: Sequence[PhaseMemory]) -> Figure | None:
    """Predicted and measured bytes by phase; None where the run recorded none."""
    known = [h for h in held if h.measured is not None and h.predicted is not None]
    if not known:
        return None
    names = [f"{h.phase}, pool {h.pool}" for h in known]
    told, seen = ([(h.predicted or 0.0) / GB for h in known], [(h.measured or 0.0) / GB for h in known])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": side,
            "y": [plots.text(n) for n in names],
            "x": compact(x),
            "marker": theme.fill(pair),
            "hovertemplate": "%{y}: %{x:.3s} GB<extra>%{fullData.name}</extra>",
        }
        for side, x, pair in (("predicted", told, PREDICTED), ("measured", seen, MEASURED))
    ]
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
        f"{n} {a:.3g} GB predicted, {b:.3g} GB measured" for n, a, b in zip(names, told, seen, strict=True)
    )
    how = "The most that any GPU of the pool held while the phase ran. On a machine without GPUs the counter is the whole process, libraries included, of which the plan counts the model's part."
    return Figure(
        key="memory",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(
            caption="Memory, predicted and measured",
            head=("phase and pool", "predicted (GB)", "measured (GB)", "measured / predicted"),
            rows=rows,
        ),
    )


def steps(answer: SideBySide, reward: dict[int, float]) -> Figure:
    """Seconds of every counted step with the predicted band, and the mean reward."""
    p, counted, times = answer.plan.prediction, list(answer.run.counted), list(answer.run.step_s)
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "measured step",
            "x": counted,
            "y": compact(times),
            "line": {"color": theme.colour("red")},
            "marker": {"size": 8},
            "hovertemplate": "step %{x}: %{y:.3s} s<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "predicted",
            "x": [counted[0], counted[-1]],
            "y": compact([p.step_s] * 2),
            "line": {"color": theme.colour("blue"), "dash": "dash"},
            "hoverinfo": "skip",
            "meta": "guide",
        },
    ]
    more: dict[str, Any] = {}
    if reward:
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "mean reward (right axis)",
                "x": list(reward),
                "y": compact(list(reward.values())),
                "yaxis": "y2",
                "line": {"color": theme.colour("green"), "dash": "dot"},
                "marker": {"symbol": "diamond", "size": 8},
                "hovertemplate": "step %{x}: reward %{y:.3g}<extra></extra>",
            }
        )
        more["yaxis2"] = {
            "overlaying": "y",
            "tickmode": "auto",
            "rangemode": "tozero",
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
    rows = tuple(
        (
            number(float(s), str(s)),
            number(by_step.get(s), f"{by_step[s]:.4g}" if s in by_step else "not counted"),
            number(reward.get(s), f"{reward[s]:.4g}" if s in reward else "-"),
        )
        for s in sorted({*by_step, *reward})
    )
    alt = (
        "A line of seconds per step: "
        + ", ".join(f"{t:.3g}" for t in times)
        + ("; mean reward: " + ", ".join(f"{r:.3g}" for r in reward.values()) if reward else "")
    )
    how = "The band is the predicted P10 to P90. Steps that do not count (the first warms up) are left out of the line of seconds."
    return Figure(
        key="steps",
        title=findings.steps(times, list(reward.values())),
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(caption="Every step", head=("step", "seconds", "mean reward"), rows=rows),
    )
