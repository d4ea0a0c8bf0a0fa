"""`rlhfsim compare`: a plan and a run of it, side by side, and where the difference comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.calibration.comparison.side_by_side import read
from rlhfsim.cli.params import PATH, Output, Told, bad_option, command, detail_option, json_option, option
from rlhfsim.present.answers.compare import run_page
from rlhfsim.present.chrome_trace import side_by_side, write_chrome
from rlhfsim.what_if.doctor.of_run import diagnose_run

EPILOG = """\b
Examples:
  rlhfsim compare runs/a
  rlhfsim compare plan.json runs/a --trace both.json
"""


@command(EPILOG)
@click.argument("paths", nargs=-1, metavar="[PLAN] RUN", type=PATH)
@option(
    "--trace out",
    Output("trace for Perfetto"),
    "Write predicted and measured steps into one file for ui.perfetto.dev.",
    metavar="OUT.json",
)
@detail_option
@json_option
def compare(paths: tuple[Path, ...], out: Path | None, **_: Any) -> Told:
    """Predicted against measured: phases, step, memory, tokens, and where the gap comes from.

    RUN is the folder of rlhfsim launch or rlhfsim import-run, PLAN the plan.json that it ran (default:
    the one in the folder). The first step and steps that cannot be trusted are left out, by name. Of an
    imported run it says as well where the time went and which of the framework's keys would have saved it.
    """
    if len(paths) not in (1, 2):
        raise bad_option("give one run, or a plan and a run", "as in rlhfsim compare plan.json runs/a")
    answer = read(paths[-1], paths[0] if len(paths) == 2 else None)
    diagnosis = diagnose_run(answer.run)
    if out is not None:
        write_chrome(out, side_by_side(answer.plan, answer.trace))
    return Told(run_page(answer, diagnosis, trace=out))
