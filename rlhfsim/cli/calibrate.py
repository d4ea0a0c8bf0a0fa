"""`rlhfsim calibrate`: executed runs become a new profile, with what they say and what they cannot say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlhfsim.calibration.fit import Calibrated, Calibration, PhaseError, off
from rlhfsim.calibration.fit import calibrate as fit
from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.calibration.profile_writer import check_new, error_pair, provenance, write_profile
from rlhfsim.cli.inputs import json_option, on_command_line
from rlhfsim.cli.params import bad_option
from rlhfsim.present.terminal import calibrate as calibrate_view
from rlhfsim.present.terminal import plan as view
from rlhfsim.specs.hardware.profiles import load_profile, profile_hash
from rlhfsim.specs.quantities import Coefficient

SCHEMA = "rlhfsim.calibrate/1"
EPILOG = """\b
Examples:
  rlhfsim calibrate runs/a runs/b runs/c
  rlhfsim calibrate runs/* --out calibrated.yaml
  rlhfsim design --gpus 64 --model 70b --profile calibrated.yaml
"""


@click.command(epilog=EPILOG)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.yaml",
    help="Write the calibrated profile: a new file, named by its stem. Without it nothing is written.",
)
@click.option(
    "--profile",
    metavar="NAME",
    help="The profile before: name, alias or YAML file; default: the one of the runs' plans.",
)
@json_option
def calibrate(runs: tuple[Path, ...], out: Path | None, profile: str | None, as_json: bool) -> None:
    """Fit the coefficients of a profile to executed runs and write a new profile.

    RUN is a folder of rlhfsim launch or rlhfsim import-run. Coefficients that these runs cannot tell keep what
    was believed, by name. Errors before and after are of runs that the fit had not seen.

    Exit codes: 0 fitted, 2 bad input or too few data.
    """
    if out is not None:
        check_new(out)
    _check_once(runs)
    with view.console(stderr=True).status(f"reading {len(runs)} runs") as status:
        with on_command_line():
            base = None if profile is None else load_profile(profile)
        seen = tuple(read_run(folder) for folder in runs)
        status.update("fitting, then fitting again without each run in turn")
        found = fit(seen, base)
    if out is not None:
        write_profile(out, found, profile)
    if as_json:
        click.echo(json.dumps(as_data(found, out), indent=1))
        return
    console = view.console()
    for part in calibrate_view.report(found, console.width, out):
        console.print(part)


def _check_once(runs: Sequence[Path]) -> None:
    """That no folder is given twice: a run counted twice looks like two that agree.

    Raises:
        RlhfsimError: one is.
    """
    known: set[Path] = set()
    for folder in runs:
        if folder.resolve() in known:
            raise bad_option(f"run {folder} is given twice", "give each run once")
        known.add(folder.resolve())


# --- for machines ---------------------------------------------------------------------------------


def as_data(found: Calibration, out: Path | None) -> dict[str, Any]:
    """The same content; schema in docs/calibration.md."""
    told = provenance(found)
    return {
        "schema": SCHEMA,
        "profile": found.profile.name,
        "profile_hash": profile_hash(found.profile),
        "runs": [_run(run) for run in found.observations],
        "data": found.data,
        "coefficients": [_coefficient(c) for c in found.coefficients],
        "unidentified": [asdict(u) for u in found.unidentified],
        "phase_error": error_pair(found.errors, step=False),
        "step_error": error_pair(found.errors, step=True),
        "errors": [_error(e) for e in found.errors],
        "mismatch": found.mismatch,
        "device": told.device,
        "interconnect": told.interconnect,
        "versions": dict(told.versions),
        "outliers": list(found.outliers),
        "notes": list(found.notes),
        "out": None if out is None else str(out),
    }


def _run(run: Observation) -> dict[str, Any]:
    return {
        "name": run.name,
        "plan_hash": run.plan.input_hash,
        "device": run.device,
        "date": run.date,
        "steps": run.steps,
        "prompt_tokens": run.prompt_tokens,
        "response_tokens": run.response_tokens,
    }


def _coefficient(c: Calibrated) -> dict[str, Any]:
    return {
        "name": c.name,
        "dimension": c.before.dimension,
        "before": _value(c.before),
        "after": _value(c.after),
        "n": c.n,
        "runs": c.runs,
    }


def _value(c: Coefficient) -> dict[str, float]:
    return {"value": c.value, "low": c.low, "high": c.high}


def _error(e: PhaseError) -> dict[str, Any]:
    return {**asdict(e), "before": off(e.before_s, e.measured_s), "after": off(e.after_s, e.measured_s)}
