"""Figures of break-evens: both sides over the varied value, every crossing marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhfsim.present import words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.html import plots, theme
from rlhfsim.present.input_names import input_name
from rlhfsim.present.tables import ValueKind, compact, kind_of, rounded
from rlhfsim.units import format
from rlhfsim.what_if.scenarios.result import PointBreakEven

WIDE = 20.0
"""Range of a break-even from which its axis is logarithmic."""
TICKS = 7
"""Labels on the axis of a break-even."""


def break_even(i: int, even: PointBreakEven) -> Figure:
    """Both sides over the varied value, with every crossing marked."""
    xs = [t.x for t in even.curve]
    log = even.low > 0 and even.high / even.low > WIDE
    ticks = _ticks(xs, log=log)
    layout = theme.layout(
        height=380,
        x=plots.text(input_name(even.path)),
        y=f"{even.of.replace('_', ' ')} ({even.of_unit})",
        xaxis={
            "tickvals": compact(ticks),
            "ticktext": [format(x, even.unit) or "0" for x in ticks],
            "tickangle": 0,
            **({"type": "log"} if log else {}),
        },
        yaxis={"rangemode": "tozero"},
        shapes=[theme.upright(rounded(x), "text", "dot") for x in even.crossings],
    )
    data = [
        _curve(even, "the point", [t.a for t in even.curve], "blue", "solid", "circle"),
        _curve(even, "held against", [t.b for t in even.curve], "orange", "dash", "square"),
    ]
    return Figure(
        f"break-even-{i}",
        words.capital(even.outcome),
        alt=f"Two curves over {input_name(even.path)}, from {format(even.low, even.unit)} to "
        f"{format(even.high, even.unit)}: {even.outcome}",
        how=f"{even.question} Both sides are designed anew at every mark; a vertical line is where they "
        "cross.",
        plot=plots.spec(data, layout),
        table=table_of(
            even.question,
            even.curve,
            Column(input_name(even.path), "x", kind_of(even.unit)),
            Column("the point", "a", _kind(even)),
            Column("held against", "b", _kind(even)),
        ),
    )


def _curve(
    even: PointBreakEven, name: str, ys: Sequence[float | None], colour: str, dash: str, symbol: str
) -> plots.Trace:
    xs = [t.x for t in even.curve]
    return plots.points(
        name,
        xs,
        ys,
        mode="lines+markers",
        line={"color": colour, "dash": dash},
        marker={"symbol": symbol, "size": 9},
        connectgaps=False,
        hovertext=[f"{format(x, even.unit)}: {_kind(even).shown(y)}" for x, y in zip(xs, ys, strict=True)],
        hoverinfo="text+name",
    )


def _ticks(xs: Sequence[float], *, log: bool) -> list[float]:
    """Values of the curve that can be labelled without touching each other."""
    at = [math.log(x) if log else x for x in xs]
    labelled: list[int] = []
    for i, place in enumerate(at):
        if not labelled or place - at[labelled[-1]] >= (at[-1] - at[0]) / TICKS:
            labelled.append(i)
    return [xs[i] for i in labelled]


def _kind(even: PointBreakEven) -> ValueKind:
    return kind_of(even.of_unit).where("nothing fits")
