"""`rlhfsim diff`: what changed between two plans, two runs, or a plan and a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.inputs import json_option
from rlhfsim.present.terminal import diff as diff_view
from rlhfsim.present.terminal import plan as view
from rlhfsim.what_if.differences import Difference, Moved, Side, read_side
from rlhfsim.what_if.differences import diff as between

SCHEMA = "rlhfsim.diff/1"
EPILOG = """\b
Examples:
  rlhfsim diff before.json after.json
  rlhfsim diff plan.json runs/a
"""


@click.command(epilog=EPILOG)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@json_option
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Show only what changed from BEFORE to AFTER: question, choice, outcome.

    Each is a plan.json, with its prediction, or the folder of a run, with what was measured.
    """
    found = between(read_side(before), read_side(after))
    if as_json:
        click.echo(json.dumps(as_data(found), indent=1))
        return
    console = view.console()
    for part in diff_view.report(found, console.width):
        console.print(part)


def as_data(found: Difference) -> dict[str, Any]:
    """The same content for machines; schema in docs/cli.md."""
    return {
        "schema": SCHEMA,
        "before": _side(found.before),
        "after": _side(found.after),
        "question": [asdict(c) for c in found.question],
        "choice": [asdict(c) for c in found.choice],
        "outcome": [_moved(m) for m in found.outcome],
    }


def _side(side: Side) -> dict[str, Any]:
    return {"path": side.title, "plan_hash": side.plan.input_hash, "measured": side.measured}


def _moved(m: Moved) -> dict[str, Any]:
    return {**asdict(m), "relative": m.relative, "intervals_overlap": m.overlaps}
