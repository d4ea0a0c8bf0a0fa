"""`rlhfsim gpus`: the hardware profiles, and where their numbers come from."""

from __future__ import annotations

import click

from rlhfsim.cli.params import json_option, on_command_line, reply
from rlhfsim.present.answers import gpus as view
from rlhfsim.specs.hardware.profiles import load_profile, profile_names

EPILOG = """\b
Examples:
  rlhfsim gpus
  rlhfsim gpus h100
  rlhfsim gpus my_gpu.yaml --json
"""


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
@json_option
def gpus(name: str | None, as_json: bool) -> None:
    """List the GPUs rlhfsim knows, or show one with the source of every number.

    NAME is a profile, an alias, or a YAML file of your own (docs/hardware.md).
    """
    with on_command_line():
        page = view.sheet(load_profile(name)) if name else view.listing(map(load_profile, profile_names()))
    reply({"as_json": as_json}, page)
