"""Rows of the measurement tables: read, checked, and handed out with typed getters.

A table is recognised by its signature (the columns no other table has together, in `columns.yaml`); further
documented columns may be left out of a user's file and then read as blank. A number is checked when the file
is read: finite, and not negative unless the schema says it may be.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

import yaml

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import read_bytes
from rlhfsim.units import MIB

MAX_BYTES = int(64 * MIB)
"""A larger file is refused before it is parsed."""
MAX_ROWS = 200_000
"""A table with more rows is refused."""
MAX_CELL = 10_000
"""Characters of a field."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_NOT_FINITE = frozenset({"nan", "inf", "infinity", "-inf", "+inf", "-infinity", "+infinity"})


@frozen
class TableSchema:
    """Columns of one measurement table."""

    name: str
    """File name in `lab/scoreboard/data`, without `.csv`."""
    signature: tuple[str, ...]
    """Columns that must be there and that tell the table from the others."""
    text: frozenset[str]
    """Columns of words."""
    numeric: frozenset[str]
    """Columns of numbers; a cell such as `37-40` is kept and makes only its own row unusable."""
    signed: frozenset[str]
    """Numeric columns that may be negative (a difference of two readings)."""

    @property
    def columns(self) -> frozenset[str]:
        """Every documented column."""
        return self.text | self.numeric


def _tables() -> dict[str, TableSchema]:
    text = (resources.files("rlhfsim.validation") / "columns.yaml").read_text(encoding="utf-8")
    return {
        name: TableSchema(
            name=name,
            signature=tuple(columns["signature"].split()),
            text=frozenset(columns["text"].split()),
            numeric=frozenset(columns["numeric"].split()),
            signed=frozenset(columns.get("signed", "").split()),
        )
        for name, columns in yaml.safe_load(text).items()
    }


TABLES = _tables()
"""In the order in which they are tried."""


@frozen
class Row:
    """One line of a measurement table; a blank cell is None, never zero."""

    table: str
    """Name of its schema, as in `TABLES`."""
    file: str
    """File as the user gave it, or the name of the shipped one."""
    line: int
    """1-based line (the header is line 1)."""
    values: Mapping[str, str]
    """Column to cell, stripped; unknown columns included."""

    def text(self, column: str) -> str | None:
        """The words in `column`, or None when it is blank."""
        known = column in self.values or column in TABLES[self.table].columns
        assert known, f"{self.table} has no column {column}"
        return self.values.get(column) or None

    def words(self, column: str) -> str:
        """The words in `column`, empty when it is blank."""
        return self.text(column) or ""

    @property
    def framework(self) -> str:
        """Framework and release that the row names; empty when it names none."""
        return self.words("framework")

    def number(self, column: str) -> float | None:
        """The number in `column`, or None when it is blank.

        Raises:
            RlhfsimError: the cell holds words or a range, is not finite, or is negative and may not be.
        """
        cell = self.text(column)
        if cell is None:
            return None
        finite = cell.lower() not in _NOT_FINITE
        value = float(cell) if finite and _NUMBER.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise RlhfsimError(
                "not-a-number",
                f"{column} is not {'a number' if finite else 'finite'}: {cell!r}",
                place=self._place(column),
                help="write one plain number, or leave it blank",
            )
        if value < 0 and column not in TABLES[self.table].signed:
            raise RlhfsimError(
                "negative-number",
                f"{column} cannot be negative, got {cell!r}",
                place=self._place(column),
                help="leave it blank if it is not known",
            )
        return value

    def integer(self, column: str) -> int | None:
        """The whole number in `column`, or None when it is blank.

        Raises:
            RlhfsimError: the cell holds words, a range or a fraction.
        """
        value = self.number(column)
        if value is not None and value != int(value):
            raise RlhfsimError(
                "not-an-integer",
                f"{column} must be a whole number, got {self.text(column)!r}",
                place=self._place(column),
                help="write it without decimals",
            )
        return None if value is None else int(value)

    def filled(self, values: Mapping[str, str]) -> Row:
        """The same row with these cells set."""
        return replace(self, values={**self.values, **values})

    @property
    def source(self) -> str:
        """Its publication: rows of one publication are scored together (see `publication`)."""
        return publication(self.values.get("source") or self.file)

    def _place(self, column: str) -> Place:
        return Place(file=self.file, line=self.line, text=f"{column} = {self.text(column)}")


def publication(source: str) -> str:
    """The repository file, paper or thread of a `source` cell, without section and commit.

    MLPerf results are stored one submission a file: they are one publication a round.
    """
    name = re.split(r" § | \(|; | Table | Figure ", source, maxsplit=1)[0].strip()
    return name.split("@")[0] if name.startswith("mlcommons/") else name


