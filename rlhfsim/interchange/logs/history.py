"""A history exported from Weights & Biases: CSV of a panel or of `run.history()`, or its JSON.

Columns of a panel carry the name of the run, `my-run - timing_s/step`, and bounds next to them, `...__MIN`;
of JSON both forms of pandas are read, a list of records and columns by row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.logs.records import STEPS, Log, record_of
from rlhfsim.specs.loading import parse_json

PANEL_STEP = "Step"
FORMS = (".csv", ".json")
BOUNDS = ("__MIN", "__MAX")
"""Ends of columns that a panel adds to each of its own."""
RUN = " - "
"""Separates the name of a run from that of a metric."""


def read_history(text: str, path: Path) -> Log:
    """The records of an exported history.

    Raises:
        RlhfsimError: it is malformed, or no column is the step.
    """
    rows = _table(text) if path.suffix == ".csv" else _of_json(parse_json(text, str(path)).data)
    records = tuple(record for row in rows if (record := record_of(_row(row))) is not None)
    if not records:
        raise RlhfsimError(
            "no-history",
            "no row has a step",
            place=Place(file=str(path)),
            help=f"export it with the column of the step: {', '.join((*STEPS, PANEL_STEP))}",
        )
    return Log(records=records)


def _table(text: str) -> Iterator[Mapping[str, Any]]:
    """Rows of CSV by column."""
    rows = csv.reader(text.splitlines())
    head = next(rows, [])
    yield from (dict(zip(head, row, strict=False)) for row in rows)


def _of_json(data: Any) -> Iterator[Mapping[str, Any]]:
    """Rows of either form of JSON; of anything else none."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        yield from (row for row in data if isinstance(row, Mapping))
    elif isinstance(data, Mapping) and all(isinstance(column, Mapping) for column in data.values()):
        keys = dict.fromkeys(key for column in data.values() for key in column)
        yield from ({name: column.get(key) for name, column in data.items()} for key in keys)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Values by metric: columns of a panel without the name of its run and without bounds."""
    names = {name: name.rpartition(RUN)[2] for name in row if not name.endswith(BOUNDS)}
    return {STEPS[0] if metric == PANEL_STEP else metric: row[name] for name, metric in names.items()}
