"""`rlhfsim export`: a plan as the launch of another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.params import FILE, NewFolder, OneOf, Told, command, json_option, option
from rlhfsim.interchange.cluster_jobs import MANAGERS
from rlhfsim.interchange.export import export as exported
from rlhfsim.interchange.export import exporters
from rlhfsim.outputs import write_folder
from rlhfsim.plan import Plan, Prediction, read_plan
from rlhfsim.present.answers import export as view
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import read_text
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.plan_files import cluster_of
from rlhfsim.what_if.verdict import rejection

EPILOG = """\b
Examples:
  rlhfsim design --gpus 16 --model qwen2.5-7b --algorithm grpo --framework verl --out plan.json
  rlhfsim export plan.json --to verl --out run/
"""


@command(EPILOG)
@click.argument("file", type=FILE)
@option("--to", OneOf("framework", exporters()), f"{', '.join(exporters())}.", required=True)
@option("--version", str, "Release of the framework, such as verl 0.8.0; default: the newest that is known.")
@option("--with manager", OneOf("manager", MANAGERS), "Also write the job of a cluster: slurm, skypilot.")
@option("--out", NewFolder(), "New folder for the files.", required=True, metavar="FOLDER")
@json_option
def export(file: Path, to: str, version: str | None, manager: str | None, out: Path, **_: Any) -> Told:
    """Write plan FILE as the launch of another framework: script, reasons, README.

    Each key that the plan decides is written below the choice or the prediction behind it; what the
    framework cannot be told is listed. A plan that the framework does not run is refused.

    Exit codes: 0 it fits, 1 written though it does not fit, 2 bad input.
    """
    plan = read_plan(file, as_priced=True)
    found = exported(plan, to, vendors_of(plan), predicted, manager=manager, version=version)
    write_folder(out, dict(found.files) | {"plan.json": read_text(file)})
    reason = rejection(plan, cluster_of(plan))
    return Told(view.page(found, out, reason), reason is None)


def predicted(plan: Plan) -> Prediction:
    """What the plan's placement is predicted to take now."""
    return estimate(plan.placement, plan.workload, cluster_of(plan)).prediction


def vendors_of(plan: Plan) -> frozenset[str]:
    """Makers of the plan's GPUs."""
    return frozenset(load_profile(h.profile).vendor for h in plan.hardware)
