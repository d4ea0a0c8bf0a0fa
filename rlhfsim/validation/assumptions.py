"""Blank cells of measured rows, filled from sources: defaults of a framework, recipes of a release.

Only blanks are filled, every row that matches an entry gets it, and what was filled is shown with
the row. Two entries that fill the same cell with different values are an error: the more special
one must say so in its `match`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import parse_yaml
from rlhfsim.validation.rows import Row
from rlhfsim.validation.tables import SECTIONS

FILE = "assumptions.yaml"
TABLE_OF = {**SECTIONS, "decode": "inference"}
"""Sections of assumptions.yaml and the table whose columns they name."""


@frozen
class Assumption:
    """One entry of assumptions.yaml."""

    id: str
    """Short kebab-case name, shown with every row it fills."""
    match: Mapping[str, tuple[str, ...]]
    """Column to accepted values; one that ends in `*` is a prefix, an empty one means blank."""
    set: Mapping[str, str]
    """Column to the value that a blank cell gets."""
    source: str
    """Where the value is stated."""

    def matches(self, row: Row) -> bool:
        """Whether every column of `match` holds one of its values."""
        return all(_accepts(row.words(c), accepted) for c, accepted in self.match.items())


def _accepts(cell: str, accepted: tuple[str, ...]) -> bool:
    return any(cell.startswith(value[:-1]) if value.endswith("*") else cell == value for value in accepted)


def apply(
    kind: str, row: Row, entries: Mapping[str, tuple[Assumption, ...]] | None = None
) -> tuple[Row, tuple[str, ...]]:
    """The row with its blanks filled, and what was filled: `micro_batch=1 (nemo-default)`.

    `kind` is a section of assumptions.yaml (`training`, `oom`, ...); `entries` defaults to the
    shipped file.

    Raises:
        RlhfsimError: two matching entries set one blank cell to different values.
    """
    cells: dict[str, str] = {}
    owner: dict[str, str] = {}
    for entry in (entries or shipped())[kind]:
        if not entry.matches(row):
            continue
        for column, value in entry.set.items():
            if row.text(column) is not None:
                continue
            if cells.get(column, value) != value:
                raise RlhfsimError(
                    "conflicting-assumptions",
                    f"{owner[column]} and {entry.id} of {kind} fill {column} with different values",
                    place=Place(file=row.file, line=row.line),
                    help="narrow the match of one of them",
                )
            cells[column], owner[column] = value, owner.get(column, entry.id)
    shown = tuple(f"{column}={value} ({owner[column]})" for column, value in cells.items())
    return (row.filled(cells) if cells else row), shown


@cache
def shipped() -> Mapping[str, tuple[Assumption, ...]]:
    """The entries that come with the package, by section."""
    return parse(shipped_text())


def shipped_text() -> str:
    """The file of the entries that come with the package."""
    path = resources.files("rlhfsim.validation") / FILE
    return path.read_text(encoding="utf-8")


def parse(text: str) -> Mapping[str, tuple[Assumption, ...]]:
    """The entries of an assumptions file by section; `lab.scoreboard.assumed` checks that they are some."""
    data = parse_yaml(text, FILE).data
    return {kind: tuple(map(_entry, data.get(kind) or ())) for kind in TABLE_OF}


def _entry(data: Mapping[str, Any]) -> Assumption:
    return Assumption(
        id=str(data["id"]),
        match={c: tuple(map(_cell, v if isinstance(v, list) else [v])) for c, v in data["match"].items()},
        set={column: _cell(value) for column, value in data["set"].items()},
        source=str(data["source"]),
    )


def _cell(value: Any) -> str:
    """A YAML value as it would be written in the table: `true` and `null` are `yes` and blank."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
