"""A typed table as texts, the step that terminal and pages share; and what JSON says of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rlhfsim.present.answers.tree import Column, Figure, Page, Tile, TypedTable
from rlhfsim.present.tables import NEVER, WORDS, Bar, Cell, Spark, Word, fields, worth
from rlhfsim.present.words import plural


class TableData(NamedTuple):
    """A table as people see it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    styles: tuple[str, ...]
    """Styles of the rows in a terminal."""
    notes: tuple[str, ...]

    @property
    def titles(self) -> tuple[str, ...]:
        """Titles of its columns."""
        return tuple(str(column.title) for column in self.columns)

    @property
    def numbers(self) -> set[float]:
        """Every number in it."""
        return {cell.value for row in self.rows for cell in row if cell.value is not None}

    def without(self, column: Column) -> TableData:
        """The table without a column."""
        kept = [i for i, known in enumerate(self.columns) if known is not column]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return self._replace(columns=tuple(self.columns[i] for i in kept), rows=rows)


def written(table: TypedTable, *, narrow: bool = False) -> TableData:
    """The rows that people see, with units and digits; `narrow`: for a terminal of few columns."""
    columns = [_fitted(column, narrow=narrow) for column in table.columns]
    seen = [
        i
        for i, column in enumerate(columns)  # a spare one without a value is not shown
        if column.title is not None and not (column.spare and all(row[i] in (None, "") for row in table.rows))
    ]
    left = len(table.rows) - (table.most or len(table.rows))
    more = (f"and {plural(left, 'more row')}, which --json has",) if left > 0 else ()
    rows = tuple(tuple(_cell(table, row, i) for i in seen) for row in table.rows[: table.most])
    return TableData(
        columns=tuple(columns[i] for i in seen),
        rows=rows,
        styles=table.styles[: table.most] or ("",) * len(rows),
        notes=(*table.notes, *more),
    )


def _fitted(column: Column, *, narrow: bool) -> Column:
    """The column with its title and fit; without a title where there is no room for it."""
    fit = column.fit or column.kind.fit or (NEVER if column.kind.number else WORDS)
    if not narrow:
        return column._replace(fit=fit)
    title = column.title if column.narrow is None else column.narrow or None
    return column._replace(title=title, fit=column.narrow_fit or fit)


def _cell(table: TypedTable, row: tuple[Any, ...], i: int) -> Cell:
    kind, value = table.columns[i].kind, row[i]
    if isinstance(value, Word | Bar | Spark):
        return Cell(text=value)
    text, first = kind.shown(value), value[0] if isinstance(value, tuple) and value else value
    return worth(first, text) if kind.number and isinstance(first, int | float) else Cell(text=text)


def tile_texts(tile: Tile) -> tuple[str, str]:
    """Value and detail of a figure of the verdict."""
    ends = f"P10-P90 {' to '.join(map(tile.kind.shown, tile.range))}" if tile.range else ""
    return tile.kind.shown(tile.value), ", ".join(filter(None, (ends, tile.detail)))


def page_data(shown: Page, where: Path) -> dict[str, Any]:
    """The findings of `rlhfsim report`; schema in docs/report.md."""
    return {
        "schema": "rlhfsim.present.html/1",
        "out": str(where),
        "bytes": where.stat().st_size,
        **fields(shown, "title", "subtitle", "verdict", "sure"),
        "tiles": [
            dict(zip(("label", "value", "detail"), (t.label, *tile_texts(t)), strict=True))
            for t in shown.tiles
        ],
        "sections": [
            {
                "heading": s.heading,
                "figures": [
                    {"key": b.key, "finding": b.title, "alt": b.alt}
                    for b in s.blocks
                    if isinstance(b, Figure)
                ],
            }
            for s in shown.sections
        ],
    }
