"""`rlhfsim calibrate`: executed runs become a new profile, with what they say and what they cannot say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from rlhfsim.calibration.fit import calibrate as fit
from rlhfsim.calibration.profile_writer import check_new, write_profile
from rlhfsim.cli.mixed_runs import is_run_folder, of_one_gpu, read_runs
from rlhfsim.cli.params import (
    PATH,
    Output,
    Told,
    Words,
    bad_option,
    command,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.present.answers.calibrate import calibrate_page
from rlhfsim.present.terminal.console import console
from rlhfsim.specs.hardware.profiles import load_profile

EPILOG = """\b
Examples:
  rlhfsim calibrate runs/a runs/b runs/c
  rlhfsim calibrate runs/* --out calibrated.yaml
  rlhfsim calibrate logs/ --out verl-h100.yaml
  rlhfsim design --gpus 64 --model 70b --profile calibrated.yaml
"""


@command(EPILOG)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@option(
    "--out",
    Output(None),
    "Write the calibrated profile: a new file, named by its stem. Without it nothing is written.",
    metavar="FILE.yaml",
)
@option(
    "--profile",
    Words("NAME"),
    "The profile before: name, alias or YAML file; default: the one of the runs' plans.",
)
@json_option
def calibrate(runs: tuple[Path, ...], out: Path | None, profile: str | None, **_: Any) -> Told:
    """Fit the coefficients of a profile to executed runs and write a new profile.

    RUN is a folder of rlhfsim launch or rlhfsim import-run, a log that import-run reads, or a folder of many
    such: it is sorted by framework and GPU, and each run that cannot be used is named with the reason.
    Coefficients that these runs cannot tell keep what was believed, by name. What the calls of a framework
    take beyond them is kept by phase and engine mode. Errors before and after are of runs that the fit had
    not seen.

    Exit codes: 0 fitted, 2 bad input or too few data.
    """
    if out is not None:
        check_new(out)
    _check_once(runs)
    with console(stderr=True).status(f"reading {len(runs)} runs") as status:
        with on_command_line():
            base = None if profile is None else load_profile(profile)
        with TemporaryDirectory() as scratch:
            seen, unused = read_runs(runs, Path(scratch))
        if not all(map(is_run_folder, runs)):
            seen, elsewhere = of_one_gpu(seen, base)
            unused += elsewhere
        status.update("fitting, then fitting again without each run in turn")
        fitted = fit(seen, base)
        left = tuple(f"{one.run}: not used, {one.reason}" for one in unused)
        fitted = replace(fitted, notes=(*left, *fitted.notes))
    if out is not None:
        write_profile(out, fitted, profile)
    return Told(calibrate_page(fitted, out))


def _check_once(runs: Sequence[Path]) -> None:
    """That no folder is given twice: a run counted twice looks like two that agree.

    Raises:
        RlhfsimError: one is.
    """
    known: set[Path] = set()
    for folder in runs:
        place = Path(os.path.realpath(folder))
        if place in known:
            raise bad_option(f"run {folder} is given twice", "give each run once")
        known.add(place)
