"""Any answer in a terminal: its verdict, its tiles, and the tables and sentences of its sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.present.answers.tree import Block, Figure, Listing, Page, Table
from rlhfsim.present.answers.written import tile_texts, written
from rlhfsim.present.tables import WORDS, TableData
from rlhfsim.present.terminal.console import WIDTH, drawn, labelled, narrowed, within
from rlhfsim.present.words import listed

STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}


def parts(page: Page, width: int = WIDTH, *, appendices: bool = False) -> Iterator[RenderableType]:
    """The page without its figures, whose numbers are in its tables; appendices where asked for."""
    for text, style in ((page.title, "bold"), (page.subtitle, ""), (page.verdict, STYLES[page.mark])):
        if text:
            yield Text(text, style=style)
    if page.tiles:
        yield labelled({tile.label: "  ".join(filter(None, tile_texts(tile))) for tile in page.tiles})
    for section in page.sections:
        if section.appendix and not appendices:
            continue
        if section.heading:
            yield Text(f"\n{section.heading}", style="bold")
        for block in section.blocks:
            yield from _block(block, width, figures=all(isinstance(b, Figure) for b in section.blocks))
    left_out = [s.heading.lower() for s in page.sections if s.appendix and not appendices]
    if left_out:
        yield Text(f"\n--detail all also shows: {listed(left_out)}", style="dim")


def _block(block: Block, width: int, *, figures: bool) -> Iterator[RenderableType]:
    """One block; of figures the table, where nothing else says its numbers."""
    if isinstance(block, Table | TableData):
        yield _table(block, width)
    elif isinstance(block, Figure) and figures:
        yield Text(block.title)
        yield _table(block.table, width)
    elif isinstance(block, Listing):
        yield from (Text(f"- {item}") for item in block.items)


def _table(table: Table | TableData, width: int) -> RenderableType:
    data = written(table) if isinstance(table, Table) else _aligned(table)
    stretched = any(fit.ratio for fit in data.fit.values())
    return drawn(narrowed(within(data, width), width), width if stretched else None)


def _aligned(data: TableData) -> TableData:
    """The table with numbers to the right, and text that may break."""
    numbers = [
        sum(row[i].value is not None for row in data.rows) * 2 > len(data.rows) for i in range(len(data.head))
    ]
    head = tuple(f">{title}" if right else title for title, right in zip(data.head, numbers, strict=True))
    fit = {title: WORDS for title, right in zip(data.head, numbers, strict=True) if not right}
    return replace(data, head=head, fit=fit)
