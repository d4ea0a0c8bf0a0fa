"""`rlhfsim compare`: a plan and a run of it, side by side, and where the difference comes from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlhfsim.calibration.comparison.side_by_side import SideBySide, read
from rlhfsim.cli.inputs import json_option
from rlhfsim.cli.params import bad_option
from rlhfsim.present.chrome_trace import side_by_side, write_chrome
from rlhfsim.present.terminal import compare as compare_view
from rlhfsim.present.terminal import plan as view

SCHEMA = "rlhfsim.compare/1"
EPILOG = """\b
Examples:
  rlhfsim compare runs/a
  rlhfsim compare plan.json runs/a --trace both.json
"""


@click.command(epilog=EPILOG)
@click.argument("paths", nargs=-1, metavar="[PLAN] RUN", type=click.Path(path_type=Path))
@click.option(
    "--trace",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.json",
    help="Write predicted and measured steps into one file for ui.perfetto.dev.",
)
@json_option
def compare(paths: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Predicted against measured: phases, step, memory, tokens, and where the gap comes from.

    RUN is the folder of rlhfsim launch or rlhfsim import-run, PLAN the plan.json that it ran (default: the one
    in the folder). The first step and steps that cannot be trusted are left out, by name.
    """
    if len(paths) not in (1, 2):
        raise bad_option("give one run, or a plan and a run", "as in rlhfsim compare plan.json runs/a")
    answer = read(paths[-1], paths[0] if len(paths) == 2 else None)
    if out is not None:
        write_chrome(out, side_by_side(answer.plan, answer.trace))
    if as_json:
        click.echo(json.dumps(as_data(answer, out), indent=1))
        return
    console = view.console()
    for part in compare_view.report(answer, console.width, out):
        console.print(part)


def as_data(answer: SideBySide, out: Path | None) -> dict[str, Any]:
    """The same content for machines; schema in docs/compare.md."""
    found, run = answer.found, answer.run
    return {
        "schema": SCHEMA,
        "plan_hash": answer.plan.input_hash,
        "run": run.name,
        "device": run.device,
        "date": run.date,
        "steps": run.steps,
        "step": asdict(found.step),
        "step_seconds": list(run.step_s),
        "phases": [asdict(row) for row in found.rows],
        "not_in_the_run": list(found.missing),
        "not_in_the_plan": list(found.unplanned),
        "gap": asdict(answer.gap) if answer.gap else None,
        "memory": [{**asdict(held), "ratio": held.ratio} for held in answer.memory],
        "amounts": [asdict(amount) for amount in found.amounts],
        "notes": list(answer.notes),
        "chrome_trace": str(out) if out else None,
    }
