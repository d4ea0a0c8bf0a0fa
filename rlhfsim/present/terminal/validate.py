"""What `rlhfsim validate` shows and writes: the scoreboard as tables, every row as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim.outputs import csv_cell
from rlhfsim.validation import scoreboard
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.scoreboard_text import KIND_COLUMNS, kind_cells, percent, target_cells, verdict_text

REASONS = 3
_HIDDEN = ("rows", "scored")
"""Columns of the report that the terminal leaves out."""
_STYLES = {"MISSED": "red", "PASS": "green"}


def report(board: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Kinds, targets, then what is to be said about each kind."""
    shown = [i for i, column in enumerate(KIND_COLUMNS) if column not in _HIDDEN]
    lines = [kind_cells(kind, figures) for kind, figures in board["kinds"].items()]
    yield _table([KIND_COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in lines])
    if board["targets"]:
        targets = [target_cells(target) for target in board["targets"]]
        yield _table(("kind", "figure", "target", "reached", ""), targets)
    for kind, figures in board["kinds"].items():
        yield from (Text(f"{kind}: {note}") for note in _notes(figures))


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in lines:
        table.add_row(*line, style=_STYLES.get(line[-1]))
    return table


def _notes(figures: Mapping[str, Any]) -> Iterator[str]:
    """Rates of verdicts, why rows were skipped, another planner's error on the same rows."""
    if "recall" in figures:
        yield verdict_text(figures)
    if reasons := list(figures["skip_reasons"].items()):
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons[:REASONS])
        more = f"; {len(reasons) - REASONS} more reasons (--json)" if len(reasons) > REASONS else ""
        yield f"{figures['skipped']} skipped: {listed}{more}"
    if other := figures.get(scoreboard.REFERENCE):
        yield f"{scoreboard.REFERENCE} on the same rows: median error {percent(other['median_abs_error'])}"


def rows_text(outcomes: Sequence[Outcome], path: Path) -> str:
    """Every row, as a table or, for a `.json` file, as a list."""
    records = [{**asdict(o), "error": o.error} for o in outcomes]
    if path.suffix == ".json":
        return json.dumps(records, indent=1) + "\n"
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*Outcome.__dataclass_fields__, "error"], lineterminator="\n")
    writer.writeheader()
    for record in records:
        detail = json.dumps(record["detail"]) if record["detail"] else ""
        flat = {**record, "assumptions": "; ".join(record["assumptions"]), "detail": detail}
        writer.writerow({key: "" if value is None else csv_cell(value) for key, value in flat.items()})
    return buffer.getvalue()
