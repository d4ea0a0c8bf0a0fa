"""Any page in a terminal: its verdict, its tiles, and the tables and sentences of its sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.present.html.content import Figure, Page
from rlhfsim.present.tables import WORDS, TableData
from rlhfsim.present.terminal.console import WIDTH, drawn, labelled, within
from rlhfsim.present.words import listed

STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}


def parts(page: Page, width: int = WIDTH, *, appendices: bool = False) -> Iterator[RenderableType]:
    """The page without its figures, whose numbers are in its tables; appendices where asked for."""
    yield Text(page.title, style="bold")
    if page.subtitle:
        yield Text(page.subtitle)
    yield Text(page.verdict, style=STYLES[page.mark])
    yield labelled({tile.label: f"{tile.value}  {tile.detail}".rstrip() for tile in page.tiles})
    for section in page.sections:
        if section.appendix and not appendices:
            continue
        yield Text(f"\n{section.heading}", style="bold")
        for block in section.blocks:
            if isinstance(block, TableData):
                yield drawn(within(_aligned(block), width), None)
            elif isinstance(block, Figure) and all(isinstance(b, Figure) for b in section.blocks):
                yield Text(block.title)
                yield drawn(within(_aligned(block.table), width), None)
            elif block.kind == "listing":
                yield from (Text(f"- {item}") for item in block.items)
    left_out = [s.heading.lower() for s in page.sections if s.appendix and not appendices]
    if left_out:
        yield Text(f"\n--detail all also shows: {listed(left_out)}", style="dim")


def _aligned(data: TableData) -> TableData:
    """The table with numbers to the right, and text that may break."""
    numbers = [
        sum(row[i].value is not None for row in data.rows) * 2 > len(data.rows) for i in range(len(data.head))
    ]
    head = tuple(f">{title}" if right else title for title, right in zip(data.head, numbers, strict=True))
    fit = {title: WORDS for title, right in zip(data.head, numbers, strict=True) if not right}
    return replace(data, head=head, fit=fit)
