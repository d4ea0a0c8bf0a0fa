"""Figures of memory: what fills the fullest GPU of each pool, phase by phase, against its capacity."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.present import findings, words
from rlhfsim.present.answers.tree import Column, Figure, table_of
from rlhfsim.present.basis import Basis, State, capacity_of, states
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import FIGURE, SHARE, rounded
from rlhfsim.units import GB

ROOM = 1.2
"""Length of the axis, in times what a process can use: its figure stands beyond the line."""


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
        key=f"memory-{index}",
        title=findings.memory(pool if several else None, peak.bytes, capacity, peak.phase, largest),
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
