"""Any answer in a terminal: its verdict, tiles and sections, or a first section that stays on one screen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rlhfsim.present.answers.tree import (
    SIGNS,
    Block,
    Changed,
    Code,
    FactList,
    Figure,
    Legend,
    Listing,
    Note,
    Page,
    PageSection,
    TypedTable,
)
from rlhfsim.present.answers.written import tile_texts, written
from rlhfsim.present.terminal.bars import STYLES, BarLegend
from rlhfsim.present.terminal.console import (
    NARROW,
    WIDTH,
    Display,
    Part,
    drawn,
    height,
    indented,
    labelled,
    narrowed,
    one_line,
    plain_grid,
    put,
    styled,
    within,
)
from rlhfsim.present.words import listed

WHOLE = {"no_wrap": True, "overflow": "fold"}
"""How a text stays in one line."""


def parts(page: Page, width: int = WIDTH, detail: Collection[str] = ()) -> Iterator[Part]:
    """The page without its figures, whose numbers are in its tables; what `detail` names too."""
    for text, style in ((page.title, "bold"), (page.subtitle, ""), (page.verdict, STYLES.get(page.mark, ""))):
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
        yield from section_blocks(section, width)
    if left_out:
        shown = listed([section.heading.lower() for section in left_out])
        yield styled(f"\n--detail all also shows: {shown}", style="dim")


def section_blocks(section: PageSection, width: int) -> Iterator[Part]:
    """The parts below the heading of a section."""
    parts = blocks(section.blocks, width)
    return map(indented, parts) if section.inset else parts


def blocks(items: Sequence[Block], width: int = WIDTH) -> Iterator[Part]:
    """Blocks one below the other, with blank lines between those that are set apart."""
    above = False
    for block in items:
        drawn = list(_block(block, width, figures=all(isinstance(b, Figure) for b in items)))
        if above and isinstance(block, TypedTable | Note | FactList) and block.apart:
            yield ""
        yield from drawn
        above |= bool(drawn)


def _block(block: Block, width: int, *, figures: bool) -> Iterator[Part]:
    """One block; of figures the table, where nothing else says its numbers."""
    match block:
        case TypedTable():
            yield drawn_table(block, width)
        case Figure() if figures:
            yield styled(block.title)
            yield drawn_table(block.table, width)
        case Note():
            yield styled(block.text, STYLES.get(block.mark, ""), **(WHOLE if block.whole else {}))
        case FactList():
            lines = (one_line(label, text) for label, text in block.rows.items())
            yield from lines if block.whole else [labelled(block.rows)]
        case Legend():
            yield BarLegend(block)
        case Listing():
            yield from (styled(f"- {item}") for item in block.items)
        case Code():
            yield styled(f"{block.title}: {block.text}", no_wrap=True)
        case Changed():
            sign = "!" if any(sign == "!" for sign, _ in block.lines) else "~"
            yield styled(f"\n{sign} {block.title}", style="bold")
            yield from (
                styled(f"  {mark or ' '} {line}", style=SIGNS.get(mark, "")) for mark, line in block.lines
            )


def drawn_table(table: TypedTable, width: int) -> Part:
    """A table with the columns for which there is room."""
    data = written(table, narrow=width < NARROW)
    if table.look == "plain":
        return plain_grid(data)
    data = within(narrowed(data, width) if table.look == "ruled" else data, width)
    stretched = table.wide or any(column.fit and column.fit.ratio for column in data.columns)
    return drawn(data, width if stretched else None, ruled=table.look == "ruled", summed=table.summed)


# --- one screen --------------------------------------------------------------------------------------

MOST = 34
"""Lines of an answer that was asked for no detail, on 100 columns."""
LEANER = ((), ("tight",), ("tight", "bare"), ("tight", "bare", "short"))
"""How the first screen becomes leaner: without blank lines, meanings of words, and the nearest run."""


def show(console: Display, page: Page) -> None:
    """Print the first section, as lean as it must be, and the others below their titles."""
    first, *others = page.sections
    for part in _screen(console, first.blocks):
        put(console, part)
    for section in others:
        if section.heading:
            console.rule(section.heading, align="left", style="dim")
        for part in section_blocks(section, console.width):
            put(console, part)


def _screen(console: Display, items: tuple[Block, ...]) -> list[Part]:
    """The blocks in the first of the leaner forms that has no more lines than a screen."""
    for how in LEANER:
        parts = [*blocks([_leaner(block, how) for block in items], console.width)]
        if height(console, parts) <= MOST:
            break
    return parts


def _leaner(block: Block, how: tuple[str, ...]) -> Block:
    if isinstance(block, TypedTable):
        notes = () if "bare" in how else block.notes
        return block._replace(apart=block.apart and "tight" not in how, notes=notes)
    if isinstance(block, FactList) and "short" in how:
        return block._replace(rows={k: text for k, text in block.rows.items() if k != "measured"})
    return block
