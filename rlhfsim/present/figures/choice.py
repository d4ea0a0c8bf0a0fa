"""Figures of the choice: time against money, where rivals lose, and what would turn the answer over."""

from __future__ import annotations

import math
from typing import Any

from rlhfsim.plan import BreakEven, Choice, Plan, RunnerUp
from rlhfsim.present import findings
from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.present.sizes import Sizes, cost_of
from rlhfsim.search.explain import kind, shares
from rlhfsim.units import HOUR, format

TERMS = 8
"""Calls that the comparison with the runner-up shows."""


# --- time against money -----------------------------------------------------------------------------


def pareto(plan: Plan, sizes: Sizes) -> Figure:
    """Every candidate as a point: seconds and money of a step."""
    unit = "cost" if plan.prediction.usd_per_step is not None else "GPU-hours"
    axis = "USD per step" if unit == "cost" else "GPU-hours per step"
    rivals = plan.choice.runners_up if plan.choice else ()
    points = [(words.gpus(p), p.prediction.step_s, cost_of(p)) for p in sizes.found]
    mine = (words.gpus(plan), plan.prediction.step_s, cost_of(plan))
    title = findings.sizes(mine, points, unit) if points else _alone(plan, rivals)
    data = [_sizes(plan, sizes), *_rivals(plan, rivals), _chosen(plan)]
    times = [mine[1], *(t for _, t, _ in points), *(r.step_s for r in rivals)]
    layout = theme.layout(
        height=420,
        x="seconds per step (shorter is better)",
        y=f"{axis} (lower is better)",
        xaxis={
            "type": "log",
            "range": [rounded(math.log10(min(times) / 1.35)), rounded(math.log10(max(times) * 1.35))],
            **_ticks(times),
        },
    )
    alt = f"Points of step time and {axis}: the chosen plan at {mine[1]:.4g} s and {mine[2]:.3g}" + "".join(
        f"; {g} GPUs at {t:.4g} s and {c:.3g}" for g, t, c in points
    )
    how = "Down and to the left is better. The star is the chosen plan; circles are the best plans of other numbers of GPUs, joined in order; the other shapes are the best plans of other kinds on the same GPUs, where money follows time."
    return Figure(
        key="pareto",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec([d for d in data if d["x"]], layout),
        table=_candidates(plan, sizes, axis),
    )


def _ticks(times: list[float]) -> dict[str, Any]:
    """Round numbers on a logarithmic axis, so that no label stands alone."""
    low, high = math.floor(math.log10(min(times) / 2)), math.ceil(math.log10(max(times) * 2))
    values = [rounded(m * 10.0**e) for e in range(low, high + 1) for m in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [f"{v:g}" for v in values]}


def _alone(plan: Plan, rivals: tuple[RunnerUp, ...]) -> str:
    if not rivals:
        return "There is no other candidate to hold it against"
    more = rivals[0].step_s / plan.prediction.step_s - 1
    return f"The best other kind of plan takes {words.percent(more)} longer and costs as much more: on one cluster money follows time"


def _sizes(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    plans = sorted([*sizes.found, plan], key=words.gpus) if sizes.found else []
    return {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": "other numbers of GPUs",
        "x": compact([p.prediction.step_s for p in plans]),
        "y": compact([cost_of(p) for p in plans]),
        "text": ["" if p is plan else f"{words.gpus(p):,} GPUs" for p in plans],
        "textposition": "top right",
        "line": {"color": theme.colour("grey"), "dash": "dot", "width": 1.5},
        "marker": {"color": theme.colour("blue"), "size": 12, "symbol": "circle"},
        "hovertext": [
            f"<b>{words.gpus(p):,} GPUs</b>, {plots.text(kind(p))}<br>{p.prediction.step_s:.4g} s, {cost_of(p):.3g} a step"
            for p in plans
        ],
        "hoverinfo": "text",
    }


def _rivals(plan: Plan, rivals: tuple[RunnerUp, ...]) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": plots.text(r.label),
            "x": compact([r.step_s]),
            "y": compact([_cost(plan, r)]),
            "marker": {
                "color": theme.colour(theme.KINDS[(i + 1) % len(theme.KINDS)]),
                "size": 11,
                "symbol": theme.SYMBOLS[(i + 1) % len(theme.SYMBOLS)],
            },
            "hovertext": [
                f"<b>{plots.text(r.label)}</b><br>actor {plots.text(r.actor)}<br>rollout {plots.text(r.rollout or '-')}<br>{r.step_s:.4g} s"
            ],
            "hoverinfo": "text",
        }
        for i, r in enumerate(rivals)
    ]


