"""Figures of trust: where the doubt about the step comes from, and how published steps were predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from rlhfsim.kernels.cost import Cost
from rlhfsim.plan import Plan
from rlhfsim.present import findings
from rlhfsim.present.html import plots, theme
from rlhfsim.present.html.content import Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.validation import scoreboard
from rlhfsim.validation import tables as kinds
from rlhfsim.validation.outcome import Outcome

SHOWN = 8
"""Coefficients with a bar of their own."""

ACRONYMS = {
    "rl": "RL",
    "hbm": "HBM",
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "nic": "NIC",
    "rpc": "RPC",
    "kv": "KV",
    "gpu": "GPU",
    "cpu": "CPU",
    "pue": "PUE",
    "moe": "MoE",
    "gemm": "GEMM",
    "nccl": "NCCL",
    "zero": "ZeRO",
    "cuda": "CUDA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one coefficient adds to the interval of the step."""

    name: str
    down_s: float
    """Seconds that its P10 takes off."""
    up_s: float
    """Seconds that its P90 adds."""
    share: float
    """Of the variance."""


def contributions(cost: Cost) -> tuple[Part, ...]:
    """The interval of a cost by coefficient, the widest first: parts on one coefficient move together."""
    down: dict[str, float] = {}
    up: dict[str, float] = {}
    for p in cost.parts:
        down[p.rests_on] = down.get(p.rests_on, 0.0) + p.seconds - p.low
        up[p.rests_on] = up.get(p.rests_on, 0.0) + p.high - p.seconds
    total = sum((down[n] + up[n]) ** 2 for n in down) or 1.0
    found = [Part(name=n, down_s=down[n], up_s=up[n], share=(down[n] + up[n]) ** 2 / total) for n in down]
    return tuple(sorted((p for p in found if p.share > 0), key=lambda p: -p.share))


def sensitivity(plan: Plan, cost: Cost) -> Figure | None:
    """Seconds that each coefficient takes off or adds; None where nothing is uncertain."""
    parts = contributions(cost)
    if not parts:
        return None
    shown = parts[:SHOWN]
    names = [spoken(p.name) for p in shown]
    p = plan.prediction
    data = [
        _bar("at its P10", names, [-x.down_s for x in shown], ("blue", "/")),
        _bar("at its P90", names, [x.up_s for x in shown], ("orange", "")),
    ]
    layout = theme.layout(
        height=theme.by_rows(len(names), frame=140),
        x="seconds that the step becomes shorter (left) or longer (right)",
        barmode="overlay",
        yaxis=theme.rows(names),
    )
    rows = tuple(
        (
            cell(spoken(x.name)),
            number(-x.down_s, f"{-x.down_s:+,.3g}"),
            number(x.up_s, f"{x.up_s:+,.3g}"),
            cell(f"{x.share:.1%}".replace("%", " %")),
        )
        for x in parts
    )
    title = findings.sensitivity(names, [x.share for x in shown], (p.high_s - p.low_s) / 2, p.step_s)
    alt = "Bars to both sides of the predicted step: " + "; ".join(
        f"{n} {-x.down_s:+.3g} to {x.up_s:+.3g} s" for n, x in zip(names, shown, strict=True)
    )
    how = "How much the step moves when one coefficient is at the 10th or 90th percentile of what is believed of it. Independent doubts add in squares, so a few decide. Values and sources stand under Assumptions."
    return Figure(
        key="sensitivity",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(
            caption="What each coefficient adds to the interval of the step",
            head=("coefficient", "at its P10 (s)", "at its P90 (s)", "share of the doubt"),
            rows=rows,
        ),
    )


def _bar(name: str, names: list[str], x: list[float], pair: tuple[str, str]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [plots.text(n) for n in names],
        "x": compact(x),
        "marker": theme.fill(pair),
        "hovertemplate": "%{y}: %{x:+.3s} s<extra>%{fullData.name}</extra>",
    }


def spoken(name: str) -> str:
    """A coefficient as people read it: `rl_call_overhead` is RL call overhead."""
    return " ".join(ACRONYMS.get(word, word) for word in name.replace("_", " ").split())


# --- published steps --------------------------------------------------------------------------------


@cache
def published() -> tuple[Outcome, ...]:
    """RLHF steps that others published and that were predicted from their configuration alone."""
    found, _ = scoreboard.collect({"rlhf": kinds.SECTIONS["rlhf"]})
    return tuple(o for o in found if o.kind == "rlhf.step" and o.error is not None)


