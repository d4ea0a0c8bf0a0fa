"""`rlhfsim gpus`: the hardware profiles, and where their numbers come from."""

from __future__ import annotations

from typing import Any

import click

from rlhfsim.cli.params import Told, command, json_option, on_command_line
from rlhfsim.present.answers import gpus as view
from rlhfsim.specs.hardware.profiles import load_profile, profile_names

EPILOG = """\b
Examples:
  rlhfsim gpus
  rlhfsim gpus h100
  rlhfsim gpus my_gpu.yaml --json
"""


@command(EPILOG)
@click.argument("name", required=False)
@json_option
def gpus(name: str | None, **_: Any) -> Told:
    """List the GPUs rlhfsim knows, or show one with the source of every number.

    NAME is a profile, an alias, or a YAML file of your own (docs/hardware.md).
    """
    with on_command_line():
        page = view.sheet(load_profile(name)) if name else view.listing(map(load_profile, profile_names()))
    return Told(page)
