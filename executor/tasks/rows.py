"""Rows of a data set by number, whatever they lie in.

None is held in memory: lines of JSONL are found by their offsets, all else is mapped from a file in the Arrow
format. What is wrong with a single row is said when that row is read; columns.py says what rows mean.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rlhfsim.errors import Place, RlhfsimError

MAX_LINE_BYTES, MAX_ARRAY_BYTES = 64 * 2**20, 2 * 2**30
"""Bytes of one row of text, and of one JSON array, which is read whole: larger ones are something else."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Row = Mapping[str, Any]


class BadRow(ValueError):
    """A row that cannot be used; its text says why."""

    def __init__(self, reason: str, code: str = "data-value") -> None:
        """`code`: of the error where the row ends the run."""
        super().__init__(reason)
        self.code = code


def unreadable(file: Path | str, what: str, help: str | None = None, line: int | None = None) -> RlhfsimError:
    """The error of data of which nothing can be read."""
    return RlhfsimError("data-format", what, place=Place(file=str(file), line=line), help=help)


class Rows(Protocol):
    """Random access to the rows of a data set."""

    def __len__(self) -> int:
        """How many there are, blank lines not counted."""

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Rows `start` to `end - 1`."""

    def place(self, row: int) -> Place:
        """Where a row is stored."""

    def identity(self) -> tuple[object, ...]:
        """Another one where the data are others."""


def bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a text, each in memory for itself.

    Raises:
        RlhfsimError: a line of more than 64 MiB, which is no row.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            raise unreadable(
                path,
                f"line {number:,} is longer than {MAX_LINE_BYTES // 2**20} MiB: not text with a row a line",
                "write one row a line, or give the data as Parquet",
                number,
            )
        yield line


def states_of(paths: Sequence[Path]) -> tuple[object, ...]:
    """Names, sizes and times of files: others where they changed."""
    found = [(os.path.realpath(p), p.stat()) for p in paths if p.exists()]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)


class JsonLines:
    """A line a row, found by its offset."""

    def __init__(
        self, path: Path, named: Path | None = None, identity: tuple[object, ...] | None = None
    ) -> None:
        """Find the lines; reading them comes later. `named`: what people know it as; `identity`: of what is
        no file of the user's."""
        self._path, self._identity = named or path, identity
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file, self._path), 1):
                start, end = end, end + len(line)
                if (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip():
                    self._starts.append(start)
                    self._ends.append(end)
                    self._numbers.append(number)
            self._file = os.dup(file.fileno())

    def __len__(self) -> int:
        """Lines that are not blank."""
        return len(self._starts)

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):
            os.close(self._file)

    def _line(self, row: int) -> bytes:
        start, end = self._starts[row], self._ends[row]
        line = os.pread(self._file, end - start, start)
        return line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Objects of the lines."""
        for row in range(start, min(end, len(self))):
            line = self._line(row)
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                why = f"is not UTF-8: {error.reason} at byte {error.start + 1} of the line"
                yield BadRow(why, "data-encoding")
            except (ValueError, RecursionError) as error:
                yield BadRow(f"not a JSON object: {error}", "data-line")
            else:
                yield _checked(value, b"\\u" in line)

    def place(self, row: int) -> Place:
        """File and line."""
        text = self._line(row).decode("utf-8", errors="replace")
        return Place(file=str(self._path), line=self._numbers[row], text=text)

    def identity(self) -> tuple[object, ...]:
        """Name, size and time of the file."""
        return states_of([self._path]) if self._identity is None else self._identity


def _checked(value: Any, escaped: bool) -> Row | BadRow:
    """An object whose texts are UTF-8; `escaped`: they may hold halves of a surrogate pair."""
    if not isinstance(value, dict):
        return BadRow(f"a JSON {type(value).__name__}, not an object", "data-line")
    try:
        if escaped:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        return BadRow(f"holds {half}, half of a character, which no UTF-8 text can", "data-encoding")
    return value


class JsonArray:
    """One array of objects, in memory."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """Read it. `named`: what people know it as.

        Raises:
            RlhfsimError: not UTF-8, not JSON, or too large for memory.
        """
        self._path = named or path
        if path.stat().st_size > MAX_ARRAY_BYTES:
            raise unreadable(
                self._path,
                f"a JSON array of more than {MAX_ARRAY_BYTES // 2**30} GiB, which would be read whole",
                "write one object a line (.jsonl), or give the data as Parquet",
            )
        try:
            self._values: list[Any] = json.loads(path.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise unreadable(self._path, f"cannot be read as JSON: {error}") from None

    def __len__(self) -> int:
        """Its length."""
        return len(self._values)

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Its objects."""
        for value in self._values[start:end]:
            yield _checked(value, escaped=True)

    def place(self, row: int) -> Place:
        """File and row."""
        return Place(file=f"{self._path} (row {row + 1})")

    def identity(self) -> tuple[object, ...]:
        """Name, size and time of the file."""
        return states_of([self._path])


class RowTable:
    """Rows in the Arrow format, mapped from a file."""

    def __init__(self, table: Any, name: str, identity: tuple[object, ...] = ()) -> None:
        """`table`: a `datasets.Dataset`; without `identity` its own fingerprint."""
        self._table, self._name = table, name
        self._identity = identity or (name, str(table._fingerprint))

    def __len__(self) -> int:
        """Its length."""
        return len(self._table)

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Its rows.

        Raises:
            RlhfsimError: a text of the file is not UTF-8.
        """
        try:
            columns = self._table[start:end]
        except UnicodeDecodeError as error:
            raise unreadable(
                self._name,
                f"a text in rows {start + 1} to {min(end, len(self))} is not UTF-8: {error.reason}",
                "write the file again; text is UTF-8 in it",
            ) from error
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def place(self, row: int) -> Place:
        """Name and row."""
        return Place(file=f"{self._name} (row {row + 1})")

    def identity(self) -> tuple[object, ...]:
        """Identity of the files it was read from."""
        return self._identity


class Shards:
    """Several files as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        """In their order."""
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Number of all rows."""
        return self._ends[-1]

    def _at(self, row: int) -> tuple[Rows, int]:
        number = bisect.bisect_right(self._ends, row)
        return self._parts[number], row - (self._ends[number - 1] if number else 0)

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """One part after the other."""
        for row in range(start, min(end, len(self))):
            part, inside = self._at(row)
            yield from part.read(inside, inside + 1)

    def place(self, row: int) -> Place:
        """In its part."""
        part, inside = self._at(row)
        return part.place(inside)

    def identity(self) -> tuple[object, ...]:
        """Identity of all parts."""
        return tuple(part.identity() for part in self._parts)
