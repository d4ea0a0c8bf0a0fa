"""An answer whose first section stays on one screen of a terminal, with what was asked for below it."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.present.answers.tree import Block, FactList, Page, TypedTable
from rlhfsim.present.terminal.console import Display, Part, height, put
from rlhfsim.present.terminal.page import blocks, section_blocks

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
        return replace(block, apart=block.apart and "tight" not in how, notes=notes)
    if isinstance(block, FactList) and "short" in how:
        return block._replace(rows={k: text for k, text in block.rows.items() if k != "measured"})
    return block
