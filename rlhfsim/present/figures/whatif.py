"""Figures of a what-if: time against money of its points, and the tornado."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfsim.present import findings
from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Cell, Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.units import HOUR, Dimension, format, significant
from rlhfsim.what_if.scenarios.points import worded
from rlhfsim.what_if.scenarios.result import Bar, PointResult, WhatIf


def money_of(point: PointResult) -> float | None:
    """USD; GPU-hours where no price is known."""
    if point.usd is not None or point.seconds is None:
        return point.usd
    return (point.gpus or 0) * point.seconds / HOUR


def axis_of(result: WhatIf) -> str:
    """What money is counted in."""
    priced = all(p.usd is not None for p in result.everything if p.plan is not None)
    return f"{'USD' if priced else 'GPU-hours'} per {result.per}"


def changed(point: PointResult) -> str:
    """What a point sets, in a line."""
    return "; ".join(f"{path} = {worded(path, value)}" for path, value in point.changes.items()) or "as it is"


# --- points -----------------------------------------------------------------------------------------


def pareto(result: WhatIf) -> Figure | None:
    """Points by time and money, those that no other one beats joined; None where nothing fits."""
    known = [p for p in result.everything if p.seconds is not None and money_of(p) is not None]
    if not known:
        return None
    axis = axis_of(result)
    front = sorted((p for p in known if p.on_front), key=lambda p: p.seconds or 0.0)
    scale, unit = _time_scale(max(p.seconds or 0.0 for p in known))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "no other point beats these",
            "x": compact([(p.seconds or 0.0) / scale for p in front]),
            "y": compact([money_of(p) for p in front]),
            "line": {"color": theme.colour("grey"), "dash": "dot"},
            "hoverinfo": "skip",
        },
        *(_point(i, p, p is result.base, scale, unit, axis) for i, p in enumerate(known)),
    ]
    layout = theme.layout(
        height=440, x=f"{unit} per {result.per} (shorter is better)", y=f"{axis} (lower is better)"
    )
    alt = f"Points of time and {axis}: " + "; ".join(
        f"{p.name} {words.seconds(p.seconds or 0.0)}, {money_of(p):,.3g}" for p in known
    )
    how = "Down and to the left is better. The star is the base; points on the dotted line are beaten by no other point in both time and money, hollow ones are."
    return Figure(
        key="pareto",
        title=finding(result),
        alt=alt,
        how=how,
        plot=plots.spec([d for d in data if d["x"]], layout),
        table=points(result),
    )


def _time_scale(longest: float) -> tuple[float, str]:
    return (
        (24 * HOUR, "days")
        if longest > 48 * HOUR
        else (HOUR, "hours")
        if longest > 2 * HOUR
        else (1.0, "seconds")
    )


def _point(i: int, p: PointResult, base: bool, scale: float, unit: str, axis: str) -> dict[str, Any]:
    symbol = "star" if base else theme.SYMBOLS[i % len(theme.SYMBOLS)].replace("star", "pentagon")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plots.text(p.name),
        "x": compact([(p.seconds or 0.0) / scale]),
        "y": compact([money_of(p)]),
        "hoverinfo": "text",
        "cliponaxis": False,
        "hovertext": [
            f"<b>{plots.text(p.name)}</b><br>{words.seconds(p.seconds or 0.0)}, {money_of(p):,.4g} {axis}<br>{p.gpus:,} GPUs"
        ],
        "marker": {
            "symbol": symbol if p.on_front else f"{symbol}-open",
            "size": 18 if base else 13,
            "color": theme.colour("red" if base else theme.KINDS[i % len(theme.KINDS)]),
            "line": {"width": 2},
        },
    }


def finding(result: WhatIf) -> str:
    """What the points say against the base."""
    base = (result.base.name, result.base.seconds, money_of(result.base))
    return findings.points(
        base,
        [(p.name, p.seconds, money_of(p)) for p in result.points],
        "cost" if axis_of(result).startswith("USD") else "GPU-hours",
    )


def points(result: WhatIf) -> Table:
    """Every point, the base first."""
    scale, unit = _time_scale(max([p.seconds or 0.0 for p in result.everything]))
    axis = axis_of(result)
    head = (
        "point",
        "changes",
        "GPUs",
        "plan",
        f"time of a {result.per} ({unit})",
        "against base",
        axis,
        "against base",
        "step (s)",
        "unbeaten",
    )
    return Table(
        caption="Points of the scenario",
        head=head,
        rows=tuple(_row(p, result.base, scale) for p in result.everything),
    )


def _row(p: PointResult, base: PointResult, scale: float) -> tuple[Cell, ...]:
    if p.plan is None:
        return (
            cell(p.name),
            cell(changed(p)),
            cell("-"),
            cell(p.shortage or "nothing fits"),
            *[cell("-")] * 6,
        )
    time, money = p.seconds or 0.0, money_of(p)
    return (
        cell(p.name),
        cell(changed(p)),
        number(p.gpus, f"{p.gpus:,}"),
        cell(p.plan.architecture),
        number(time / scale, significant(time / scale, 4)),
        cell(_relative(time, base.seconds)),
        number(money, "unknown" if money is None else significant(money, 4)),
        cell(_relative(money, money_of(base))),
        number(p.plan.prediction.step_s, significant(p.plan.prediction.step_s, 4)),
        cell("yes" if p.on_front else "no"),
    )


def _relative(value: float | None, base: float | None) -> str:
    return words.signed(value / base - 1) if value is not None and base else "-"


# --- tornado ----------------------------------------------------------------------------------------


def tornado(result: WhatIf) -> tuple[Figure, ...]:
    """What each input moves in time, and in money where it is known."""
    time = _tornado(result, "time", "s", [(b, b.low_s, b.base_s, b.high_s) for b in result.tornado])
    money = _tornado(result, "money", "usd", [(b, b.low_usd, b.base_usd, b.high_usd) for b in result.tornado])
    return tuple(f for f in (time, money) if f is not None)


def _tornado(
    result: WhatIf,
    what: str,
    unit: Dimension,
    rows: Sequence[tuple[Bar, float | None, float | None, float | None]],
) -> Figure | None:
    known = [
        (bar, low, base, high)
        for bar, low, base, high in rows
        if base and (low is not None or high is not None)
    ]
    if not known:
        return None
    known.sort(key=lambda r: -max(abs((e or r[2] or 0.0) / (r[2] or 1.0) - 1) for e in (r[1], r[3])))
    names = [bar.path for bar, *_ in known]
    lows, highs = (
        [None if e is None or not base else (e / base - 1) * 100 for e, base in ends]
        for ends in ([(low, base) for _, low, base, _ in known], [(high, base) for _, _, base, high in known])
    )
    labels = [[bar.low_label for bar, *_ in known], [bar.high_label for bar, *_ in known]]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [plots.text(n) for n in names],
            "x": compact(x),
            "marker": theme.fill(pair),
            "text": [plots.text(t) for t in label],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{y} at %{text}: %{x:+.3s} %<extra></extra>",
        }
        for name, x, label, pair in (
            ("low value", lows, labels[0], ("blue", "/")),
            ("high value", highs, labels[1], ("orange", "")),
        )
    ]
    reach = max(abs(v) for v in (*lows, *highs) if v is not None) or 1.0
    layout = theme.layout(
        height=theme.by_rows(len(names), each=38, frame=140),
        x=f"change of {what} of a {result.per}, %",
        barmode="overlay",
        yaxis=theme.rows(names),
        xaxis={"range": [rounded(-1.35 * reach), rounded(1.35 * reach)]},
    )
    rows_ = tuple(
        (
            cell(bar.path),
            cell(f"{bar.low_label}, {bar.base_label}, {bar.high_label}"),
            *(number(v, "nothing fits" if v is None else f"{v:+.1f}") for v in pair),
            *(cell("-" if e is None else format(e, unit)) for e in ends),
        )
        for (bar, *ends), pair in zip(known, zip(lows, highs, strict=True), strict=True)
    )
    title = findings.tornado(what, names[0], lows[0], highs[0])
    alt = "Bars to both sides of the base: " + "; ".join(
        f"{n} {_pc(a)} to {_pc(b)}" for n, a, b in zip(names, lows, highs, strict=True)
    )
    how = f"How much {what} changes when one input takes its low or its high value and everything is designed anew, all others as in the base. A missing bar: nothing fits there."
    head = ("input", "low, base, high", "at low (%)", "at high (%)", f"{what} at low", "base", "at high")
    return Figure(
        key=f"tornado-{what}",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(caption=f"Sensitivity of {what}", head=head, rows=rows_),
    )


def _pc(value: float | None) -> str:
    return "nothing fits" if value is None else f"{value:+.1f} %"
