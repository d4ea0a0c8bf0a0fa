"""Memory of every pool through a step, as bars against its capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present.terminal.bars import Axis, Bar, Piece, plain
from rlhfsim.present.terminal.words import GROUPS, WIDTH, is_move, new_table, percent, profile_of, size


def memory_chart(plan: Plan, width: int = WIDTH) -> RenderableType:
    """Memory of every pool through the step against its capacity, the peak marked."""
    parts: list[RenderableType] = []
    for pool in plan.placement.pools:
        rows = [e for e in plan.prediction.ledger if e.pool == pool.name]
        if rows:
            title = (
                f"pool {pool.name}, {pool.gpus} GPUs"
                if len(plan.placement.pools) > 1
                else f"{pool.gpus} GPUs"
            )
            parts += [
                Text(f"{title}: bytes on the fullest GPU", style="bold"),
                _pool_chart(plan, pool.name, rows, width),
            ]
    return Group(*parts, MemoryLegend(plan.prediction.peak_memory_bytes > plan.prediction.capacity_bytes))


def capacity_of(plan: Plan, pool: str) -> float:
    """Bytes that the driver offers on a GPU of the pool."""
    profile = profile_of(plan, pool)
    return profile.usable_memory.value if profile else plan.prediction.capacity_bytes


def _pool_chart(plan: Plan, pool: str, rows: list[LedgerEntry], width: int) -> Table:
    states = [(name, list(entries)) for name, entries in groupby(rows, key=lambda e: e.phase)]
    totals = [sum(e.bytes for e in entries) for _, entries in states]
    capacity = capacity_of(plan, pool)
    scale = max(capacity, *totals) * 1.02
    peak = max(range(len(states)), key=lambda i: totals[i])
    table = new_table(width)
    table.add_column("phase", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("full", justify="right", no_wrap=True)
    table.add_column(Axis(label=size(capacity), at=capacity, scale=scale), ratio=1)
    table.add_column("", no_wrap=True)
    for i, (name, entries) in enumerate(states):
        moved = name == "end" or is_move(name)
        if moved and i != peak and totals[i] in (totals[0], totals[i - 1]):
            continue  # memory is as it was
        mark = "< peak" if i == peak else ""
        bar = Bar(pieces=_memory_pieces(entries), scale=scale, limit=capacity)
        table.add_row(
            name, size(totals[i]), percent(totals[i] / capacity), bar, mark, style="bold" if mark else ""
        )
    return table


def _memory_pieces(entries: list[LedgerEntry]) -> list[Piece]:
    named = {c for _, _, components in GROUPS.values() for c in components}
    return [
        Piece(
            amount=sum(
                e.bytes
                for e in entries
                if e.component in components or not (components or e.component in named)
            ),
            glyph=glyph,
            style=colour,
        )
        for glyph, colour, components in GROUPS.values()
    ]


@dataclass(frozen=True, slots=True)
class MemoryLegend:
    """What the fillings of memory bars stand for, in the output's own characters."""

    over: bool
    """Whether some bar goes beyond its GPU."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """One line."""
        line = Text(style="dim")
        for words, (glyph, colour, _) in GROUPS.items():
            line.append(plain(glyph, options.encoding) * 2, style=colour)
            line.append(f" {words}  ")
        if self.over:
            line.append("XX beyond the GPU", style="red")
        yield line