def _cost(plan: Plan, rival: RunnerUp) -> float:
    return rival.usd_per_step if rival.usd_per_step is not None else words.gpus(plan) * rival.step_s / HOUR


def _chosen(plan: Plan) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "chosen plan",
        "x": compact([plan.prediction.step_s]),
        "y": compact([cost_of(plan)]),
        "text": [f"chosen, {words.gpus(plan):,} GPUs"],
        "textposition": "bottom left",
        "marker": {
            "color": theme.colour("red"),
            "size": 19,
            "symbol": "star",
            "line": {"color": theme.colour("text"), "width": 1},
        },
        "hovertext": [
            f"<b>chosen: {plots.text(kind(plan))}</b>, {words.gpus(plan):,} GPUs<br>{plan.prediction.step_s:.4g} s, {cost_of(plan):.3g} a step"
        ],
        "hoverinfo": "text",
    }


def _candidates(plan: Plan, sizes: Sizes, axis: str) -> Table:
    def row(
        name: str, gpus: int, label: str, actor: str, rollout: str | None, p: Any, cost: float
    ) -> tuple[Any, ...]:
        return (
            cell(name),
            number(gpus, f"{gpus:,}"),
            cell(label),
            cell(actor),
            cell(rollout or "-"),
            number(p.step_s, f"{p.step_s:,.4g}"),
            number(p.low_s, f"{p.low_s:,.3g}"),
            number(p.high_s, f"{p.high_s:,.3g}"),
            number(cost, f"{cost:,.3g}"),
            cell(words.percent(p.peak_memory_bytes / p.capacity_bytes)),
            cell(words.percent(p.probability_out_of_memory)),
        )

    def of(name: str, p: Plan) -> tuple[Any, ...]:
        rollout = p.placement.rollout
        return row(
            name,
            words.gpus(p),
            kind(p),
            p.placement.actor.layout.label,
            rollout.layout.label if rollout else None,
            p.prediction,
            cost_of(p),
        )

    rivals = plan.choice.runners_up if plan.choice else ()
    rows = [
        of("chosen", plan),
        *(
            row("other kind", words.gpus(plan), r.label, r.actor, r.rollout, r, _cost(plan, r))
            for r in rivals
        ),
    ]
    rows += [of("other size", p) for p in sizes.found]
    head = (
        "",
        "GPUs",
        "kind",
        "actor",
        "rollout",
        "step (s)",
        "P10 (s)",
        "P90 (s)",
        axis,
        "memory",
        "risk of running out",
    )
    return Table(caption="Candidates", head=head, rows=tuple(rows))


# --- where rivals lose ------------------------------------------------------------------------------


def rival(plan: Plan, choice: Choice) -> Figure | None:
    """The step of the plan and of the best plan that clearly loses, call by call."""
    step = plan.prediction.step_s
    other = next((r for r in choice.runners_up if r.step_s > step * (1 + findings.CLEAR)), None)
    if other is None:
        return None
    mine, theirs = shares(plan), other.by_call_s
    more = {c: theirs.get(c, 0.0) - mine.get(c, 0.0) for c in dict.fromkeys([*mine, *theirs])}
    calls = sorted(more, key=lambda c: -abs(more[c]))[:TERMS]
    names = [words.capital(words.call(c)) for c in calls]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plots.text(label),
            "y": [plots.text(n) for n in names],
            "x": compact([by.get(c, 0.0) for c in calls]),
            "marker": theme.fill(pair),
            "hovertemplate": "%{y}: %{x:.3s} s<extra>%{fullData.name}</extra>",
        }
        for label, by, pair in (
            (f"chosen: {kind(plan)}", mine, ("red", "")),
            (other.label, theirs, ("blue", "/")),
        )
    ]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=40, frame=130),
        x="seconds of the step",
        barmode="group",
        yaxis=theme.rows(names),
    )
    alt = "Pairs of bars, one a call: " + "; ".join(
        f"{n} {mine.get(c, 0.0):.3g} s against {theirs.get(c, 0.0):.3g} s"
        for n, c in zip(names, calls, strict=True)
    )
    rows = tuple(
        (
            cell(n),
            *(number(v, f"{v:,.3g}") for v in (mine.get(c, 0.0), theirs.get(c, 0.0))),
            cell(f"{more[c]:+,.3g}"),
        )
        for n, c in zip(names, calls, strict=True)
    )
    title = findings.rival(other.label, other.step_s - step, step, more)
    how = f"The step of both plans by call, the largest differences first; over all calls they add up to {words.seconds(step)} and {words.seconds(other.step_s)}. Calls that run at once share their time."
    return Figure(
        key="rival",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=Table(
            caption="Seconds of the step by call",
            head=("call", "chosen (s)", f"{other.label} (s)", "more (s)"),
            rows=rows,
        ),
    )


