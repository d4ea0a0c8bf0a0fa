"""Figures of the choice: time against money, where rivals lose, and what would turn the answer over."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from rlhfsim.choice import BreakEven, Choice, RunnerUp
from rlhfsim.plan import Plan, Prediction
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import GPUS, Column, Figure, TypedTable, table_of
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import DIFFERENCE, FIGURE, SHARE, compact, rounded
from rlhfsim.search.explain import own_kind, shares
from rlhfsim.units import HOUR, format
from rlhfsim.what_if.sizing import Sizes

BEST = "best"
"""What the best plan is called where a simpler one is chosen."""
BEYOND = 1.35
"""Ends of the axis of time, as a factor of the shortest and the longest one."""
ROOM = 0.25
"""Ends of the axis of money, in times the range of what it shows."""
TERMS = 8
"""Calls that the comparison with the runner-up shows."""


# --- time against money -----------------------------------------------------------------------------


def cost_of(plan: Plan) -> float:
    """USD of a step; GPU-hours where no price is known."""
    p = plan.prediction
    return words.gpus(plan) * p.step_s / HOUR if p.usd_per_step is None else p.usd_per_step


def pareto(plan: Plan, sizes: Sizes) -> Figure:
    """Every candidate as a point: seconds and money of a step."""
    unit = "cost" if plan.prediction.usd_per_step is not None else "GPU-hours"
    axis = "USD per step" if unit == "cost" else "GPU-hours per step"
    rivals = _others(plan.choice)
    points = [(words.gpus(p), p.prediction.step_s, cost_of(p)) for p in sizes.found]
    own = (words.gpus(plan), plan.prediction.step_s, cost_of(plan))
    times = [own[1], *(t for _, t, _ in points), *(r.step_s for r in rivals)]
    layout = theme.layout(
        height=340,
        x="seconds per step (shorter is better)",
        y=f"{axis} (lower is better)",
        xaxis=plots.logarithmic(times, BEYOND, **_ticks(times)),
        yaxis={"range": _room([own[2], *(c for *_, c in points), *(_cost(plan, r) for r in rivals)])},
    )
    data = [_sizes(plan, sizes), *_rivals(plan, rivals), _chosen(plan)]
    return Figure(
        "pareto",
        findings.sizes(own, points, unit) if points else _alone(plan, rivals),
        alt=f"Points of step time and {axis}: the chosen plan at {own[1]:.4g} s and {own[2]:.3g}"
        + "".join(f"; {g} GPUs at {t:.4g} s and {c:.3g}" for g, t, c in points),
        how="Down and to the left is better. The star is the chosen plan; circles are the best plans of other"
        " numbers of GPUs, joined in order; the other shapes are the best plans of other kinds on the same"
        " GPUs, where money follows time.",
        plot=plots.spec([trace for trace in data if trace["x"]], layout),
        table=_candidates(plan, sizes, axis),
    )


def _others(choice: Choice | None) -> tuple[RunnerUp, ...]:
    """The best plan where another one is chosen, then the runners-up."""
    if choice is None:
        return ()
    best = choice.best
    first = () if best is None else (replace(best, label=f"{BEST}: {best.label}"),)
    return (*first, *choice.runners_up)


def _ticks(times: list[float]) -> dict[str, Any]:
    """Round numbers on a logarithmic axis, so that there is never only one label."""
    low, high = math.floor(math.log10(min(times) / 2)), math.ceil(math.log10(max(times) * 2))
    values = [rounded(m * 10.0**e) for e in range(low, high + 1) for m in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [f"{v:g}" for v in values]}


def _alone(plan: Plan, rivals: tuple[RunnerUp, ...]) -> str:
    if not rivals:
        return "There is no other candidate to hold it against"
    longer = words.percent(abs(rivals[0].step_s / plan.prediction.step_s - 1))
    if rivals[0].step_s < plan.prediction.step_s:
        return f"The fastest plan takes {longer} less and costs as much less, and asks more of an operator"
    return (
        f"The best other kind of plan takes {longer} longer and costs as much more: "
        "on one cluster money follows time"
    )


def _sizes(plan: Plan, sizes: Sizes) -> plots.Trace:
    plans = sorted([*sizes.found, plan], key=words.gpus) if sizes.found else []
    return plots.points(
        "other numbers of GPUs",
        [p.prediction.step_s for p in plans],
        [cost_of(p) for p in plans],
        mode="lines+markers+text",
        text=["" if p is plan else f"{words.gpus(p):,} GPUs" for p in plans],
        textposition=[_beside(i, len(plans)) for i in range(len(plans))],
        cliponaxis=False,
        line={"color": "grey", "dash": "dot", "width": 1.5},
        marker={"color": "blue", "size": 12, "symbol": "circle"},
        hovertext=[f"<b>{words.gpus(p):,} GPUs</b>, {plots.text(own_kind(p))}{_hover(p)}" for p in plans],
        hoverinfo="text",
    )


def _beside(i: int, count: int) -> str:
    """Where the name of a size is drawn: the first and the last one's inside the figure."""
    return "top right" if i == 0 else "top left" if i == count - 1 else "top center"


