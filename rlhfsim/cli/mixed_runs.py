"""A folder of logs and run folders, sorted: every run that can be read, and why the others cannot.

A folder with a plan or a trace is a run of `rlhfsim launch` or `rlhfsim import-run`; a folder with a
configuration is one run of a framework; of any other each entry is looked at by itself. Logs are imported as
`rlhfsim import-run` does, with nothing but what they say.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.cli.import_run import import_into
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.logs.files import CONFIGS, TEXTS
from rlhfsim.interchange.logs.imported import Choices
from rlhfsim.run_folder import PLAN, TRACE
from rlhfsim.specs.hardware.hardware import Profile

LOGS = (*TEXTS, ".jsonl")
"""How the name of a log ends that may be a run by itself."""


@frozen
class NotUsed:
    """A run that calibrates nothing."""

    run: str
    reason: str


def is_run_folder(path: Path) -> bool:
    """Whether a folder is of `rlhfsim launch` or `rlhfsim import-run`, whole or not."""
    return (path / PLAN).is_file() or (path / TRACE).is_file()


def read_runs(paths: Sequence[Path], scratch: Path) -> tuple[tuple[Observation, ...], tuple[NotUsed, ...]]:
    """The runs at all paths; logs become run folders under `scratch`.

    Raises:
        RlhfsimError: a run folder that was given by name cannot be read, or nothing can.
    """
    runs: list[Observation] = []
    unused: list[NotUsed] = []
    for path in paths:
        entries = list(_entries(path))
        if is_run_folder(path) or not entries:
            runs.append(read_run(path))
            continue
        for entry in entries:
            name = _name(entry)
            try:
                runs.append(_read(entry, scratch / f"{len(runs)}" / name))
            except RlhfsimError as error:
                unused.append(NotUsed(run=name, reason=_reason(error)))
    if not runs:
        raise RlhfsimError(
            "too-few-data",
            "no run here can be used: " + "; ".join(f"{u.run}: {u.reason}" for u in unused[:3]),
            help="import each with rlhfsim import-run, which says what it needs",
        )
    return tuple(runs), tuple(unused)


def _entries(path: Path) -> Iterator[Path]:
    """What may be a run at a path: itself, or what lies in it."""
    if path.is_file() or any((path / name).is_file() for name in CONFIGS):
        yield path
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if child.suffix in LOGS or (child.is_dir() and not child.name.startswith(".")):
                yield child


def _name(entry: Path) -> str:
    """Name of a file or folder, `.` and `..` resolved; a link need not lead anywhere."""
    whole = Path(os.path.abspath(entry))
    return whole.name if whole.is_dir() else whole.stem


def _read(entry: Path, out: Path) -> Observation:
    if not is_run_folder(entry):
        import_into(entry, None, Choices(), out)
        entry = out
    return read_run(entry)


def _reason(error: RlhfsimError) -> str:
    if error.help and error.help.startswith("add "):
        return f"{error.message}; rlhfsim import-run reads it with {error.help[4:]}"
    return error.message


def of_one_gpu(
    runs: Sequence[Observation], profile: Profile | None
) -> tuple[tuple[Observation, ...], tuple[NotUsed, ...]]:
    """The runs on one kind of GPU, that of `profile` or of most of them, and the others."""
    kinds = Counter(run.plan.hardware[0].profile for run in runs)
    given = {profile.name, profile.calibration.base if profile.calibration else ""} if profile else set()
    chosen = next((kind for kind in kinds if kind in given), max(kinds, key=lambda kind: kinds[kind]))
    mine = tuple(run for run in runs if any(h.profile == chosen for h in run.plan.hardware))
    return mine, tuple(
        NotUsed(
            run=run.name,
            reason=f"ran on {run.plan.hardware[0].profile}; one kind of GPU is calibrated at a time: "
            f"--profile {run.plan.hardware[0].profile}",
        )
        for run in runs
        if run not in mine
    )
