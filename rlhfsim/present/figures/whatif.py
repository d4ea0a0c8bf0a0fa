"""Figures of a what-if: time against money of its points, and the tornado."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlhfsim.present import findings, words
from rlhfsim.present.answers.odds import CERTAIN, TITLES
from rlhfsim.present.answers.tree import Column, Figure, TypedTable, table_of
from rlhfsim.present.html import plots, theme
from rlhfsim.present.input_names import input_name
from rlhfsim.present.tables import (
    COUNT,
    DASH,
    DIFFERENCE,
    FIGURE,
    LIST,
    NEVER,
    PROBABILITY,
    QUANTITIES,
    SECONDS,
    kind_of,
    rounded,
)
from rlhfsim.units import DAY, HOUR, Dimension
from rlhfsim.what_if.scenarios.against_base import by, relative
from rlhfsim.what_if.scenarios.points import worded
from rlhfsim.what_if.scenarios.result import PointResult, WhatIf


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
    changes = (f"{input_name(path)}: {worded(path, value)}" for path, value in point.changes.items())
    return "; ".join(changes) or "as it is"


# --- points -----------------------------------------------------------------------------------------


def pareto(result: WhatIf, table: TypedTable) -> Figure | None:
    """Points by time and money, those that no other one beats joined; None where nothing fits."""
    fits = [p for p in result.everything if p.seconds is not None and money_of(p) is not None]
    known = [p for p in fits if not p.other_work]
    if not known:
        return None
    axis, (scale, unit) = axis_of(result), _time_scale(result)
    front = sorted((p for p in known if p.on_front), key=lambda p: p.seconds or 0.0)
    joined = plots.points(
        "no other point beats these",
        [(p.seconds or 0.0) / scale for p in front],
        [money_of(p) for p in front],
        mode="lines",
        line={"color": "grey", "dash": "dot"},
        hoverinfo="skip",
    )
    data = [joined, *(_point(i, p, p is result.base, scale, axis) for i, p in enumerate(known))]
    layout = theme.layout(
        height=440, x=f"{unit} per {result.per} (shorter is better)", y=f"{axis} (lower is better)"
    )
    return Figure(
        "pareto",
        finding(result),
        alt=f"Points of time and {axis}: "
        + "; ".join(f"{p.name} {words.seconds(p.seconds or 0.0)}, {money_of(p):,.3g}" for p in known),
        how="Down and to the left is better. The star is the base; points on the dotted line are beaten by no"
        " other point in both time and money, hollow ones are."
        + (
            f" Points that do other work are in the table only ({len(fits) - len(known)})."
            if known != fits
            else ""
        ),
        plot=plots.spec([trace for trace in data if trace["x"]], layout),
        table=table,
    )


def _time_scale(result: WhatIf) -> tuple[float, str]:
    longest = max(p.seconds or 0.0 for p in result.everything)
    return (DAY, "days") if longest > 2 * DAY else (HOUR, "hours") if longest > 2 * HOUR else (1.0, "seconds")


def _point(i: int, p: PointResult, base: bool, scale: float, axis: str) -> plots.Trace:
    look = {"color": "red", "symbol": "star"} if base else theme.nth(i)
    symbol = look["symbol"] if base else look["symbol"].replace("star", "pentagon")
    return plots.points(
        p.name,
        [(p.seconds or 0.0) / scale],
        [money_of(p)],
        hoverinfo="text",
        cliponaxis=False,
        hovertext=[
            f"<b>{plots.text(p.name)}</b><br>{words.seconds(p.seconds or 0.0)}, "
            f"{money_of(p):,.4g} {axis}<br>{p.gpus:,} GPUs"
        ],
        marker={
            **look,
            "symbol": symbol if p.on_front else f"{symbol}-open",
            "size": 18 if base else 13,
            "line": {"width": 2},
        },
    )


def finding(result: WhatIf) -> str:
    """What the points say against the base; those that do other work by the sample or the token."""
    unit = "cost" if axis_of(result).startswith("USD") else "GPU-hours"
    base, *same = [(p.name, p.seconds, money_of(p)) for p in result.everything if not p.other_work]
    others = [
        (p.name, by(p, result.base), change, relative(p, result.base, money_of))
        for p in result.points
        if p.other_work and (change := relative(p, result.base, lambda q: q.seconds)) is not None
    ]
    parts = [findings.points(base, same, unit)] if same or not others else []
    return ". ".join([*parts, findings.other_work(base[0], others, unit)] if others else parts)


def points(result: WhatIf) -> TypedTable:
    """Every point, the base first; of one that does not fit only its name, its changes and why."""
    scale, unit = _time_scale(result)
    base, run = result.base, result.per == "run"
    asked = next((p.targets for p in result.everything if p.targets), ())
    chances = [i for i, target in enumerate(asked) if target.quantity not in CERTAIN]
    return table_of(
        "Points of the scenario",
        result.everything,
        Column("", lambda p: "#" if p.other_work else "*" if p.on_front else ""),
        Column("point", "name"),
        Column("changes", changed, fit=NEVER, spare=1),
        Column("GPUs", _planned(lambda p: p.gpus), COUNT),
        Column("plan", lambda p: p.plan.architecture if p.plan else p.shortage or "nothing fits"),
        Column("step", "plan.prediction.step_s", SECONDS, spare=6 * run),
        Column(
            "P10-P90",
            _planned(lambda p: (p.plan.prediction.low_s, p.plan.prediction.high_s, "s")),
            QUANTITIES,
            spare=3,
        ),
        Column(f"{unit} per {result.per}", _planned(lambda p: (p.seconds or 0.0) / scale), FIGURE),
        Column("against base", _planned(lambda p: _relative(p, base, lambda q: q.seconds)), DASH, spare=4),
        Column(axis_of(result), _planned(money_of), FIGURE),
        Column("cost against base", _planned(lambda p: _relative(p, base, money_of)), DASH, spare=5),
        *(
            Column(
                TITLES[asked[i].quantity],
                lambda p, i=i: p.targets[i].probability if p.plan and p.targets else None,  # None: no price
                PROBABILITY,
            )
            for i in chances
        ),
        Column("other work", lambda p: words.work_parts(p.other_work), DASH, spare=2),
        notes=tuple(_legend(result, [asked[i].text for i in chances])),
    )


def _legend(result: WhatIf, targets: list[str]) -> Iterator[str]:
    if targets:
        yield f"percentages: probability of {', '.join(targets)}"
    if any(p.on_front for p in result.everything):
        yield "* no point that does the same work is as fast and as cheap"
    if any(p.other_work for p in result.points):
        yield "# other work than the base: compared by what a sample or a token of it takes"
    yield from (f"assumed: {text}" for text in result.assumptions)


def _planned(shown: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is shown of a point that has a plan; None of the others."""
    return lambda p: None if p.plan is None else shown(p)


