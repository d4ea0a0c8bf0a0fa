"""`rlhfsim frameworks`: what each framework runs, and how that is known."""

from __future__ import annotations

from typing import Any

from rlhfsim.cli.params import Told, command, json_option
from rlhfsim.present.answers import frameworks as view

EPILOG = """\b
Examples:
  rlhfsim frameworks
  rlhfsim frameworks --json
"""


@command(EPILOG)
@json_option
def frameworks(**_: Any) -> Told:
    """What each framework runs, and how that is known; `design --framework NAME` keeps to it."""
    return Told(view.listing())
