"""A table as a file: CSV or Parquet, written in one step."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import write_atomically

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".parquet")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """The table as .csv or .parquet.

    Raises:
        RlhfsimError: the file cannot be written, or Parquet is not installed.
    """
    if path.suffix == ".csv":
        text = io.StringIO()
        table.to_csv(text, index=False)
        write_atomically(path, text.getvalue())
        return
    try:
        import pyarrow  # noqa: F401  # what pandas writes Parquet with
    except ImportError as error:
        raise RlhfsimError(
            "missing-library", "Parquet needs pyarrow", help="pip install 'rlhfsim[parquet]', or write .csv"
        ) from error
    _write_parquet(_even(table), path)


def _even(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of mixed kinds (a number here, a text there) as text, which Parquet can hold."""
    mixed: dict[str, Any] = {}
    for name in [c for c in table if table[c].dtype.kind == "O"]:
        kinds = {type(v) for v in table[name] if v is not None and v == v}
        if len(kinds) > 1:
            mixed[str(name)] = table[name].map(lambda v: None if v is None else str(v))
    return table.assign(**mixed)


def _write_parquet(table: pd.DataFrame, path: Path) -> None:
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            table.to_parquet(part, index=False)
            os.chmod(part, 0o644)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)
    except OSError as error:
        raise RlhfsimError(
            "unwritable-file",
            f"cannot write: {(error.strerror or 'error').lower()}",
            place=Place(file=str(path)),
            help="check that the folder exists and is writable",
        ) from error
