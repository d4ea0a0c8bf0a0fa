"""Blank cells of measured rows, filled from sources: defaults of a framework, recipes of a release.

Only blanks are filled, every row that matches an entry gets it, and what was filled is shown with
the row. Two entries that fill the same cell with different values are an error: the more special
one must say so in its `match`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.specs.loading import Source, parse_yaml
from rlhfsim.validation.rows import Row
from rlhfsim.validation.schemas import TABLES

TABLE_OF = {
    "training": "training",
    "memory": "memory",
    "oom": "oom_cases",
    "decode": "inference",
    "inference": "inference",
    "rlhf": "rlhf",
    "weight_sync": "weight_sync",
}
"""Sections of assumptions.yaml and the table whose columns they name."""
_KEYS = {"id", "match", "set", "source"}


@dataclass(frozen=True, slots=True, kw_only=True)
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
                raise _conflict(kind, row, column, owner[column], entry.id)
            cells[column], owner[column] = value, owner.get(column, entry.id)
    shown = tuple(f"{column}={value} ({owner[column]})" for column, value in cells.items())
    return (row.filled(cells) if cells else row), shown


def _conflict(kind: str, row: Row, column: str, first: str, second: str) -> RlhfsimError:
    return RlhfsimError(
        "conflicting-assumptions",
        f"{first} and {second} of {kind} fill {column} with different values",
        place=Place(file=row.file, line=row.line),
        help="narrow the match of one of them",
    )


@cache
def shipped() -> Mapping[str, tuple[Assumption, ...]]:
    """The entries that come with the package, by section."""
    path = resources.files("rlhfsim.validation") / "assumptions.yaml"
    return parse(path.read_text(encoding="utf-8"), "assumptions.yaml")


def parse(text: str, name: str) -> Mapping[str, tuple[Assumption, ...]]:
    """The entries of an assumptions file, by section.

    Raises:
        RlhfsimError: unknown section, key or column, a missing source, or an id that is given twice.
    """
    source = parse_yaml(text, name)
    if not isinstance(source.data, dict):
        raise RlhfsimError("not-a-mapping", "the file must map kinds to lists", place=source.place())
    for kind in source.data.keys() - TABLE_OF.keys():
        raise unknown_name("kind", str(kind), TABLE_OF, place=source.place((kind,)))
    return {kind: _section(kind, source.data.get(kind) or [], source) for kind in TABLE_OF}


def _section(kind: str, data: Sequence[Any], source: Source) -> tuple[Assumption, ...]:
    entries = tuple(_entry(kind, entry, source, (kind, i)) for i, entry in enumerate(data))
    ids = [entry.id for entry in entries]
    for i, name in enumerate(ids):
        if name in ids[:i]:
            raise RlhfsimError(
                "duplicate-assumption",
                f"{kind} has two entries {name!r}",
                place=source.place((kind, i)),
                help="give each its own id",
            )
    return entries


def _entry(kind: str, data: Any, source: Source, path: tuple[str | int, ...]) -> Assumption:
    if not isinstance(data, dict) or data.keys() != _KEYS or not str(data["source"] or "").strip():
        raise _bad("an entry needs exactly id, match, set and source", source, path)
    table = TABLES[TABLE_OF[kind]]
    for part in ("match", "set"):
        if not isinstance(data[part], dict) or (part == "set" and not data[part]):
            raise _bad(f"{part} must map columns to values", source, path)
        for column in sorted(map(str, data[part].keys() - table.columns)):
            raise unknown_name("column", column, table.columns, place=source.place(path))
    return Assumption(
        id=str(data["id"]),
        match={column: _accepted(value) for column, value in data["match"].items()},
        set={column: _cell(value) for column, value in data["set"].items()},
        source=str(data["source"]),
    )


def _bad(message: str, source: Source, path: tuple[str | int, ...]) -> RlhfsimError:
    return RlhfsimError("bad-assumption", message, place=source.place(path), help="see docs/validation.md")


def _accepted(value: Any) -> tuple[str, ...]:
    return tuple(_cell(one) for one in value) if isinstance(value, list) else (_cell(value),)


def _cell(value: Any) -> str:
    """A YAML value as it would stand in the table: `true` and `null` are `yes` and blank."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