def _room(costs: list[float]) -> list[float]:
    """An axis with room for a name below and above every point."""
    low, high = min(costs), max(costs)
    more = ROOM * ((high - low) or high)
    return [rounded(low - more), rounded(high + more)]


def _hover(plan: Plan) -> str:
    return f"<br>{plan.prediction.step_s:.4g} s, {cost_of(plan):.3g} a step"


def _rivals(plan: Plan, rivals: tuple[RunnerUp, ...]) -> list[plots.Trace]:
    return [
        plots.points(
            r.label,
            [r.step_s],
            [_cost(plan, r)],
            marker={**theme.nth(i), "size": 11},
            hovertext=[
                f"<b>{plots.text(r.label)}</b><br>actor {plots.text(r.actor)}"
                f"<br>rollout {plots.text(r.rollout or '-')}<br>{r.step_s:.4g} s"
            ],
            hoverinfo="text",
        )
        for i, r in enumerate(rivals, start=1)
    ]


def _cost(plan: Plan, rival: RunnerUp) -> float:
    return rival.usd_per_step if rival.usd_per_step is not None else words.gpus(plan) * rival.step_s / HOUR


def _chosen(plan: Plan) -> plots.Trace:
    return plots.points(
        "chosen plan",
        [plan.prediction.step_s],
        [cost_of(plan)],
        mode="markers+text",
        text=[f"chosen, {words.gpus(plan):,} GPUs"],
        textposition="bottom center",
        cliponaxis=False,
        marker={"color": "red", "size": 19, "symbol": "star", "line": {"color": "text", "width": 1}},
        hovertext=[f"<b>chosen: {plots.text(own_kind(plan))}</b>, {words.gpus(plan):,} GPUs{_hover(plan)}"],
        hoverinfo="text",
    )


class CandidateRow(NamedTuple):
    """A plan in the table of candidates."""

    what: str
    gpus: int
    kind: str
    actor: str
    rollout: str
    prediction: Prediction | RunnerUp
    cost: float


def _candidates(plan: Plan, sizes: Sizes, axis: str) -> TypedTable:
    def of(what: str, p: Plan) -> CandidateRow:
        return CandidateRow(
            what, words.gpus(p), own_kind(p), *words.layout_labels(p), p.prediction, cost_of(p)
        )

    rivals = [
        CandidateRow(
            BEST if r.label.startswith(BEST) else "other kind",
            words.gpus(plan),
            r.label,
            r.actor,
            r.rollout or "-",
            r,
            _cost(plan, r),
        )
        for r in _others(plan.choice)
    ]
    return table_of(
        "Candidates",
        [of("chosen", plan), *rivals, *(of("other size", p) for p in sizes.found)],
        Column("", "what"),
        GPUS,
        Column("kind"),
        Column("actor"),
        Column("rollout"),
        Column("step (s)", "prediction.step_s", FIGURE),
        Column("P10 (s)", "prediction.low_s", FIGURE),
        Column("P90 (s)", "prediction.high_s", FIGURE),
        Column(axis, "cost", FIGURE),
        Column("memory", lambda c: words.full(c.prediction), SHARE),
        Column("risk of running out", "prediction.probability_out_of_memory", SHARE),
    )


# --- where rivals lose ------------------------------------------------------------------------------


