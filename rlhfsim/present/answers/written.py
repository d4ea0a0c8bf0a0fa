"""A typed table as texts: the step that terminal and pages share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.present.answers.tree import Tile, TypedTable
from rlhfsim.present.tables import WORDS, Cell, TableData, grid, worth
from rlhfsim.present.words import plural


def written(table: TypedTable | TableData) -> TableData:
    """The rows that people see, with units and digits."""
    if isinstance(table, TableData):
        return table
    seen = [i for i, column in enumerate(table.columns) if column.title is not None and _says(table, i)]
    columns = [table.columns[i] for i in seen]
    titles = [f"{'>' * c.kind.number}{c.title}" for c in columns]
    left = len(table.rows) - (table.most or len(table.rows))
    more = (f"and {plural(left, 'more row')}, which --json has",) if left > 0 else ()
    spare = sorted((c.spare, t) for c, t in zip(columns, titles, strict=True) if c.spare)
    data = grid(
        titles,
        ([_cell(table, row, i) for i in seen] for row in table.rows[: table.most]),
        fit={t: c.fit or WORDS for c, t in zip(columns, titles, strict=True) if c.fit or not c.kind.number},
        styles=table.styles[: table.most],
        notes=(*table.notes, *more),
        spare=[title for _, title in spare],
    )
    return replace(data, caption=table.caption, open=table.open)


def _says(table: TypedTable, i: int) -> bool:
    """Whether a column is to be shown: a spare one without a value is not."""
    return not table.columns[i].spare or any(row[i] not in (None, "") for row in table.rows)


def _cell(table: TypedTable, row: tuple[Any, ...], i: int) -> Cell:
    kind, value = table.columns[i].kind, row[i]
    text, first = kind.shown(value), value[0] if isinstance(value, tuple) and value else value
    return worth(first, text) if kind.number and isinstance(first, int | float) else Cell(text=text)


def tile_texts(tile: Tile) -> tuple[str, str]:
    """Value and detail of a figure of the verdict."""
    ends = f"P10-P90 {' to '.join(map(tile.kind.shown, tile.range))}" if tile.range else ""
    return tile.kind.shown(tile.value), ", ".join(filter(None, (ends, tile.detail)))
