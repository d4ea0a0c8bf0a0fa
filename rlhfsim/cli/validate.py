"""`rlhfsim validate`: predictions against published measurements, or against the user's own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.plan import write_atomically
from rlhfsim.validation import rows as measured
from rlhfsim.validation import scoreboard
from rlhfsim.validation import tables as registry
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.scoreboard_text import (
    KIND_COLUMNS,
    kind_cells,
    markdown,
    percent,
    target_cells,
    verdict_text,
)

WIDTH = 100
"""Columns that a table never exceeds."""
REASONS = 3
_HIDDEN = ("rows", "scored")
"""Columns of the report that the terminal leaves out."""
EPILOG = """\b
Examples:
  rlhfsim validate                               the whole scoreboard
  rlhfsim validate --kind decode --kind memory
  rlhfsim validate my_runs.csv --out errors.csv  your own measurements
"""


@click.command(epilog=EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="K",
    help="Only this kind (training, memory, decode, inference, rlhf, weight_sync, oom, or one like memory.weights); may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON (schema rlhfsim.validate/1).")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write every row to a .csv or .json file.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.md",
    help="Write the scoreboard, and its figures beside it as .json.",
)
@click.option(
    "--check",
    "against",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="Fail when the committed figures are stale or a kind got worse.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 when a target is missed.")
def validate(
    paths: tuple[Path, ...],
    kinds: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    report: Path | None,
    against: Path | None,
    strict: bool,
) -> int:
    """Score the predictions against published measurements.

    Without PATH: the tables that ship with rlhfsim. PATH is a CSV of your own in the same schemas
    (docs/validation.md), or a folder of them.

    Exit codes: 0 done, 1 a target is missed (--strict) or the check failed, 2 bad input.
    """
    console = Console(stderr=True, width=WIDTH)
    sections = registry.select(kinds)
    rows = _rows(paths, sections, console) if paths else None
    outcomes, not_rerun = _collect(sections, rows, console)
    outcomes = [o for o in outcomes if registry.wanted(o, kinds)]
    if kinds and not outcomes and not not_rerun:
        raise unknown_name("kind", kinds[0], registry.SECTIONS)
    board = _with_committed(scoreboard.board(outcomes, not_rerun, own_rows=bool(paths)))
    if out:
        write_atomically(out, _rows_text(outcomes, out))
    if report:
        write_atomically(report.with_suffix(".json"), scoreboard.dumps(board))
        write_atomically(report, markdown(board))
    _show(board, outcomes, as_json)
    return _exit_code(board, against, strict, console)


def _rows(
    paths: Sequence[Path], sections: Mapping[str, registry.RowKind], console: Console
) -> list[measured.Row]:
    """Rows of the user's files; tables that nothing is scored from are named and left out."""
    rows = [row for path in _files(paths) for row in measured.read_csv(path)]
    for note in measured.notes(rows):
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    tables = {section.table for section in sections.values()}
    for file, table in sorted({(r.file, r.table) for r in rows if r.table not in tables}):
        text = f"note: {file}: nothing is scored here from table {table}"
        console.print(text, style="dim", highlight=False, markup=False)
    kept = [row for row in rows if row.table in tables]
    if not kept:
        raise RlhfsimError(
            "no-rows",
            "no row to score in the given files",
            place=Place(file=", ".join(map(str, paths))),
            help="give a table described in docs/validation.md",
        )
    return kept


def _files(paths: Sequence[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]


def _collect(
    sections: Mapping[str, registry.RowKind], rows: list[measured.Row] | None, console: Console
) -> tuple[list[Outcome], list[str]]:
    """Outcomes, with the section at work shown on a terminal."""
    with console.status("reading the tables") as status:
        return scoreboard.collect(
            sections, rows, lambda section: status.update(f"predicting: {section.title}")
        )


def _with_committed(board: dict[str, Any]) -> dict[str, Any]:
    """Committed figures for sections whose package is not installed."""
    path = scoreboard.committed_file()
    if not board["not_rerun"] or not path.is_file():
        return board
    return scoreboard.keep(board, scoreboard.read_board(path))


def _exit_code(board: Mapping[str, Any], against: Path | None, strict: bool, console: Console) -> int:
    found = scoreboard.differences(board, scoreboard.read_board(against)) if against else []
    for line in found:
        console.print(line, highlight=False, markup=False)
    missed = strict and any(t["verdict"] != "PASS" for t in board["targets"])
    return 1 if found or missed else 0


# --- what is shown and written --------------------------------------------------------------------


def _show(board: Mapping[str, Any], outcomes: Sequence[Outcome], as_json: bool) -> None:
    if as_json:
        click.echo(scoreboard.dumps(board), nl=False)
        return
    console = Console(width=WIDTH, highlight=False)
    shown = [i for i, column in enumerate(KIND_COLUMNS) if column not in _HIDDEN]
    lines = [kind_cells(kind, figures) for kind, figures in board["kinds"].items()]
    _print_table(console, [KIND_COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in lines])
    if board["targets"]:
        _print_table(
            console,
            ("kind", "figure", "target", "reached", ""),
            [target_cells(target) for target in board["targets"]],
        )
    for kind, figures in board["kinds"].items():
        _print_notes(console, kind, figures)


def _print_table(console: Console, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(box=SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    styles = {"MISSED": "red", "PASS": "green"}
    for line in lines:
        table.add_row(*line, style=styles.get(line[-1]))
    console.print(table)


def _print_notes(console: Console, kind: str, figures: Mapping[str, Any]) -> None:
    """Rates of verdicts, why rows were skipped, another planner's error on the same rows."""
    if "recall" in figures:
        console.print(f"{kind}: {verdict_text(figures)}", markup=False)
    reasons = list(figures["skip_reasons"].items())
    if reasons:
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons[:REASONS])
        more = f"; {len(reasons) - REASONS} more reasons (--json)" if len(reasons) > REASONS else ""
        text = f"{kind}: {figures['skipped']} skipped: {listed}{more}"
        console.print(text, markup=False)
    other = figures.get(scoreboard.REFERENCE)
    if other:
        median = percent(other["median_abs_error"])
        text = f"{kind}: {scoreboard.REFERENCE} on the same rows: median error {median}"
        console.print(text, markup=False)


def _rows_text(outcomes: Sequence[Outcome], path: Path) -> str:
    """Every row, as a table or, for a `.json` file, as a list."""
    records = [{**asdict(o), "error": o.error if o.measured else None} for o in outcomes]
    if path.suffix == ".json":
        return json.dumps(records, indent=1) + "\n"
    buffer = io.StringIO()
    columns = [*Outcome.__dataclass_fields__, "error"]
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    for record in records:
        detail = json.dumps(record["detail"]) if record["detail"] else ""
        flat = {**record, "assumptions": "; ".join(record["assumptions"]), "detail": detail}
        writer.writerow({key: "" if value is None else value for key, value in flat.items()})
    return buffer.getvalue()