def error(rows: tuple[Outcome, ...]) -> float:
    """Median error of the rows that fitted nothing."""
    return median(abs(o.error) for o in rows if o.error is not None and o.part == "report")


def scatter() -> Figure:
    """Predicted against measured, both on logarithmic axes."""
    rows = published()
    scored = tuple(o for o in rows if o.part == "report")
    inside = sum(1 for o in scored if _inside(o))
    by_source: dict[str, list[Outcome]] = {}
    for o in rows:
        by_source.setdefault("used for fitting" if o.part == "fit" else short(o.source), []).append(o)
    data = [_line(rows), *(_points(i, name, group) for i, (name, group) in enumerate(by_source.items()))]
    values = [x for o in rows for x in (o.measured, o.predicted) if x]
    span = [rounded(math.log10(min(values) / 1.4)), rounded(math.log10(max(values) * 1.4))]
    axis = {"type": "log", "range": span, "dtick": 1}
    layout = theme.layout(
        height=460, x="measured seconds per step", y="predicted seconds per step", xaxis=axis, yaxis=axis
    )
    alt = f"Points of measured and predicted seconds around the line of equality, from {min(values):.3g} to {max(values):.3g} s"
    how = "On the line prediction and publication agree; bars are the predicted P10 to P90. No row's result enters its own prediction; rows that fitted a constant are marked and not counted."
    return Figure(
        key="published",
        title=findings.scatter(error(rows), len(scored), inside),
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=_table(rows),
    )


def _inside(o: Outcome) -> bool:
    return (
        o.low is not None and o.high is not None and o.measured is not None and o.low <= o.measured <= o.high
    )


def short(source: str) -> str:
    """A publication in a legend: its repository, or the end of its address."""
    return source.split("@")[0] if "@" in source else source.split("/")[0]


def _line(rows: tuple[Outcome, ...]) -> dict[str, Any]:
    values = [x for o in rows for x in (o.measured, o.predicted) if x]
    ends = compact([min(values) / 2, max(values) * 2])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "equal",
        "x": ends,
        "y": ends,
        "line": {"color": theme.colour("grey"), "dash": "dash"},
        "hoverinfo": "skip",
        "meta": "guide",
    }


def _points(i: int, name: str, rows: list[Outcome]) -> dict[str, Any]:
    def arm(o: Outcome, end: float | None) -> float:
        return abs(end - o.predicted) if end is not None and o.predicted is not None else 0.0

    return {
        "type": "scatter",
        "mode": "markers",
        "name": plots.text(name),
        "x": compact([o.measured for o in rows]),
        "y": compact([o.predicted for o in rows]),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": compact([arm(o, o.high) for o in rows]),
            "arrayminus": compact([arm(o, o.low) for o in rows]),
            "width": 0,
            "thickness": 1,
            "color": theme.colour("grey"),
        },
        "marker": {
            "color": theme.colour(theme.KINDS[i % len(theme.KINDS)]),
            "symbol": theme.SYMBOLS[i % len(theme.SYMBOLS)],
            "size": 10,
        },
        "hovertext": [
            f"<b>{plots.text(o.label)}</b><br>measured {o.measured:.4g} s, predicted {o.predicted:.4g} s"
            for o in rows
        ],
        "hoverinfo": "text",
    }


def _table(rows: tuple[Outcome, ...]) -> Table:
    body = tuple(
        (
            cell(o.label),
            number(o.measured, f"{o.measured:,.4g}"),
            number(o.predicted, f"{o.predicted:,.4g}"),
            cell(f"{o.error:+.0%}".replace("%", " %")),
            cell("yes" if o.part == "fit" else "no"),
            cell(", ".join(o.assumptions) or "none"),
            cell(o.source),
        )
        for o in rows
    )
    return Table(
        caption="Published RLHF steps",
        head=(
            "run",
            "measured (s)",
            "predicted (s)",
            "error",
            "fitted a constant",
            "blanks filled by assumption",
            "source",
        ),
        rows=body,
    )


def outcome_assumptions(rows: tuple[Outcome, ...]) -> Mapping[str, int]:
    """Blank cells that were filled, with how many rows rest on each."""
    found: dict[str, int] = {}
    for o in rows:
        for text in o.assumptions:
            found[text] = found.get(text, 0) + 1
    return found
