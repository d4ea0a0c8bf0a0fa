"""`rlhfsim gpus`: the hardware profiles, and where their numbers come from."""

from __future__ import annotations

import click

from rlhfsim.cli.params import emit, json_option, on_command_line
from rlhfsim.present.terminal import gpus as view
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
    if name is None:
        rows = [view.row(load_profile(known)) for known in profile_names()]
        emit(as_json, lambda: {"schema": view.SCHEMA, "gpus": rows}, lambda: view.listing(rows))
        return
    with on_command_line():
        profile = load_profile(name)
    emit(
        as_json, lambda: {"schema": view.SCHEMA, "gpus": [view.details(profile)]}, lambda: view.sheet(profile)
    )