def _relative(point: PointResult, base: PointResult, of: Callable[[PointResult], float | None]) -> str | None:
    change, how = relative(point, base, of), by(point, base)
    return None if change is None else words.signed(change) + ("" if how == "work" else f" per {how}")


# --- tornado ----------------------------------------------------------------------------------------


class InputSwing(NamedTuple):
    """One input of a tornado."""

    name: str
    labels: tuple[str, str, str]
    """Labels of its low value, the base and its high value."""
    values: tuple[float | None, float | None, float | None]
    """What comes out of them; None: nothing fits."""

    def change(self, i: int) -> float | None:
        """Per cent against the base."""
        value, base = self.values[i], self.values[1]
        return None if value is None or not base else (value / base - 1) * 100


def tornado(result: WhatIf) -> tuple[Figure, ...]:
    """What each input moves in time, and in money where it is known."""
    bars = [
        (
            b,
            input_name(b.path) + (" (other work)" if b.other_work else ""),
            (b.low_label, b.base_label, b.high_label),
        )
        for b in result.tornado
    ]
    time = [InputSwing(name, labels, (b.low_s, b.base_s, b.high_s)) for b, name, labels in bars]
    money = [InputSwing(name, labels, (b.low_usd, b.base_usd, b.high_usd)) for b, name, labels in bars]
    figures = _tornado(result, "time", "s", time), _tornado(result, "money", "usd", money)
    return tuple(figure for figure in figures if figure is not None)


def _tornado(result: WhatIf, what: str, unit: Dimension, inputs: list[InputSwing]) -> Figure | None:
    known = [e for e in inputs if e.change(0) is not None or e.change(2) is not None]
    if not known:
        return None
    known.sort(key=lambda e: -max(abs(e.change(0) or 0.0), abs(e.change(2) or 0.0)))
    names = [e.name for e in known]
    reach = max(abs(e.change(i) or 0.0) for e in known for i in (0, 2)) or 1.0
    layout = plots.rows(
        names,
        f"change of {what} of a {result.per}, %",
        each=38,
        margin=140,
        barmode="overlay",
        xaxis={"range": [rounded(-1.35 * reach), rounded(1.35 * reach)]},
    )
    first = known[0]
    return Figure(
        f"tornado-{what}",
        findings.tornado(what, first.name, first.change(0), first.change(2)),
        alt="Bars to both sides of the base: "
        + "; ".join(
            f"{e.name} {findings.change(e.change(0))} to {findings.change(e.change(2))}" for e in known
        ),
        how=f"How much {what} changes when one input takes its low or its high value and everything is "
        "designed anew, all others as in the base. A missing bar: nothing fits there.",
        plot=plots.spec(sides(known, names), layout),
        table=table_of(
            f"Sensitivity of {what}",
            known,
            Column("input", "name"),
            Column("low, base, high", "labels", LIST),
            Column("at low (%)", lambda e: e.change(0), DIFFERENCE.where("nothing fits")),
            Column("at high (%)", lambda e: e.change(2), DIFFERENCE.where("nothing fits")),
            *(
                Column(title, lambda e, i=i: e.values[i], kind_of(unit))
                for i, title in enumerate((f"{what} at low", "base", "at high"))
            ),
        ),
    )


def sides(known: list[InputSwing], names: list[str]) -> Iterator[plots.Trace]:
    """Bars of the low and of the high values."""
    for i, name, look in ((0, "low value", ("blue", "/")), (2, "high value", ("orange", ""))):
        yield plots.bars(
            name,
            names,
            [e.change(i) for e in known],
            look,
            text=[plots.text(e.labels[i]) for e in known],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y} at %{text}: %{x:+.3s} %<extra></extra>",
        )
