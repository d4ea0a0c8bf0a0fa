"""`rlhfsim validate`: predictions against the user's own measurements, or the figures on published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rlhfsim.cli.params import PATH, Output, Told, Words, command, flag, option
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.outputs import write_atomically
from rlhfsim.present.answers import validate as view
from rlhfsim.present.terminal.console import Display, console
from rlhfsim.validation import rows as measured
from rlhfsim.validation import scoreboard
from rlhfsim.validation.tables import ORDER, SECTIONS

EPILOG = """\b
Examples:
  rlhfsim validate                               figures on published measurements
  rlhfsim validate --kind decode --kind memory
  rlhfsim validate my_runs.csv --out errors.csv  your own measurements
"""


@command(EPILOG)
@click.argument("paths", nargs=-1, type=PATH, metavar="[PATH]...")
@option(
    "--kind kinds",
    Words("K"),
    "Only this kind (training, memory, decode, inference, rlhf, weight_sync, oom, or one like "
    "memory.weights); may be repeated.",
    multiple=True,
)
@flag("--json as_json", "Print figures as JSON (schema rlhfsim.validate/1).")
@option("--out", Output("rows"), "Write every row of your files to a .csv or .json file.", metavar="FILE")
def validate(paths: tuple[Path, ...], kinds: tuple[str, ...], as_json: bool, out: Path | None) -> Told | None:
    """Score the predictions against measurements.

    PATH is a CSV of your own in the schemas of docs/validation.md, or a folder of them. Without PATH: the
    figures on published measurements that this version has (python -m lab.scoreboard in a checkout
    predicts them again).

    Exit codes: 0 done, 2 bad input.
    """
    aside = console(stderr=True)
    for kind in kinds:
        if kind.split(".")[0] not in ORDER:
            raise unknown_name("kind", kind, ORDER)
    if paths:
        with aside.status("predicting"):
            outcomes = scoreboard.collect(_rows(paths, aside))
        outcomes = [o for o in outcomes if scoreboard.is_of(o.kind, kinds)]
        board = scoreboard.board(outcomes)
        if out:
            write_atomically(out, view.rows_text(outcomes, out))
    elif out:
        raise RlhfsimError(
            "bad-option",
            "--out writes the rows of your files, and none is given",
            place=f"--out {out}",
            help="name a CSV of your own; the published rows are in the repository, lab/scoreboard/data",
        )
    else:
        board = scoreboard.committed(kinds)
    if kinds and not board["kinds"]:
        raise unknown_name("kind", kinds[0], ORDER)
    if not as_json:
        return Told(view.page(board))
    click.echo(scoreboard.dumps(board), nl=False)
    return None


def _rows(paths: Sequence[Path], aside: Display) -> list[measured.Row]:
    """Rows of the user's files; tables that nothing is scored from are named and left out."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    rows = [row for path in files for row in measured.read_csv(path)]
    for note in measured.notes(rows):
        aside.print(f"note: {note}", style="dim")
    tables = set(SECTIONS.values())
    for file, table in sorted({(r.file, r.table) for r in rows if r.table not in tables}):
        aside.print(f"note: {file}: nothing is scored here from table {table}", style="dim")
    scored = [row for row in rows if row.table in tables]
    if not scored:
        raise RlhfsimError(
            "no-rows",
            "no row to score in the given files",
            place=", ".join(map(str, paths)),
            help="give a table described in docs/validation.md",
        )
    return scored
