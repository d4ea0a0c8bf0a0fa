"""Any answer in a terminal: its verdict, its tiles, and the tables and sentences of its sections."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlhfsim.present.answers.tree import Block, Changed, Code, Figure, Listing, Page, TypedTable
from rlhfsim.present.answers.written import tile_texts, written
from rlhfsim.present.tables import TableData
from rlhfsim.present.terminal.console import WIDTH, Part, drawn, labelled, narrowed, styled, within
from rlhfsim.present.words import listed

SIGNS = {"~": "yellow", "+": "green", "-": "red", "!": "bold magenta"}
STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "plain": ""}


def parts(page: Page, width: int = WIDTH, detail: Collection[str] = ()) -> Iterator[Part]:
    """The page without its figures, whose numbers are in its tables; what `detail` names too."""
    for text, style in ((page.title, "bold"), (page.subtitle, ""), (page.verdict, STYLES[page.mark])):
        if text:
            yield styled(text, style=style)
    if page.tiles:
        yield labelled({tile.label: "  ".join(filter(None, tile_texts(tile))) for tile in page.tiles})
    left_out = [s for s in page.sections if (s.appendix or s.asked) and not {s.key, "all"} & {*detail}]
    for section in page.sections:
        if section in left_out:
            findings = (block.title for block in section.blocks if isinstance(block, Figure))
            yield from map(styled, findings if section.asked else ())
            continue
        if section.heading:
            yield styled(f"\n{section.heading}", style="bold")
        above = False
        for block in section.blocks:
            drawn = list(_block(block, width, figures=all(isinstance(b, Figure) for b in section.blocks)))
            if above and isinstance(block, TypedTable | TableData):
                yield ""
            yield from drawn
            above |= bool(drawn)
    if left_out:
        shown = listed([section.heading.lower() for section in left_out])
        yield styled(f"\n--detail all also shows: {shown}", style="dim")


def _block(block: Block, width: int, *, figures: bool) -> Iterator[Part]:
    """One block; of figures the table, where nothing else says its numbers."""
    if isinstance(block, TypedTable | TableData):
        yield drawn_table(block, width)
    elif isinstance(block, Figure) and figures:
        yield styled(block.title)
        yield drawn_table(block.table, width)
    elif isinstance(block, Listing):
        yield from (styled(f"- {item}") for item in block.items)
    elif isinstance(block, Code):
        yield styled(f"{block.title}: {block.text}", no_wrap=True)
    elif isinstance(block, Changed):
        sign = "!" if any(sign == "!" for sign, _ in block.lines) else "~"
        yield styled(f"\n{sign} {block.title}", style="bold")
        yield from (
            styled(f"  {mark or ' '} {line}", style=SIGNS.get(mark, "")) for mark, line in block.lines
        )


def drawn_table(table: TypedTable | TableData, width: int) -> Part:
    """A table with the columns for which there is room."""
    data = written(table)
    stretched = any(fit.ratio for fit in data.fit.values())
    return drawn(within(narrowed(data, width), width), width if stretched else None)