def zero_stage(text: str | None) -> int | None:
    """The ZeRO stage that a cell states: the first one, before those of a remark in brackets.

    >>> zero_stage("zero2, 8 ranks (zero3 in prose)")
    2
    """
    stages = re.findall(r"zero\W*(\d)", re.sub(r"\(.*?\)", "", (text or "").lower()) + (text or "").lower())
    return int(stages[0]) if stages else None


def missing(row: Row, columns: Iterable[str]) -> tuple[str, ...]:
    """Those of `columns` that are blank in `row`."""
    return tuple(column for column in columns if row.text(column) is None)


def read_csv(path: Path | str) -> list[Row]:
    """The rows of a user's file; the header says which table it is.

    Raises:
        RlhfsimError: unreadable, too large, not UTF-8, not one of the tables, or malformed.
    """
    return parse_csv(read_bytes(Path(path), MAX_BYTES), str(path))


def parse_csv(data: bytes, name: str) -> list[Row]:
    """The rows of a table given as bytes; see `read_csv`."""
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise _malformed("NUL byte", name, line, "the file is not a text table or is damaged")
    try:
        records = _records(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _malformed("not UTF-8", name, line, "save the table as UTF-8") from error
    line, header = next(records, (1, []))
    columns = [cell.strip() for cell in header]
    if not columns:
        raise _malformed("the file is empty", name, 1, "give a header and at least one row")
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice or "" in columns:
        message = f"column {twice[0]!r} is given twice" if twice else "a column has no name"
        raise _malformed(message, name, 1, "give every column its own name")
    table = recognise(columns, name)
    rows: list[Row] = []
    for line, cells in records:
        if len(rows) == MAX_ROWS:
            raise _malformed(f"more than {MAX_ROWS} rows", name, line, "split the table")
        if len(cells) != len(columns):
            message = f"{len(cells)} fields, but the header has {len(columns)} columns"
            raise _malformed(message, name, line, "quote fields that hold commas")
        values = {column: cell.strip() for column, cell in zip(columns, cells, strict=True)}
        rows.append(Row(table=table.name, file=name, line=line, values=values))
    return rows


def recognise(columns: Iterable[str], name: str) -> TableSchema:
    """The table whose signature is in the header.

    Raises:
        RlhfsimError: none is; the remedy names the nearest one and what it lacks.
    """
    present = set(columns)
    for table in TABLES.values():
        if present.issuperset(table.signature):
            return table
    nearest = max(TABLES.values(), key=lambda t: len(present & t.columns) / len(t.columns))
    lacking = ", ".join(c for c in nearest.signature if c not in present)
    raise _malformed(
        "the header is not that of a measurement table",
        name,
        1,
        f"nearest is {nearest.name}, which needs the columns {lacking}; see docs/validation.md",
    )


def notes(rows: Iterable[Row]) -> list[str]:
    """What a person should know about these rows: cells that are no number, then unknown columns."""
    rows = list(rows)
    unknown: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        extra = row.values.keys() - TABLES[row.table].columns
        if extra:
            unknown.setdefault((row.file, row.table), set()).update(extra)
    return [note for row in rows for note in _unreadable(row)] + [
        f"{file}: column {column!r} is not read{_near(column, TABLES[table])}"
        for (file, table), extra in sorted(unknown.items())
        for column in sorted(extra)
    ]


def _near(column: str, table: TableSchema) -> str:
    close = get_close_matches(column, table.columns, n=1, cutoff=0.7)
    return f" (did you mean {close[0]})" if close else ""


def _records(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Records that are not empty, each with the line on which it starts."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _malformed(f"not valid CSV: {error}", name, line, "check the quotes") from error
        if max(map(len, cells), default=0) > MAX_CELL:
            raise _malformed(f"a field of more than {MAX_CELL:,} characters", name, line, "check the quotes")
        if any(cell.strip() for cell in cells) or len(cells) > 1:
            yield line, cells


def _unreadable(row: Row) -> Iterator[str]:
    """What `number` says of cells that it cannot give; ranges and remarks speak for themselves."""
    for column in sorted(TABLES[row.table].numeric & row.values.keys()):
        cell = row.values[column]
        if not _NUMBER.fullmatch(cell) and any(c.isdigit() for c in cell):
            continue
        try:
            row.number(column)
        except RlhfsimError as error:
            yield f"{row.file}:{row.line}: {error.message}; what needs it is skipped"


def _malformed(message: str, name: str, line: int, help: str) -> RlhfsimError:
    return RlhfsimError("malformed-table", message, place=Place(file=name, line=line), help=help)
