"""Figures of an iteration: on a time axis, what its time goes into, and what fills GPUs of each pool."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.basis import Basis, State, capacity_of, states
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import FIGURE, SHARE, YES, added, compact, rounded
from rlhfsim.search.explain import shares
from rlhfsim.units import GB

LABELLED = 0.07
"""Share of the step from which a bar carries its name."""
LEAST = 0.01
"""Share of the step from which a resource is drawn."""


def role_of(phase: str) -> str:
    """Whose row a phase is drawn in: the engine generates for the actor."""
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
        "timeline",
        findings.timeline(shares(plan), bound, p.step_s) + findings.overlap(hidden + p.step_s, p.step_s),
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
    """Call -> resource -> seconds, over the phases that the step waits for; moves are counted together."""
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
        "resources",
        findings.resources(total),
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


# --- memory -------------------------------------------------------------------------------------------

ROOM = 1.2
"""Length of the axis, in times what a process can use: its figure is written beyond the line."""


def memory(basis: Basis) -> tuple[Figure, ...]:
    """One figure a pool."""
    pools = basis.plan.placement.pools
    by_pool = [(i, pool.name, states(basis.plan, pool.name)) for i, pool in enumerate(pools)]
    return tuple(_pool(basis, i, pool, rows) for i, pool, rows in by_pool if rows)


def _pool(basis: Basis, index: int, pool: str, rows: list[State]) -> Figure:
    capacity, peak = capacity_of(basis.plan, pool), max(rows, key=lambda state: state.bytes)
    several = len(basis.plan.placement.pools) > 1
    drawn = [state for state in rows if state is peak or not words.is_move(state.phase)]
    names = [_name(state.phase) for state in drawn]
    layout = plots.rows(
        names,
        "GB on the fullest GPU",
        each=26,
        margin=140,
        barmode="stack",
        xaxis={"range": [0, rounded(max(capacity, peak.bytes) / GB * ROOM)]},
        shapes=[theme.upright(rounded(capacity / GB), "bad", "dash")],
        annotations=[_peak(peak), _capacity(capacity)],
    )
    largest = max(peak.components, key=lambda c: peak.components[c])
    full = words.size(capacity)
    return Figure(
        f"memory-{index}",
        findings.memory(pool if several else None, peak.bytes, capacity, peak.phase, largest),
        alt=f"Stacked bars of memory, one a phase, against a line at {full}: "
        + "; ".join(f"{_name(state.phase)} {words.size(state.bytes)}" for state in drawn),
        how=f"Each bar is what one GPU of {f'pool {pool}' if several else 'the cluster'} holds in a phase, "
        "top to bottom in the order of the step; the dashed line is what a process can use. Its numbers have "
        "the loads and unloads between phases too.",
        plot=plots.spec(_bars(drawn, names), layout),
        table=table_of(
            f"GB on the fullest GPU, of {full}",
            rows,
            Column("phase", lambda state: _name(state.phase)),
            *(
                Column(f"{g} (GB)", lambda state, g=g: state.groups[g] / GB, FIGURE)
                for g in words.MEMORY_GROUPS
            ),
            Column("all (GB)", lambda state: state.bytes / GB, FIGURE),
            Column("full", lambda state: state.bytes / capacity, SHARE),
        ),
    )


def _name(phase: str) -> str:
    ends = {"start": "before the step", "end": "after the step"}
    return words.capital(ends.get(phase) or words.call(phase))


def _bars(rows: list[State], names: list[str]) -> Iterator[plots.Trace]:
    for group, look in theme.BYTES.items():
        yield plots.bars(words.capital(group), names, [s.groups[group] / GB for s in rows], look, "GB")


def _peak(state: State) -> dict[str, object]:
    return {
        "x": rounded(state.bytes / GB),
        "y": plots.text(_name(state.phase)),
        "text": "◀ peak",
        "showarrow": False,
        "xanchor": "left",
        "bgcolor": "bg",
        "font": {"size": 12, "color": "text"},
    }


def _capacity(capacity: float) -> dict[str, object]:
    return {
        "x": rounded(capacity / GB),
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "xanchor": "left",
        "text": f" {words.size(capacity)}",
        "showarrow": False,
        "font": {"size": 12, "color": "bad"},
    }
