"""Rows of a data set as it lies there: JSONL, JSON, Parquet, CSV, gzip of text, folders, saved datasets, hub
names.

None is held in memory: lines of JSONL are found by their offsets, all else is mapped from a file in the Arrow
format. What is wrong with a single row is said when that row is read; columns.py says what rows mean.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import itertools
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from executor.settings import Data
from executor.tasks import hub
from rlhfsim.errors import Place, RlhfsimError

JSON_ENDINGS, PARQUET_ENDINGS, CSV_ENDINGS = (
    (".jsonl", ".json", ".ndjson"),
    (".parquet", ".pq"),
    (".csv", ".tsv"),
)
ENDINGS = JSON_ENDINGS + PARQUET_ENDINGS + CSV_ENDINGS
GZIP = ".gz"
"""Behind an ending of JSON or CSV."""
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which a folder of datasets' save_to_disk is known."""
BUFFER = 2**20
"""Bytes that are unpacked at a time."""
CHUNK = 1_000
"""Rows of Parquet that are in memory at a time."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Row = Mapping[str, Any]


class BadRow(ValueError):
    """A row that cannot be used; its text says why."""

    def __init__(self, reason: str, code: str = "data-value") -> None:
        """`code`: of the error where the row ends the run."""
        super().__init__(reason)
        self.code = code


class Rows(Protocol):
    """Random access to the rows of a data set."""

    def __len__(self) -> int:
        """How many there are, blank lines not counted."""

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Rows `start` to `end - 1`."""

    def place(self, row: int) -> Place:
        """Where a row stands."""

    def identity(self) -> tuple[object, ...]:
        """Another one where the data are others."""


def open_rows(data: Data) -> Rows:
    """The rows that `data.path` names.

    Raises:
        RlhfsimError: nothing there, of no known kind, without rows, or not to be read.
    """
    assert data.path, "checked by `open_source`"
    path = Path(data.path).expanduser()
    if not path.exists() and hub.is_name(data.path):
        rows: Rows = Table(hub.load(data), Place(file=data.path))
    elif path.is_dir():
        rows = _folder(path, data)
    else:
        rows = _files([path], path)
    if len(rows) == 0:
        raise RlhfsimError("data-empty", "the file has no rows", place=Place(file=data.path))
    return rows


def _files(paths: Sequence[Path], named: Path) -> Rows:
    """Rows of files of one kind."""
    for path in paths:
        if not path.is_file():
            raise RlhfsimError(
                "data-missing",
                f"{path} is not there",
                place=Place(file=str(path)),
                help="data.path names a file or folder on the machine that runs the driver, or OWNER/NAME on "
                "the hub",
            )
    endings = {_ending(path) for path in paths}
    ending = next(iter(endings))
    if len(endings) > 1 or ending not in ENDINGS:
        raise RlhfsimError(
            "data-format",
            f"{named.name} is of no kind that is read ({', '.join(sorted(endings))})",
            place=Place(file=str(named)),
            help=f"known endings: {', '.join(ENDINGS)}, one kind in a folder; of text also with {GZIP}",
        )
    with tempfile.TemporaryDirectory(prefix="rlhfsim-data-") as folder:
        plain = [_unpacked(path, Path(folder, str(number))) for number, path in enumerate(paths)]
        if ending not in JSON_ENDINGS:
            return Table(_arrow(plain, ending, paths[0]), Place(file=str(named)), _states(paths))
        parts: list[Rows] = [
            JsonArray(text, path) if _is_array(text) else JsonLines(text, path)
            for text, path in zip(plain, paths, strict=True)
        ]
    return parts[0] if len(parts) == 1 else Shards(parts)


def _ending(path: Path) -> str:
    """Of the file, or of what is packed in it."""
    inner = Path(path.stem).suffix.lower()
    packed = path.suffix.lower() == GZIP and inner in JSON_ENDINGS + CSV_ENDINGS
    return inner if packed else path.suffix.lower()


def _unpacked(path: Path, folder: Path) -> Path:
    """The file itself, or what is packed in it, written into `folder`; once it is open it may go.

    Raises:
        RlhfsimError: it is no whole gzip file, or the disk is full.
    """
    if path.suffix.lower() != GZIP:
        return path
    folder.mkdir()
    target = folder / path.stem
    try:
        with gzip.open(path) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, BUFFER)
    except (OSError, EOFError, zlib.error) as error:
        raise RlhfsimError(
            "data-format", f"cannot be read as gzip: {error}", place=Place(file=str(path))
        ) from None
    return target


def _folder(path: Path, data: Data) -> Rows:
    """A folder of datasets' save_to_disk, or of files."""
    if (path / SAVED).is_file() or (path / SAVED_SPLITS).is_file():
        import datasets

        library, place = cast(Any, datasets), Place(file=str(path))
        try:
            saved = library.load_from_disk(str(path))
        except (OSError, ValueError, library.exceptions.DatasetsError) as error:
            raise RlhfsimError(
                "data-format", f"cannot be read as a saved dataset: {error}", place=place
            ) from None
        if isinstance(saved, Mapping) and data.split not in saved:
            raise RlhfsimError(
                "data-split", f"no split {data.split!r}", place=place, help=f"data.split: {', '.join(saved)}"
            )
        table = saved[data.split] if isinstance(saved, Mapping) else saved
        return Table(table, place, _states([path / SAVED, path / SAVED_SPLITS]))
    inside = sorted(p for p in (*path.glob("*"), *path.glob("data/*")) if _ending(p) in ENDINGS)
    chosen = [p for p in inside if p.name.startswith(data.split)] or inside
    if not chosen:
        raise RlhfsimError(
            "data-format",
            f"{path} holds no data files",
            place=Place(file=str(path)),
            help=f"known endings: {', '.join(ENDINGS)}; or a folder of datasets' save_to_disk",
        )
    return _files(chosen, path)


