"""Figures of trust: where the doubt about the step comes from, and how published steps were predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from rlhfsim.kernels.cost import Cost
from rlhfsim.plan import Plan
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import CHANGE, DIFFERENCE, FIGURE, FINE_SHARE, LIST, YES, added
from rlhfsim.validation.scoreboard import committed

SHOWN = 8
"""Coefficients with a bar of their own."""


class Doubt(NamedTuple):
    """What one coefficient adds to the interval of the step."""

    name: str
    down_s: float
    """Seconds that its P10 takes off."""
    up_s: float
    """Seconds that its P90 adds."""
    share: float
    """Share of the variance."""


def contributions(cost: Cost) -> tuple[Doubt, ...]:
    """The interval of a cost by coefficient, the widest first: parts on one coefficient move together."""
    down = added((p.rests_on, p.seconds - p.low) for p in cost.parts)
    up = added((p.rests_on, p.high - p.seconds) for p in cost.parts)
    total = sum((down[n] + up[n]) ** 2 for n in down) or 1.0
    doubts = [Doubt(name=n, down_s=down[n], up_s=up[n], share=(down[n] + up[n]) ** 2 / total) for n in down]
    return tuple(sorted((d for d in doubts if d.share > 0), key=lambda d: -d.share))


def sensitivity(plan: Plan, cost: Cost) -> Figure | None:
    """Seconds that each coefficient takes off or adds; None where nothing is uncertain."""
    doubts = contributions(cost)
    if not doubts:
        return None
    shown = doubts[:SHOWN]
    names = [words.spoken(d.name) for d in shown]
    hover = {"hovertemplate": "%{y}: %{x:+.3s} s<extra>%{fullData.name}</extra>"}
    data = [
        plots.bars("at its P10", names, [-d.down_s for d in shown], ("blue", "/"), **hover),
        plots.bars("at its P90", names, [d.up_s for d in shown], ("orange", ""), **hover),
    ]
    layout = plots.rows(
        names, "seconds that the step becomes shorter (left) or longer (right)", margin=140, barmode="overlay"
    )
    p = plan.prediction
    return Figure(
        "sensitivity",
        findings.sensitivity(names, [d.share for d in shown], (p.high_s - p.low_s) / 2, p.step_s),
        alt="Bars to both sides of the predicted step: "
        + "; ".join(f"{words.spoken(d.name)} {-d.down_s:+.3g} to {d.up_s:+.3g} s" for d in shown),
        how="How much the step moves when one coefficient is at the 10th or 90th percentile of what is "
        "believed of it. Independent doubts add in squares, so a few decide. Values and sources are listed "
        "under Assumptions.",
        plot=plots.spec(data, layout),
        table=table_of(
            "What each coefficient adds to the interval of the step",
            doubts,
            Column("coefficient", lambda d: words.spoken(d.name)),
            Column("at its P10 (s)", lambda d: -d.down_s, DIFFERENCE),
            Column("at its P90 (s)", "up_s", DIFFERENCE),
            Column("share of the doubt", "share", FINE_SHARE),
        ),
    )


# --- published steps --------------------------------------------------------------------------------


Step = Mapping[str, Any]
"""One published step: label, source, measured and predicted seconds, their P10 and P90, what was assumed."""


@cache
def published() -> tuple[Step, ...]:
    """RLHF steps that others published and that were predicted from their configuration alone."""
    return tuple(committed()["steps"])


def scored() -> tuple[int, float]:
    """Published steps that fitted nothing, and their median error."""
    errors = [abs(o["error"]) for o in published() if o["part"] == "report"]
    return len(errors), median(errors)


def scatter() -> Figure:
    """Predicted against measured, both on logarithmic axes."""
    rows = published()
    by_source: dict[str, list[Step]] = {}
    for o in rows:
        by_source.setdefault("used for fitting" if o["part"] == "fit" else _short(o["source"]), []).append(o)
    values = [x for o in rows for x in (o["measured"], o["predicted"])]
    axis = plots.logarithmic(values, 1.4, dtick=1)
    layout = theme.layout(
        height=460, x="measured seconds per step", y="predicted seconds per step", xaxis=axis, yaxis=axis
    )
    equal = plots.points(
        "equal",
        *[[min(values) / 2, max(values) * 2]] * 2,
        mode="lines",
        line={"color": "grey", "dash": "dash"},
        hoverinfo="skip",
        meta="guide",
    )
    count, error = scored()
    return Figure(
        "published",
        findings.scatter(
            error, count, sum(o["part"] == "report" and o["low"] <= o["measured"] <= o["high"] for o in rows)
        ),
        alt="Points of measured and predicted seconds around the line of equality, "
        f"from {min(values):.3g} to {max(values):.3g} s",
        how="On the line prediction and publication agree; bars are the predicted P10 to P90. No row's result"
        " enters its own prediction; rows that fitted a constant are marked and not counted.",
        plot=plots.spec([equal, *(_points(i, *item) for i, item in enumerate(by_source.items()))], layout),
        table=table_of(
            "Published RLHF steps",
            rows,
            Column("run", "label"),
            Column("measured (s)", "measured", FIGURE),
            Column("predicted (s)", "predicted", FIGURE),
            Column("error", kind=CHANGE),
            Column("fitted a constant", lambda o: o["part"] == "fit", YES),
            Column("blanks filled by assumption", "assumptions", LIST),
            Column("source"),
        ),
    )


def _short(source: str) -> str:
    """A publication in a legend: its repository, or the end of its address."""
    return source.split("@" if "@" in source else "/")[0]


def _points(i: int, name: str, rows: list[Step]) -> plots.Trace:
    return plots.points(
        name,
        [o["measured"] for o in rows],
        [o["predicted"] for o in rows],
        error_y=plots.whiskers(
            [o["high"] - o["predicted"] for o in rows], [o["predicted"] - o["low"] for o in rows], "grey"
        ),
        marker={**theme.nth(i), "size": 10},
        hovertext=[
            f"<b>{plots.text(o['label'])}</b><br>measured {o['measured']:.4g} s, "
            f"predicted {o['predicted']:.4g} s"
            for o in rows
        ],
        hoverinfo="text",
    )


def outcome_assumptions() -> Mapping[str, int]:
    """Blank cells of published steps that were filled, with how many rows rest on each."""
    return Counter(text for o in published() for text in o["assumptions"])
