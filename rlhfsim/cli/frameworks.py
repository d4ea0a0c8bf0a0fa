"""`rlhfsim frameworks`: what each framework runs, and how that is known."""

from __future__ import annotations

import click

from rlhfsim.cli.params import json_option, reply
from rlhfsim.present.answers import frameworks as view

EPILOG = """\b
Examples:
  rlhfsim frameworks
  rlhfsim frameworks --json
"""


@click.command(epilog=EPILOG)
@json_option
def frameworks(as_json: bool) -> None:
    """What each framework runs, and how that is known; `design --framework NAME` keeps to it."""
    reply({"as_json": as_json}, view.listing())
