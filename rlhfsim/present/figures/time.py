"""Figures of time: the step on a time axis, and what its time goes into."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present import findings
from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.search.explain import shares

LABELLED = 0.07
"""Share of the step from which a bar carries its name."""


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
    names = list(dict.fromkeys(row_of(plan, role_of(f.name)) for f in p.phases))
    data = [bars(plan, [f], end) for f in p.phases]
    layout = theme.layout(
        height=theme.by_rows(len(names), each=44, frame=70),
        x="seconds from the start of the step",
        legend=False,
        barmode="overlay",
        xaxis={"range": [0, rounded(end * 1.01)], "fixedrange": False},
        yaxis=theme.rows(names),
        dragmode="pan",
        shapes=[theme.upright(p.step_s, "text", "dash")],
    )
    title = findings.timeline(shares(plan), bound, p.step_s) + findings.overlap(
        sum(f.seconds for f in p.phases if not f.critical and f.start_s < p.step_s) + p.step_s, p.step_s
    )
    alt = "Bars on a time axis, one row a role: " + "; ".join(
        f"{words.call(f.name)} from {f.start_s:.3g} to {f.start_s + f.seconds:.3g} s"
        for f in p.phases
        if not words.is_move(f.name)
    )
    how = "Each bar is a call; pale, hatched bars are hidden: the step would be as long without them. The dashed line is the end of the step. Drag to move, use the buttons to zoom."
    return Figure(
        key="timeline",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(data, layout),
        table=phase_table(plan),
        zoom=True,
    )


def bars(plan: Plan, phases: list[PredictedPhase], end: float) -> dict[str, object]:
    """One phase as a bar of its role's row."""
    f = phases[0]
    label = words.capital(words.call(f.name))
    hover = f"<b>{plots.text(label)}</b> ({plots.text(f.name)})<br>{f.start_s:.4g} to {f.start_s + f.seconds:.4g} s: takes {f.seconds:.3g} s<br>P10-P90 {f.low_s:.3g} to {f.high_s:.3g} s<br>bound by {words.RESOURCES.get(f.bound_by, (f.bound_by, ''))[0]}<br>pool {plots.text(f.pool)}"
    return {
        "type": "bar",
        "orientation": "h",
        "y": [plots.text(row_of(plan, role_of(f.name)))],
        "x": compact([f.seconds]),
        "base": compact([f.start_s]),
        "marker": theme.fill(
            (theme.role(role_of(f.name))[0], "" if f.critical else "/"), faint=not f.critical
        ),
        "hovertext": [hover],
        "hoverinfo": "text",
        "text": [plots.text(label) if f.seconds > LABELLED * end else ""],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textfont": {"color": theme.colour("bg" if f.critical else "text"), "size": 12},
        "constraintext": "inside",
        "textangle": 0,
        "cliponaxis": True,
    }


def phase_table(plan: Plan) -> Table:
    """Every predicted phase."""
    rows = tuple(
        (
            cell(f.name),
            cell(f.pool),
            number(f.start_s, f"{f.start_s:,.4g}"),
            number(f.seconds, f"{f.seconds:,.3g}"),
            number(f.low_s, f"{f.low_s:,.3g}"),
            number(f.high_s, f"{f.high_s:,.3g}"),
            cell(words.RESOURCES.get(f.bound_by, (f.bound_by, ""))[0]),
            cell("yes" if f.critical else "no"),
        )
        for f in plan.prediction.phases
    )
    return Table(
        caption="Predicted phases of one step",
        head=(
            "phase",
            "pool",
            "starts at (s)",
            "takes (s)",
            "P10 (s)",
            "P90 (s)",
            "bound by",
            "the step waits for it",
        ),
        rows=rows,
    )


# --- what the time goes into ------------------------------------------------------------------------


def by_call(plan: Plan) -> dict[str, dict[str, float]]:
    """Call -> resource -> seconds, over the phases that the step waits for; moves stand together."""
    found: dict[str, dict[str, float]] = {}
    for phase in plan.prediction.phases:
        if phase.critical:
            row = found.setdefault("moves" if words.is_move(phase.name) else phase.name, {})
            for resource, seconds in phase.by_resource_s.items():
                row[resource] = row.get(resource, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def resources(plan: Plan) -> Figure:
    """Seconds of every call by what bounds them."""
    table = by_call(plan)
    total: dict[str, float] = {}
    for row in table.values():
        for resource, seconds in row.items():
            total[resource] = total.get(resource, 0.0) + seconds
    order = sorted(total, key=lambda r: -total[r])
    names = [words.capital(words.call(c)) for c in table]
    data = list(_stacked(table, names, order))
    layout = theme.layout(
        height=theme.by_rows(len(names), frame=150),
        x="seconds of the step",
        barmode="stack",
        yaxis=theme.rows(names),
    )
    alt = "Stacked bars, one a call: " + "; ".join(
        f"{n} {sum(r.values()):.3g} s" for n, r in zip(names, table.values(), strict=True)
    )
    how = (
        "; ".join(f"{words.RESOURCES[r][0]}: {words.RESOURCES[r][1]}" for r in order if r in words.RESOURCES)
        + "."
    )
    return Figure(
        key="resources",
        title=findings.resources(total),
        alt=alt,
        how=words.capital(how),
        plot=plots.spec(data, layout),
        table=_resource_table(table, names, order),
    )


def _stacked(
    table: dict[str, dict[str, float]], names: list[str], order: list[str]
) -> Iterator[dict[str, object]]:
    for resource in order:
        word = words.RESOURCES.get(resource, (resource, ""))[0]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": plots.text(words.capital(word)),
            "y": [plots.text(n) for n in names],
            "x": compact([row.get(resource, 0.0) for row in table.values()]),
            "marker": theme.fill(theme.RESOURCES.get(resource, ("grey", "+"))),
            "hovertemplate": "%{y}: %{x:.3s} s<extra>%{fullData.name}</extra>",
        }


def _resource_table(table: dict[str, dict[str, float]], names: list[str], order: list[str]) -> Table:
    rows = tuple(
        (
            cell(name),
            *(number(row.get(r, 0.0), f"{row.get(r, 0.0):,.3g}") for r in order),
            number(sum(row.values()), f"{sum(row.values()):,.3g}"),
        )
        for name, row in zip(names, table.values(), strict=True)
    )
    head = ("call", *(f"{words.RESOURCES.get(r, (r, ''))[0]} (s)" for r in order), "all (s)")
    return Table(
        caption="Seconds that the step waits for, by call and by what bounds them", head=head, rows=rows
    )
