"""`rlhfsim prices`: what a GPU-hour costs by market, and where that is known from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.inputs import GPU
from rlhfsim.cli.params import FILE, Told, bad_option, command, json_option, on_command_line, option
from rlhfsim.present.answers import prices as view
from rlhfsim.specs.hardware.prices import ENVIRONMENT, prices_over
from rlhfsim.specs.hardware.profile_files import find_profile

EPILOG = """\b
Examples:
  rlhfsim prices
  rlhfsim prices h100
  rlhfsim prices --file my_prices.yaml --json
"""


@command(EPILOG)
@click.argument("name", required=False, type=GPU)
@option("--file", FILE, f"Your prices over the listed ones; for every command: ${ENVIRONMENT}=FILE.")
@json_option
def prices(name: str | None, file: Path | None, **_: Any) -> Told:
    """List what a GPU-hour costs: on demand, reserved and spot, with range, date and source.

    NAME is a profile or an alias. Your own prices, one a line: 'h100_sxm: {on-demand: 2.20 USD/h}'.
    """
    with on_command_line():
        known = prices_over(file or os.environ.get(ENVIRONMENT))
        wanted = None if name is None else find_profile(name).stem
    if wanted is not None and wanted not in known:
        raise bad_option(f"no price of {wanted} is known", "give your own: --price USD_PER_GPU_HOUR")
    return Told(view.sheet(wanted, known[wanted]) if wanted else view.listing(known))
