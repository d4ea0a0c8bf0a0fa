"""The look that all views of the terminal share: its console, tables and labelled lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlhfsim.errors import shown
from rlhfsim.present.answers.written import TableData
from rlhfsim.present.tables import NEVER
from rlhfsim.present.terminal.bars import drawn_value, title_over

WIDTH = 100
"""Columns that no output exceeds."""
LABEL = 8
"""Width of the labels of header and summary."""
GAP = 2
"""Between two columns of `new_table`."""
CUT_TO = 12
"""Columns that a text keeps at least which may be cut."""
NARROW = 90
"""Below this many columns tables leave out what the bars show."""

Part = RenderableType
"""What a view is made of: a line, a table, a bar, or several of them."""
Display = Console


def styled(text: str = "", style: str = "", **more: Any) -> Text:
    """A text in a style."""
    return Text(text, style, **more)


def one_line(label: str, text: str) -> Text:
    """A label and a text that does not wrap."""
    return Text.assemble((f"{label:{LABEL + 2}}", "cyan"), text, no_wrap=True)


def console(*, stderr: bool = False) -> Console:
    """The console of every command: at most `WIDTH` columns, `WIDTH` into pipes."""
    stream = sys.stderr if stderr else sys.stdout
    if not (stream.encoding or "ascii").lower().startswith("utf") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    return _Terminal(width=width, stderr=stderr, highlight=False, markup=False, emoji=False)


class _Terminal(Console):
    """A console on which text drives nothing: colours are ours alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """As rich does, with control characters shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def put(screen: Console, part: RenderableType | str) -> None:
    """Print a part; text that does not wrap (a command, to be copied) stays in one line of any length."""
    screen.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))


def as_text(parts: Iterable[RenderableType]) -> str:
    """What a terminal of `WIDTH` columns shows, without colours."""
    text = StringIO()
    screen = _Terminal(file=text, width=WIDTH, highlight=False, markup=False, emoji=False)
    for part in parts:
        put(screen, part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def new_table(width: int | None = WIDTH, *, ruled: bool = True) -> Table:
    """A table without edges, as every command shows it; without a width as wide as its content."""
    return Table(
        box=SIMPLE if ruled else None,
        width=width,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )


def drawn(data: TableData, width: int | None = WIDTH, *, ruled: bool = True, summed: bool = False) -> Group:
    """A table with its notes below; where no column has a title, without a head.

    `summed`: the last row is set apart.
    """
    table = filled(new_table(width, ruled=ruled), data)
    table.show_header = any(data.titles)
    if summed:
        table.rows[-2].end_section = True
    return Group(table, *(Text(note, style="dim") for note in data.notes))


def filled(table: Table, data: TableData) -> Table:
    """The table with columns and rows of the data."""
    for i, column in enumerate(data.columns):
        fit = column.fit or NEVER
        table.add_column(
            title_over(column.title or "", [row[i].text for row in data.rows]),
            justify="right" if column.kind.number else "left",
            no_wrap=fit.overflow in ("never", "cut"),
            overflow="fold" if fit.overflow == "fold" else "ellipsis",
            ratio=fit.ratio,
            width=fit.width,
            max_width=fit.max_width,
        )
    for row, style in zip(data.rows, data.styles, strict=True):
        table.add_row(*(drawn_value(cell.text) for cell in row), style=style)
    return table


def within(data: TableData, width: int) -> TableData:
    """The table without the spare columns for which there is no room: no figure is cut for them."""
    spare = sorted((c.spare, str(c.title), c) for c in data.columns if c.spare)
    for *_, column in spare:
        if _needed(data) <= width:
            break
        data = data.without(column)
    return data


def narrowed(data: TableData, width: int) -> TableData:
    """The table with a word a line in titles longer than their texts, where it has no room for all."""
    if _needed(data, whole=True) <= width:
        return data
    columns = tuple(
        column._replace(title=title.replace(" ", "\n"))
        if len(title) > _longest(data, i, whole=True) - column.kind.number
        else column
        for i, (column, title) in enumerate(zip(data.columns, data.titles, strict=True))
    )
    return data._replace(columns=columns)


def _needed(data: TableData, *, whole: bool = False) -> int:
    """Columns of a terminal that a table takes, with two between its columns; `whole`: no text breaks."""
    texts = (_longest(data, i, whole=whole) for i in range(len(data.columns)))
    widths = (max(text, *map(len, title.split("\n"))) for title, text in zip(data.titles, texts, strict=True))
    return sum(width + GAP for width in widths) - GAP


def _longest(data: TableData, i: int, *, whole: bool) -> int:
    """Characters of the longest text of a column, as far as it may not break or be cut."""
    overflow = (data.columns[i].fit or NEVER).overflow
    texts = [str(row[i].text) for row in data.rows]
    if overflow == "words" and not whole:
        texts = [word for text in texts for word in text.split()]
    longest = max(map(len, texts), default=0)
    return min(longest, CUT_TO) if overflow == "cut" else longest


def labelled(rows: Mapping[str, str]) -> Table:
    """Label and text, one pair a row; labels of all such grids are aligned."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True, min_width=LABEL)
    grid.add_column()
    for label, text in rows.items():
        grid.add_row(label, text)
    return grid


def plain_grid(data: TableData) -> Table:
    """Rows without titles, further to the right."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for row in data.rows:
        first, *rest = (cell.text for cell in row)
        table.add_row(f"  {first}", *map(drawn_value, rest))
    return table


def indented(part: RenderableType) -> Padding:
    """Two columns further to the right."""
    return Padding(part, (0, 0, 0, 2))


def height(console: Console, parts: Sequence[Part]) -> int:
    """Lines that the parts take one below the other."""
    return sum(len(console.render_lines(part, pad=False)) for part in parts)
