"""`rlhfsim diff`: what changed between two plans, two runs, or a plan and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.params import PATH, Told, command, json_option
from rlhfsim.present.answers.diff import diff_page
from rlhfsim.what_if.differences import diff as between
from rlhfsim.what_if.differences import read_side

EPILOG = """\b
Examples:
  rlhfsim diff before.json after.json
  rlhfsim diff plan.json runs/a
"""


@command(EPILOG)
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@json_option
def diff(before: Path, after: Path, **_: Any) -> Told:
    """Show only what changed from BEFORE to AFTER: question, choice, outcome.

    Each is a plan.json, with its prediction, or the folder of a run, with what was measured.
    """
    return Told(diff_page(between(read_side(before), read_side(after))))