def rival(plan: Plan, choice: Choice) -> Figure | None:
    """The step of the plan and of the best plan that clearly loses, call by call."""
    step = plan.prediction.step_s
    other = next((r for r in choice.runners_up if r.step_s > step * (1 + findings.CLEAR)), None)
    if other is None:
        return None
    own, theirs = shares(plan), other.by_call_s
    more = {c: theirs.get(c, 0.0) - own.get(c, 0.0) for c in dict.fromkeys([*own, *theirs])}
    calls = sorted(more, key=lambda c: -abs(more[c]))[:TERMS]
    rows = [(words.capital(words.call(c)), own.get(c, 0.0), theirs.get(c, 0.0), more[c]) for c in calls]
    names = [name for name, *_ in rows]
    data = [
        plots.bars(f"chosen: {own_kind(plan)}", names, [row[1] for row in rows], ("red", "")),
        plots.bars(other.label, names, [row[2] for row in rows], ("blue", "/")),
    ]
    layout = plots.rows(names, "seconds of the step", each=32, margin=110, barmode="group")
    return Figure(
        "rival",
        findings.rival(other.label, other.step_s - step, step, more),
        alt="Pairs of bars, one a call: "
        + "; ".join(f"{n} {a:.3g} s against {b:.3g} s" for n, a, b, _ in rows),
        how="The step of both plans by call, the largest differences first; over all calls they add up to "
        f"{words.seconds(step)} and {words.seconds(other.step_s)}. Calls that run at once share their time.",
        plot=plots.spec(data, layout),
        table=table_of(
            "Seconds of the step by call",
            rows,
            Column("call", 0),
            Column("chosen (s)", 1, FIGURE),
            Column(f"{other.label} (s)", 2, FIGURE),
            Column("more (s)", 3, DIFFERENCE),
        ),
    )


# --- what would turn the answer over ----------------------------------------------------------------


def break_evens(choice: Choice) -> Figure | None:
    """Break-evens as factors of today's values; None where nothing that was tried turns the answer over."""
    if not choice.break_evens:
        return None
    ranked = sorted(choice.break_evens, key=lambda b: abs(math.log(b.factor)))
    layout = plots.rows(
        [_direction(b) for b in ranked],
        "times today's value",
        each=38,
        margin=80,
        legend=False,
        xaxis=plots.logarithmic(
            [1.0, *(b.factor for b in ranked)],
            1.4,
            tickvals=[0.125, 0.25, 0.5, 1, 2, 4, 8],
            ticktext=["1/8", "1/4", "1/2", "today", "2", "4", "8"],
        ),
        shapes=[theme.upright(1, "text")],
    )
    nearest = ranked[0]
    return Figure(
        "break_evens",
        findings.break_evens(nearest.change, nearest.factor, nearest.winner),
        alt="; ".join(sentence(b, choice) for b in ranked),
        how="A diamond is a value at which another kind of plan is the best; the further from today's"
        " line, the safer the choice. One change at a time, both kinds designed anew there.",
        plot=plots.spec([_diamonds(ranked, choice)], layout),
        table=table_of(
            "Break-evens, one change at a time, both kinds designed anew there",
            ranked,
            Column("change", _direction),
            Column("times today's", "factor", FIGURE),
            Column("today", lambda b: _value(b, 1.0)),
            Column("break-even", lambda b: _value(b, b.factor)),
            Column("then best", "winner"),
            Column("its step (s)", "step_s", FIGURE),
            Column(
                "chosen kind (s)" if choice.best is None else "kind fastest now (s)",
                "chosen_step_s",
                FIGURE.where("does not fit"),
            ),
        ),
    )


def _direction(b: BreakEven) -> str:
    return f"{b.change} {'up' if b.factor > 1 else 'down'}"


def _diamonds(ranked: list[BreakEven], choice: Choice) -> plots.Trace:
    """Factors, each joined with today's line."""
    return {
        "type": "scatter",
        "mode": "markers",
        "y": [plots.text(_direction(b)) for b in ranked],
        "x": compact([b.factor for b in ranked]),
        "marker": {"size": 14, "symbol": "diamond", "color": "blue"},
        "hovertext": [plots.text(sentence(b, choice)) for b in ranked],
        "hoverinfo": "text",
        "error_x": plots.whiskers(
            [max(0.0, 1 - b.factor) for b in ranked],
            [max(0.0, b.factor - 1) for b in ranked],
            "grey",
            thickness=4,
        ),
    }


def sentence(b: BreakEven, choice: Choice) -> str:
    """One break-even in words."""
    now = findings.chosen_then(b.chosen_step_s, words.seconds, simpler=choice.best is not None)
    return (
        f"{b.change} of {_value(b, b.factor)} (now {_value(b, 1.0)}): "
        f"{b.winner} takes {words.seconds(b.step_s)}, {now}"
    )


def _value(b: BreakEven, factor: float) -> str:
    return f"{factor:.2g} times" if b.now is None else format(b.now * factor, b.unit)
