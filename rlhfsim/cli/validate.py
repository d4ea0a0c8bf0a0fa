"""`rlhfsim validate`: predictions against published measurements, or against the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rlhfsim.cli.params import FILE, PATH, Output, Words, flag, option, writer
from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.outputs import is_replaceable, write_atomically
from rlhfsim.present.terminal import validate as view
from rlhfsim.present.terminal.console import console
from rlhfsim.validation import rows as measured
from rlhfsim.validation import scoreboard
from rlhfsim.validation import tables as registry
from rlhfsim.validation.scoreboard_text import markdown

EPILOG = """\b
Examples:
  rlhfsim validate                               the whole scoreboard
  rlhfsim validate --kind decode --kind memory
  rlhfsim validate my_runs.csv --out errors.csv  your own measurements
"""
REPORT = Output("scoreboard", beside=lambda out: {out.with_suffix(".json"): "figures"})


@writer(epilog=EPILOG)
@click.argument("paths", nargs=-1, type=PATH, metavar="[PATH]...")
@option(
    "--kind kinds",
    Words("K"),
    "Only this kind (training, memory, decode, inference, rlhf, weight_sync, oom, or one like "
    "memory.weights); may be repeated.",
    multiple=True,
)
@flag("--json as_json", "Print figures as JSON (schema rlhfsim.validate/1).")
@option("--out", Output("rows"), "Write every row to a .csv or .json file.", metavar="FILE")
@option("--report", REPORT, "Write the scoreboard, and its figures beside it as .json.", metavar="FILE.md")
@option(
    "--check against",
    FILE,
    "Fail when the committed figures are stale or a kind got worse.",
    metavar="FILE.json",
)
@flag("--strict", "Exit with 1 when a target is missed.")
def validate(paths: tuple[Path, ...], kinds: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Score the predictions against published measurements.

    Without PATH: the tables that ship with rlhfsim. PATH is a CSV of your own in the same schemas
    (docs/validation.md), or a folder of them.

    Exit codes: 0 done, 1 a target is missed (--strict) or the check failed, 2 bad input.
    """
    aside = console(stderr=True)
    sections = registry.select(kinds)
    rows = _rows(paths, sections, aside) if paths else None
    with aside.status("reading the tables") as status:
        outcomes, not_rerun = scoreboard.collect(
            sections, rows, lambda section: status.update(f"predicting: {section.title}")
        )
    outcomes = [o for o in outcomes if registry.wanted(o, kinds)]
    if kinds and not outcomes and not not_rerun:
        raise unknown_name("kind", kinds[0], registry.SECTIONS)
    board = scoreboard.board(outcomes, not_rerun, own_rows=bool(paths))
    committed = scoreboard.committed_file()
    if board["not_rerun"] and committed.is_file():  # figures of sections whose package is not installed
        board = scoreboard.keep(board, scoreboard.read_board(committed))
    if given["out"]:
        write_atomically(given["out"], view.rows_text(outcomes, given["out"]))
    if report := given["report"]:
        if is_replaceable(report):
            write_atomically(report.with_suffix(".json"), scoreboard.dumps(board))
        write_atomically(report, markdown(board))
    if as_json:
        click.echo(scoreboard.dumps(board), nl=False)
    else:
        screen = console()
        for part in view.report(board):
            screen.print(part)
    worse = scoreboard.differences(board, scoreboard.read_board(given["against"])) if given["against"] else []
    for line in worse:
        aside.print(line)
    missed = given["strict"] and any(t["verdict"] != "PASS" for t in board["targets"])
    return 1 if worse or missed else 0


def _rows(
    paths: Sequence[Path], sections: Mapping[str, registry.RowKind], aside: Console
) -> list[measured.Row]:
    """Rows of the user's files; tables that nothing is scored from are named and left out."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    rows = [row for path in files for row in measured.read_csv(path)]
    for note in measured.notes(rows):
        aside.print(f"note: {note}", style="dim")
    tables = {section.table for section in sections.values()}
    for file, table in sorted({(r.file, r.table) for r in rows if r.table not in tables}):
        aside.print(f"note: {file}: nothing is scored here from table {table}", style="dim")
    scored = [row for row in rows if row.table in tables]
    if not scored:
        raise RlhfsimError(
            "no-rows",
            "no row to score in the given files",
            place=Place(file=", ".join(map(str, paths))),
            help="give a table described in docs/validation.md",
        )
    return scored
