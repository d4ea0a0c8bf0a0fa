"""Figures of time: the step on a time axis, and what its time goes into."""

from __future__ import annotations

from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import FIGURE, YES, added, compact, rounded
from rlhfsim.search.explain import shares

LABELLED = 0.07
"""Share of the step from which a bar carries its name."""
LEAST = 0.01
"""Share of the step from which a resource is drawn."""


def role_of(phase: str) -> str:
    """Whose row a phase stands in: the engine generates for the actor."""
    return "rollout" if phase.startswith("actor.generate") else phase.split(".")[0]


def row_of(plan: Plan, role: str) -> str:
    """`actor, GPUs 0-31`; the role alone where it is not placed."""
    placed = plan.placement.roles.get(role)
    if placed is None:
        return role
    pool = plan.placement.pool(placed.pool)
    first = sum(h.gpus for h in plan.hardware[: pool.hardware]) + pool.start
    return f"{role}, GPU {first}" if pool.gpus == 1 else f"{role}, GPUs {first:,}-{first + pool.gpus - 1:,}"


def timeline(plan: Plan) -> Figure:
    """Calls by role on a common axis."""
    p, bound = plan.prediction, {f.name: f.bound_by for f in plan.prediction.phases}
    end = max([p.step_s, *(f.start_s + f.seconds for f in p.phases)])
    hidden = sum(f.seconds for f in p.phases if not f.critical and f.start_s < p.step_s)
    layout = plots.rows(
        list(dict.fromkeys(row_of(plan, role_of(f.name)) for f in p.phases)),
        "seconds from the start of the step",
        each=36,
        margin=70,
        legend=False,
        barmode="overlay",
        xaxis={"range": [0, rounded(end * 1.01)], "fixedrange": False},
        dragmode="pan",
        shapes=[theme.upright(rounded(p.step_s), "text", "dash")],
    )
    return Figure(
        key="timeline",
        title=findings.timeline(shares(plan), bound, p.step_s)
        + findings.overlap(hidden + p.step_s, p.step_s),
        alt="Bars on a time axis, one row a role: "
        + "; ".join(
            f"{words.call(f.name)} from {f.start_s:.3g} to {f.start_s + f.seconds:.3g} s"
            for f in p.phases
            if not words.is_move(f.name)
        ),
        how="Each bar is a call; pale, hatched bars are hidden: the step would be as long without them. The"
        " dashed line is the end of the step.",
        plot=plots.spec([_bar(plan, f, end) for f in p.phases], layout),
        table=table_of(
            "Predicted phases of one step",
            p.phases,
            Column("phase", "name"),
            Column("pool"),
            Column("starts at (s)", "start_s", FIGURE),
            Column("takes (s)", "seconds", FIGURE),
            Column("P10 (s)", "low_s", FIGURE),
            Column("P90 (s)", "high_s", FIGURE),
            Column("bound by", lambda f: words.bound_by(f.bound_by)),
            Column("the step waits for it", "critical", YES),
        ),
        zoom=True,
    )


def _bar(plan: Plan, f: PredictedPhase, end: float) -> dict[str, object]:
    """One phase as a bar of its role's row."""
    role, label = role_of(f.name), plots.text(words.capital(words.call(f.name)))
    hover = (
        f"<b>{label}</b> ({plots.text(f.name)})<br>{f.start_s:.4g} to {f.start_s + f.seconds:.4g} s: "
        f"takes {f.seconds:.3g} s<br>P10-P90 {f.low_s:.3g} to {f.high_s:.3g} s"
        f"<br>bound by {words.bound_by(f.bound_by)}<br>pool {plots.text(f.pool)}"
    )
    colour = theme.ROLES.get(role, ("grey", ""))[0]
    return {
        "type": "bar",
        "orientation": "h",
        "y": [plots.text(row_of(plan, role))],
        "x": compact([f.seconds]),
        "base": compact([f.start_s]),
        "marker": theme.fill((colour, "" if f.critical else "/"), faint=not f.critical),
        "hovertext": [hover],
        "hoverinfo": "text",
        "text": [label if f.seconds > LABELLED * end else ""],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textfont": {"color": "bg" if f.critical else "text", "size": 12},
        "constraintext": "inside",
        "textangle": 0,
        "cliponaxis": True,
    }


# --- what the time goes into ------------------------------------------------------------------------


def by_call(plan: Plan) -> dict[str, dict[str, float]]:
    """Call -> resource -> seconds, over the phases that the step waits for; moves stand together."""
    calls: dict[str, list[tuple[str, float]]] = {}
    for phase in plan.prediction.phases:
        if phase.critical:
            name = "moves" if words.is_move(phase.name) else phase.name
            calls.setdefault(name, []).extend(phase.by_resource_s.items())
    rows = {call: added(items) for call, items in calls.items()}
    return dict(sorted(rows.items(), key=lambda item: -sum(item[1].values())))


def resources(plan: Plan) -> Figure:
    """Seconds of every call by what bounds them."""
    rows = [(words.capital(words.call(call)), row) for call, row in by_call(plan).items()]
    names = [name for name, _ in rows]
    total = added(item for _, row in rows for item in row.items())
    order = sorted(total, key=lambda r: -total[r])
    drawn = [r for r in order if total[r] >= LEAST * sum(total.values())]
    data = [
        plots.bars(
            words.capital(words.bound_by(r)),
            names,
            [row.get(r, 0.0) for _, row in rows],
            theme.RESOURCES.get(r, ("grey", "+")),
        )
        for r in drawn
    ]
    known = [words.RESOURCES[r] for r in drawn if r in words.RESOURCES]
    rest = (
        "."
        if len(drawn) == len(order)
        else f". What takes less than {words.percent(LEAST)} is in the numbers."
    )
    return Figure(
        key="resources",
        title=findings.resources(total),
        alt="Stacked bars, one a call: " + "; ".join(f"{n} {sum(row.values()):.3g} s" for n, row in rows),
        how=words.capital("; ".join(f"{r.phrase}: {r.effect}" for r in known) + rest),
        plot=plots.spec(data, plots.rows(names, "seconds of the step", each=26, margin=140, barmode="stack")),
        table=table_of(
            "Seconds that the step waits for, by call and by what bounds them",
            rows,
            Column("call", 0),
            *(
                Column(f"{words.bound_by(r)} (s)", lambda item, r=r: item[1].get(r, 0.0), FIGURE)
                for r in order
            ),
            Column("all (s)", lambda item: sum(item[1].values()), FIGURE),
        ),
    )
