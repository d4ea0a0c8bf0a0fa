"""The scoreboard of the published measurements.

python -m lab.scoreboard                               every row; under a minute
python -m lab.scoreboard --kind training --json
python -m lab.scoreboard --report reports/accuracy.md  rewrites the report, and its figures as .json
python -m lab.scoreboard --check reports/accuracy.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lab.scoreboard.board import board, collect, differences, keep, read_board
from lab.scoreboard.text import markdown
from rlhfsim.cli.params import reply
from rlhfsim.errors import unknown_name
from rlhfsim.outputs import write_atomically
from rlhfsim.present.answers import validate as view
from rlhfsim.validation.scoreboard import committed_file, dumps, is_of
from rlhfsim.validation.tables import ORDER


@click.command()
@click.option("--kind", "kinds", multiple=True, help="Only this kind, as in `rlhfsim validate`.")
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
@click.option("--out", type=Path, help="Write every row to a .csv or .json file.")
@click.option("--report", type=Path, help="Write the scoreboard as Markdown, and its figures as .json.")
@click.option("--check", type=Path, help="Fail when these figures are stale or a kind got worse.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a target is missed.")
def main(
    kinds: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    report: Path | None,
    check: Path | None,
    strict: bool,
) -> None:
    """Predict the published measurements and score the predictions."""
    outcomes, not_rerun = collect(kinds, lambda name: click.echo(f"predicting: {name}", err=True))
    outcomes = [o for o in outcomes if is_of(o.kind, kinds)]
    if kinds and not outcomes and not not_rerun:
        raise unknown_name("kind", kinds[0], ORDER)
    figures = board(outcomes, not_rerun)
    if not_rerun:
        figures = keep(figures, read_board(committed_file()))
    if out:
        write_atomically(out, view.rows_text(outcomes, out))
    if report:
        write_atomically(report.with_suffix(".json"), dumps(figures))
        write_atomically(report, markdown(figures))
    if as_json:
        click.echo(dumps(figures), nl=False)
    else:
        reply({"as_json": False}, view.page(figures))
    worse = differences(figures, read_board(check)) if check else []
    click.echo("\n".join(worse), err=True)
    missed = strict and any(t["verdict"] != "PASS" for t in figures["targets"])
    sys.exit(1 if worse or missed else 0)


if __name__ == "__main__":
    main()
