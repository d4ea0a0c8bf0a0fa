"""Figures of memory: what fills the fullest GPU of each pool, phase by phase, against its capacity."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rlhfsim.plan import LedgerEntry
from rlhfsim.present import findings
from rlhfsim.present.basis import Basis
from rlhfsim.present.html import plots, theme, words
from rlhfsim.present.html.content import Figure, Table, compact, number, rounded
from rlhfsim.present.html.content import words as cell
from rlhfsim.units import GB

State = tuple[str, list[LedgerEntry]]
"""A phase and what a GPU holds in it."""


def memory(basis: Basis) -> tuple[Figure, ...]:
    """One figure a pool."""
    return tuple(_pool(basis, pool.name) for pool in basis.plan.placement.pools if states(basis, pool.name))


def states(basis: Basis, pool: str) -> list[State]:
    """The phases of a pool in order; moves after which memory is as before are left out."""
    rows = [e for e in basis.plan.prediction.ledger if e.pool == pool]
    found = [(name, list(entries)) for name, entries in groupby(rows, key=lambda e: e.phase)]
    peak = max((held(s) for s in found), default=0.0)
    kept: list[State] = []
    for state in found:
        moved = state[0] == "end" or words.is_move(state[0])
        if not moved or held(state) == peak or all(held(state) != held(k) for k in (*kept[:1], *kept[-1:])):
            kept.append(state)
    return kept


def held(state: State) -> float:
    """Bytes in a phase."""
    return sum(e.bytes for e in state[1])


def grouped(entries: list[LedgerEntry]) -> dict[str, float]:
    """Group of components -> bytes."""
    named = {c for components in words.GROUPS.values() for c in components}
    return {
        group: sum(
            e.bytes
            for e in entries
            if e.component in components or (not components and e.component not in named)
        )
        for group, components in words.GROUPS.items()
    }


def _pool(basis: Basis, pool: str) -> Figure:
    found, capacity = states(basis, pool), basis.capacity(pool)
    names = [_name(i, phase) for i, (phase, _) in enumerate(found)]
    peak = max(range(len(found)), key=lambda i: held(found[i]))
    several = len(basis.plan.placement.pools) > 1
    layout = theme.layout(
        height=theme.by_rows(len(names), each=26, frame=140),
        x="GB on the fullest GPU",
        barmode="stack",
        yaxis=theme.rows(names),
        xaxis={"range": [0, rounded(max(capacity, held(found[peak])) / GB * 1.12)]},
        shapes=[theme.upright(capacity / GB, "bad", "dash")],
        annotations=[_mark(names[peak], held(found[peak]) / GB, "peak"), _label(capacity)],
    )
    entries = found[peak][1]
    by: dict[str, float] = {}
    for e in entries:
        by[e.component] = by.get(e.component, 0.0) + e.bytes
    title = findings.memory(
        pool if several else None, held(found[peak]), capacity, found[peak][0], max(by, key=lambda c: by[c])
    )
    alt = f"Stacked bars of memory, one a phase, against a line at {words.size(capacity)}: " + "; ".join(
        f"{n} {words.size(held(s))}" for n, s in zip(names, found, strict=True)
    )
    how = f"Each bar is what one GPU of {f'pool {pool}' if several else 'the cluster'} holds in a phase, top to bottom in the order of the step; the dashed line is what a process can use."
    return Figure(
        key=f"memory-{_key(basis, pool)}",
        title=title,
        alt=alt,
        how=how,
        plot=plots.spec(list(_bars(found, names)), layout),
        table=_table(found, names, capacity),
    )


def _key(basis: Basis, pool: str) -> int:
    return next(i for i, p in enumerate(basis.plan.placement.pools) if p.name == pool)


def _name(index: int, phase: str) -> str:
    """Rows need names of their own: a phase may come twice."""
    return "before the step" if phase == "start" else "after the step" if phase == "end" else phase


def _bars(found: list[State], names: list[str]) -> Iterator[dict[str, object]]:
    for group, pair in theme.BYTES.items():
        yield {
            "type": "bar",
            "orientation": "h",
            "name": words.capital(group),
            "y": [plots.text(n) for n in names],
            "x": compact([grouped(entries)[group] / GB for _, entries in found]),
            "marker": theme.fill(pair),
            "hovertemplate": "%{y}: %{x:.3s} GB<extra>%{fullData.name}</extra>",
        }


def _mark(name: str, x: float, text: str) -> dict[str, object]:
    return {
        "x": rounded(x),
        "y": plots.text(name),
        "text": f"◀ {text}",
        "showarrow": False,
        "xanchor": "left",
        "font": {"size": 12, "color": theme.colour("text")},
    }


def _label(capacity: float) -> dict[str, object]:
    return {
        "x": rounded(capacity / GB),
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "xanchor": "right",
        "text": f"{words.size(capacity)} ",
        "showarrow": False,
        "font": {"size": 12, "color": theme.colour("bad")},
    }


def _table(found: list[State], names: list[str], capacity: float) -> Table:
    rows = tuple(
        (
            cell(name),
            *(number(b / GB, f"{b / GB:,.3g}") for b in grouped(entries).values()),
            number(held((name, entries)) / GB, f"{held((name, entries)) / GB:,.3g}"),
            cell(words.percent(held((name, entries)) / capacity)),
        )
        for name, (_, entries) in zip(names, found, strict=True)
    )
    return Table(
        caption=f"GB on the fullest GPU, of {words.size(capacity)}",
        head=("phase", *(f"{g} (GB)" for g in words.GROUPS), "all (GB)", "full"),
        rows=rows,
    )