def _states(paths: Sequence[Path]) -> tuple[object, ...]:
    """Names, sizes and times of files."""
    found = [(str(p.resolve()), p.stat()) for p in paths if p.exists()]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)


def _is_array(path: Path) -> bool:
    """Whether a JSON file is one array, not a line a row."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    return path.suffix.lower() == ".json" and start[:1] == b"["


class JsonLines:
    """A line a row, found by its offset."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """Find the lines; reading them comes later. `named`: what people know it as."""
        self._path = named or path
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
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
            yield _object(self._line(row))

    def place(self, row: int) -> Place:
        """File and line."""
        text = self._line(row).decode("utf-8", errors="replace")
        return Place(file=str(self._path), line=self._numbers[row], text=text)

    def identity(self) -> tuple[object, ...]:
        """Name, size and time of the file."""
        return _states([self._path])


def _object(line: bytes) -> Row | BadRow:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8: {error.reason} at byte {error.start + 1} of the line", "data-encoding")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not a JSON object: {error}", "data-line")
    if isinstance(value, dict):
        return value
    return BadRow(f"a JSON {type(value).__name__}, not an object", "data-line")


class JsonArray:
    """One array of objects, in memory."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """Read it. `named`: what people know it as.

        Raises:
            RlhfsimError: not UTF-8, or not JSON.
        """
        self._path = named or path
        try:
            self._values: list[Any] = json.loads(path.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise RlhfsimError(
                "data-format", f"cannot be read as JSON: {error}", place=Place(file=str(self._path))
            ) from None

    def __len__(self) -> int:
        """Its length."""
        return len(self._values)

    def read(self, start: int, end: int) -> Iterator[Row | BadRow]:
        """Its objects."""
        for value in self._values[start:end]:
            kind = type(value).__name__
            yield value if isinstance(value, dict) else BadRow(f"a JSON {kind}, not an object", "data-line")

    def place(self, row: int) -> Place:
        """File and row."""
        return Place(file=f"{self._path} (row {row + 1})")

    def identity(self) -> tuple[object, ...]:
        """Name, size and time of the file."""
        return _states([self._path])


class Table:
    """Rows in the Arrow format, mapped from a file."""

    def __init__(self, table: Any, place: Place, identity: tuple[object, ...] = ()) -> None:
        """`table`: a `datasets.Dataset`; without `identity` its own fingerprint."""
        self._table, self._place = table, place
        self._identity = identity or (place.file, str(table._fingerprint))

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
            raise RlhfsimError(
                "data-format",
                f"a text in rows {start + 1} to {min(end, len(self))} is not UTF-8: {error.reason}",
                place=Place(file=str(self._place.file)),
                help="write the file again; text is UTF-8 in it",
            ) from error
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def place(self, row: int) -> Place:
        """Name and row."""
        return Place(file=f"{self._place.file} (row {row + 1})")

    def identity(self) -> tuple[object, ...]:
        """Of the files it was read from."""
        return self._identity


class Shards:
    """Several files as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        """In their order."""
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Of all."""
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
        """Of all parts."""
        return tuple(part.identity() for part in self._parts)


def _arrow(paths: Sequence[Path], ending: str, named: Path) -> Any:
    """Parquet or CSV as a `datasets.Dataset`, in a folder that goes with it: a kept one could be stale."""
    import datasets

    library, names = cast(Any, datasets), [str(path) for path in paths]
    was_enabled = library.is_progress_bar_enabled()
    library.disable_progress_bars()
    folder = tempfile.TemporaryDirectory(prefix="rlhfsim-data-")
    try:
        if ending in PARQUET_ENDINGS:
            table = library.Dataset.from_file(_streamed(paths, Path(folder.name)))
        else:
            table = library.Dataset.from_csv(
                names, cache_dir=folder.name, **_texts(library, paths[0], ending)
            )
    except (library.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
        raise RlhfsimError(
            "data-format",
            f"cannot be read as {'Parquet' if ending in PARQUET_ENDINGS else 'CSV'}: "
            f"{error.__cause__ or error}",
            place=Place(file=str(named)),
        ) from None
    finally:
        if was_enabled:
            library.enable_progress_bars()
    table.rlhfsim_folder = folder
    return table


def _streamed(paths: Sequence[Path], folder: Path) -> str:
    """Parquet files as one file in the Arrow format; a row group may be larger than memory."""
    import pyarrow
    from pyarrow import ipc, parquet

    target, files = folder / "rows.arrow", [parquet.ParquetFile(path, pre_buffer=False) for path in paths]
    schema = files[0].schema_arrow
    with pyarrow.OSFile(str(target), "wb") as sink, ipc.new_stream(sink, schema) as stream:
        for file in files:
            for batch in file.iter_batches(batch_size=CHUNK):
                stream.write_table(pyarrow.Table.from_batches([batch]).cast(schema))
    return str(target)


def _texts(library: Any, path: Path, ending: str) -> dict[str, Any]:
    """How CSV is read so that every cell is the text that stands there: 007 and NA are no numbers."""
    separator = "\t" if ending == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter=separator))
    text = {name: library.Value("string") for name in header}
    return {
        "features": library.Features(text),
        "sep": separator,
        "keep_default_na": False,
        "encoding": "utf-8-sig",
    }
