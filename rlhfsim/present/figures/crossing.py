"""Figures of break-evens: both sides over the varied value, every crossing marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Figure, Table, compact, number
from rlhfsim.units import format
from rlhfsim.what_if.scenarios.result import BreakEven

WIDE = 20.0
"""Range of a break-even from which its axis is logarithmic."""
TICKS = 7
"""Labels on the axis of a break-even."""


def break_even(i: int, found: BreakEven) -> Figure:
    """Both sides over the varied value, with every crossing marked."""
    xs = [t.x for t in found.curve]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": compact(xs),
            "y": compact(ys),
            "line": {"color": theme.colour(shade), "dash": dash},
            "marker": {"symbol": symbol, "size": 9},
            "connectgaps": False,
            "hovertext": [
                f"{format(x, found.unit)}: {_worth(y, found)}" for x, y in zip(xs, ys, strict=True)
            ],
            "hoverinfo": "text+name",
        }
        for name, ys, shade, dash, symbol in (
            ("the point", [t.a for t in found.curve], "blue", "solid", "circle"),
            ("held against", [t.b for t in found.curve], "orange", "dash", "square"),
        )
    ]
    log = found.low > 0 and found.high / found.low > WIDE
    ticks = _ticks(xs, log=log)
    axis: dict[str, Any] = {
        "tickvals": compact(ticks),
        "ticktext": [format(x, found.unit) or "0" for x in ticks],
        "tickangle": 0,
        **({"type": "log"} if log else {}),
    }
    layout = theme.layout(
        height=380,
        x=plots.text(found.path),
        y=f"{found.of.replace('_', ' ')} ({found.of_unit})",
        xaxis=axis,
        yaxis={"rangemode": "tozero"},
        shapes=[theme.upright(x, "text", "dot") for x in found.crossings],
    )
    rows = tuple(
        (
            number(t.x, format(t.x, found.unit)),
            number(t.a, _worth(t.a, found)),
            number(t.b, _worth(t.b, found)),
        )
        for t in found.curve
    )
    alt = f"Two curves over {found.path}, from {format(found.low, found.unit)} to {format(found.high, found.unit)}: {found.outcome}"
    how = f"{found.question} Both sides are designed anew at every mark; a vertical line is where they cross."
    return Figure(
        key=f"break-even-{i}",
        title=words.capital(found.outcome),
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(caption=found.question, head=(found.path, "the point", "held against"), rows=rows),
    )


def _ticks(xs: Sequence[float], *, log: bool) -> list[float]:
    """Values of the curve that can be labelled without touching each other."""
    at = [math.log(x) if log else x for x in xs]
    kept: list[int] = []
    for i, place in enumerate(at):
        if not kept or place - at[kept[-1]] >= (at[-1] - at[0]) / TICKS:
            kept.append(i)
    return [xs[i] for i in kept]


def _worth(value: float | None, found: BreakEven) -> str:
    return "nothing fits" if value is None else format(value, found.of_unit)