# --- what would turn the answer over ----------------------------------------------------------------


def break_evens(choice: Choice) -> Figure | None:
    """Break-evens as factors of today's values; None where nothing that was tried turns the answer over."""
    if not choice.break_evens:
        return None
    ranked = sorted(choice.break_evens, key=lambda f: abs(math.log(f.factor)))
    names = [f"{f.change} {'up' if f.factor > 1 else 'down'}" for f in ranked]
    first = ranked[0]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "y": [plots.text(n) for n in names],
            "x": compact([f.factor for f in ranked]),
            "marker": {"size": 14, "symbol": "diamond", "color": theme.colour("blue")},
            "hovertext": [plots.text(sentence(f)) for f in ranked],
            "hoverinfo": "text",
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": compact([max(0.0, 1 - f.factor) for f in ranked]),
                "arrayminus": compact([max(0.0, f.factor - 1) for f in ranked]),
                "width": 0,
                "thickness": 4,
                "color": theme.colour("grey"),
            },
        }
    ]
    ends = [1.0, *(f.factor for f in ranked)]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=38, frame=80),
        x="times today's value",
        legend=False,
        yaxis=theme.rows(names),
        xaxis={
            "type": "log",
            "range": [rounded(math.log10(min(ends) / 1.4)), rounded(math.log10(max(ends) * 1.4))],
            "tickvals": [0.125, 0.25, 0.5, 1, 2, 4, 8],
            "ticktext": ["1/8", "1/4", "1/2", "today", "2", "4", "8"],
        },
        shapes=[
            {
                "type": "line",
                "x0": 1,
                "x1": 1,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": theme.colour("text"), "width": 2},
            }
        ],
    )
    rows = tuple(
        (
            cell(n),
            number(f.factor, f"{f.factor:.2g}"),
            cell(_value(f, 1.0)),
            cell(_value(f, f.factor)),
            cell(f.winner),
            number(f.step_s, f"{f.step_s:,.4g}"),
            number(f.chosen_step_s, "does not fit" if f.chosen_step_s is None else f"{f.chosen_step_s:,.4g}"),
        )
        for n, f in zip(names, ranked, strict=True)
    )
    table = Table(
        caption="Break-evens, one change at a time, layouts kept",
        head=("change", "times today's", "today", "break-even", "then best", "its step (s)", "chosen (s)"),
        rows=rows,
    )
    how = "A diamond is the value from which on another kind of plan is the best; the further from today's line, the safer the choice. One change at a time, layouts kept."
    return Figure(
        key="break_evens",
        title=findings.break_evens(names[0].rsplit(" ", 1)[0], first.factor, first.winner),
        alt="; ".join(sentence(f) for f in ranked),
        how=how,
        plot=plots.spec(data, layout),
        table=table,
    )


def sentence(break_even: BreakEven) -> str:
    """One break-even in words."""
    more = "or more" if break_even.factor > 1 else "or less"
    own = (
        f"the chosen plan {words.seconds(break_even.chosen_step_s)}"
        if break_even.chosen_step_s is not None
        else "the chosen plan no longer fits"
    )
    return f"{break_even.change} of {_value(break_even, break_even.factor)} {more} (now {_value(break_even, 1.0)}): {break_even.winner} takes {words.seconds(break_even.step_s)}, {own}"


def _value(break_even: BreakEven, factor: float) -> str:
    if break_even.now is None:
        return f"{factor:.2g} times"
    return format(break_even.now * factor, break_even.unit)
