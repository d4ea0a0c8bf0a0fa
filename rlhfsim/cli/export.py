"""`rlhfsim export`: a plan as the launch of another framework."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from rlhfsim.api import cluster_of, estimate
from rlhfsim.cli.params import FILE, FOLDER, OneOf, emit, json_option, option
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frameworks.cluster_jobs import MANAGERS
from rlhfsim.frameworks.export import Exported, exporters
from rlhfsim.frameworks.export import export as exported
from rlhfsim.plan import Plan, Prediction, read_plan
from rlhfsim.present.terminal import export as view
from rlhfsim.specs.hardware.profiles import load_profile

EPILOG = """\b
Examples:
  rlhfsim design --gpus 16 --model qwen2.5-7b --algorithm grpo --framework verl --out plan.json
  rlhfsim export plan.json --to verl --out run/
"""


@click.command(epilog=EPILOG)
@click.argument("file", type=FILE)
@option("--to", OneOf("framework", exporters()), f"{', '.join(exporters())}.", required=True)
@option("--version", str, "Release of the framework, such as verl 0.8.0; default: the newest that is known.")
@option("--with manager", OneOf("manager", MANAGERS), "Job of a cluster beside the script: slurm, skypilot.")
@option("--out", FOLDER, "New folder for the files.", required=True, metavar="FOLDER")
@json_option
def export(file: Path, to: str, version: str | None, manager: str | None, out: Path, as_json: bool) -> None:
    """Write plan FILE as the launch of another framework: script, reasons, README.

    Each key that the plan decides stands below the choice or the prediction behind it; what the framework
    cannot be told is listed. A plan that the framework does not run is refused.
    """
    plan = read_plan(file)
    found = exported(plan, to, vendors_of(plan), predicted, manager=manager, version=version)
    write_folder(out, dict(found.files) | {"plan.json": file.read_text()})
    emit(as_json, lambda: as_data(found, out), lambda: view.report(found, out))


def predicted(plan: Plan) -> Prediction:
    """What the plan's placement is predicted to take now."""
    return estimate(plan.placement, plan.workload, cluster_of(plan)).prediction


def vendors_of(plan: Plan) -> frozenset[str]:
    """Makers of the plan's GPUs."""
    return frozenset(load_profile(h.profile).vendor for h in plan.hardware)


def as_data(found: Exported, out: Path) -> dict[str, Any]:
    """The same content for machines."""
    return {
        "schema": "rlhfsim.export/1",
        "framework": found.framework,
        "version": found.version,
        "folder": str(out),
        "files": sorted(found.files),
        "start": found.start,
        "settings": [
            {"section": section.title, "key": s.key, "value": s.value, "why": s.why}
            for section in found.written.sections
            for s in section.settings
        ],
        "cannot_say": [{"what": u.what, "instead": u.instead, "cost": u.cost} for u in found.written.unsaid],
    }


def write_folder(out: Path, files: dict[str, str]) -> None:
    """A new folder with all files, or none.

    Raises:
        RlhfsimError: the folder holds something, or it cannot be written.
    """
    place = Place(file=str(out))
    if out.is_dir() and any(out.iterdir()):
        raise RlhfsimError(
            "folder-not-empty", "the folder holds files", place=place, help="name a new folder with --out"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            for name, content in files.items():
                (work / name).write_text(content)
                (work / name).chmod(0o755 if name.endswith(".sh") else 0o644)
            work.chmod(0o755)
            os.replace(work, out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    except OSError as error:
        raise RlhfsimError(
            "unwritable-folder",
            f"cannot write: {(error.strerror or 'error').lower()}",
            place=place,
            help="check that the folder above exists and is writable",
        ) from error
