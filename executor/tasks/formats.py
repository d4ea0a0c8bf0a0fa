"""Data sets as they lie there: JSONL, JSON, Parquet, CSV, gzip of text, folders, saved sets, hub names."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from executor.settings import Data
from executor.targets import resolve
from executor.tasks import hub
from executor.tasks.rows import (
    BYTE_ORDER_MARK,
    JsonArray,
    JsonLines,
    Rows,
    RowTable,
    Shards,
    bounded_lines,
    states_of,
    unreadable,
)
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
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
BUFFER = 2**20
"""Bytes that are unpacked at a time."""
MAX_UNPACKED_BYTES, MAX_RATIO = 256 * 2**20, 100
"""A gzip file may hold so many bytes, or so many times its own: text packs 3 to 20 times."""
CHUNK = 1_000
"""Rows of Parquet that are in memory at a time."""


def open_rows(data: Data) -> Rows:
    """The rows that `data.path` names.

    Raises:
        RlhfsimError: nothing there, of no known kind, without rows, or not to be read.
    """
    assert data.path, "checked by `open_source`"
    path = Path(data.path).expanduser()
    if not path.exists() and _FUNCTION.fullmatch(data.path):
        rows: Rows = _returned(data.path)
    elif not path.exists() and hub.is_name(data.path):
        rows = RowTable(hub.load(data), data.path)
    elif path.is_dir():
        rows = _folder(path, data)
    else:
        rows = _files([path], path)
    if len(rows) == 0:
        raise RlhfsimError("data-empty", "the file has no rows", place=Place(file=data.path))
    return rows


def _returned(target: str) -> Rows:
    """The rows that a function of the user returns, in a file of their own while the run lasts."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    digest = hashlib.blake2b(digest_size=16)
    with tempfile.TemporaryDirectory(prefix="rlhfsim-data-") as folder:
        path = Path(folder, "rows.jsonl")
        try:
            with path.open("wb") as file:
                for row in resolve(target)():
                    line = json.dumps(dict(row)).encode() + b"\n"
                    digest.update(line)
                    file.write(line)
        except Exception as error:
            raise RlhfsimError(
                "data-function",
                f"{target} gave no rows: {type(error).__name__}: {error}",
                help="data.path: module:function names a function without arguments that yields a dict a row",
            ) from error
        return JsonLines(path, Path(target), (target, digest.hexdigest()))


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
    ending, *others = endings = sorted({_ending(path) for path in paths})
    if others or ending not in ENDINGS:
        raise unreadable(
            named,
            f"{named.name} is of no kind that is read ({', '.join(endings)})",
            f"known endings: {', '.join(ENDINGS)}, one kind in a folder; of text also with {GZIP}",
        )
    with tempfile.TemporaryDirectory(prefix="rlhfsim-data-") as folder:
        plain = [_unpacked(path, Path(folder, str(number))) for number, path in enumerate(paths)]
        if ending not in JSON_ENDINGS:
            return RowTable(_arrow(plain, ending, paths[0]), str(named), states_of(paths))
        parts: list[Rows] = [
            JsonArray(text, path) if _is_array(text) else JsonLines(text, path)
            for text, path in zip(plain, paths, strict=True)
        ]
    return parts[0] if len(parts) == 1 else Shards(parts)


def _ending(path: Path) -> str:
    """Ending of the file's name, or of what is packed in it."""
    inner = Path(path.stem).suffix.lower()
    packed = path.suffix.lower() == GZIP and inner in JSON_ENDINGS + CSV_ENDINGS
    return inner if packed else path.suffix.lower()


def _unpacked(path: Path, folder: Path) -> Path:
    """The file itself, or what is packed in it, written into `folder`; once it is open it may go.

    Raises:
        RlhfsimError: it is no whole gzip file, unpacks to far more than text does, or the disk is full.
    """
    if path.suffix.lower() != GZIP:
        return path
    folder.mkdir()
    target = folder / path.stem
    try:
        with gzip.open(path) as packed, target.open("wb") as plain:
            limit = max(MAX_UNPACKED_BYTES, MAX_RATIO * path.stat().st_size)
            while part := packed.read(BUFFER):
                if plain.tell() + len(part) > limit:
                    raise unreadable(
                        path,
                        f"unpacks to more than {limit / 2**20:,.0f} MiB, over {MAX_RATIO} times its size: "
                        "no text does",
                        "unpack it yourself, look at it, and name the unpacked file",
                    )
                plain.write(part)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, f"cannot be read as gzip: {error}") from None
    return target


def _folder(path: Path, data: Data) -> Rows:
    """A folder of datasets' save_to_disk, or of files."""
    if (path / SAVED).is_file() or (path / SAVED_SPLITS).is_file():
        import datasets

        library = cast(Any, datasets)
        try:
            saved = library.load_from_disk(str(path))
        except (OSError, ValueError, library.exceptions.DatasetsError) as error:
            raise unreadable(path, f"cannot be read as a saved dataset: {error}") from None
        if isinstance(saved, Mapping):
            if data.split not in saved:
                raise RlhfsimError(
                    "data-split",
                    f"no split {data.split!r}",
                    place=Place(file=str(path)),
                    help=f"data.split: {', '.join(saved)}",
                )
            saved = saved[data.split]
        return RowTable(saved, str(path), states_of([path / SAVED, path / SAVED_SPLITS]))
    inside = sorted(p for p in (*path.glob("*"), *path.glob("data/*")) if _ending(p) in ENDINGS)
    chosen = [p for p in inside if p.name.startswith(data.split)] or inside
    if not chosen:
        raise unreadable(
            path,
            f"{path} holds no data files",
            f"known endings: {', '.join(ENDINGS)}; or a folder of datasets' save_to_disk",
        )
    return _files(chosen, path)


def _is_array(path: Path) -> bool:
    """Whether a JSON file is one array, not a line a row."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    return path.suffix.lower() == ".json" and start[:1] == b"["


def _arrow(paths: Sequence[Path], ending: str, named: Path) -> Any:
    """Parquet or CSV as a `datasets.Dataset`, in a folder that goes with it: a kept one could be stale."""
    import datasets

    library = cast(Any, datasets)
    was_enabled = library.is_progress_bar_enabled()
    library.disable_progress_bars()
    folder = tempfile.TemporaryDirectory(prefix="rlhfsim-data-")
    try:
        if ending in PARQUET_ENDINGS:
            table = library.Dataset.from_file(_streamed(paths, Path(folder.name)))
        else:
            separator = "\t" if ending == ".tsv" else ","
            with paths[0].open("rb") as file:
                lines = (line.decode("utf-8-sig") for line in bounded_lines(file, named))
                header = next(csv.reader(lines, delimiter=separator))
            # every cell is the text that is written there: 007 and NA are no numbers
            table = library.Dataset.from_csv(
                [str(path) for path in paths],
                cache_dir=folder.name,
                features=library.Features({name: library.Value("string") for name in header}),
                sep=separator,
                keep_default_na=False,
                encoding="utf-8-sig",
            )
    except (library.exceptions.DatasetsError, csv.Error, ValueError, OSError, StopIteration) as error:
        kind = "Parquet" if ending in PARQUET_ENDINGS else "CSV"
        raise unreadable(named, f"cannot be read as {kind}: {error.__cause__ or error}") from None
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
