"""The folder that `rlhfsim launch` leaves, and an import of another framework's run (docs/executor.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import is_file
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import parse_json, read_text

PLAN, TRACE, METRICS, ENVIRONMENT = "plan.json", "trace.json", "metrics.jsonl", "environment.json"
SAMPLES = "samples.jsonl"
LOCK = ".lock"
"""Lock file of a launch, held while it runs; the file remains."""
AMENDMENTS = "amendments"
"""NNNN.yaml says what was changed when a run went on; NNNN has its inputs from then on."""
CHANGEABLE = ("data", "model", "plan", "rewards", "settings")
"""Parts of a run's inputs that may be changed by name when it goes on."""
HEAD_BYTES = 1000
"""In which a trace says whether it was measured."""
"""Files of a run folder; the first two must be there."""
MAX_METRICS = 256 * 2**20
"""Bytes; a larger metrics.jsonl is refused."""
Row = Mapping[str, Any]
"""One line of metrics.jsonl."""


def is_plan_of_a_run(path: Path) -> bool:
    """Whether a file is the plan of a run that was measured, imported or is under way."""
    trace = path.parent / TRACE
    if path.name != PLAN or not is_file(path):
        return False
    if is_file(path.parent / LOCK):
        return True
    if not is_file(trace):
        return False
    with trace.open("rb") as file:
        return b'"source": "measured"' in file.read(HEAD_BYTES)


def inputs_folder(folder: Path) -> Path:
    """Where plan and settings of a run are as they count now: in its newest amendment, else at its top."""
    names = [path.stem for path in (folder / AMENDMENTS).glob("*.yaml") if path.stem.isdigit()]
    return folder / AMENDMENTS / max(names, key=int) if names else folder


def check_run_folder(path: Path) -> None:
    """That a run has left its plan and its trace.

    Raises:
        RlhfsimError: one of them is missing.
    """
    for name in (PLAN, TRACE):
        if not (path / name).is_file():
            raise RlhfsimError(
                "not-a-run",
                f"there is no {name} in this folder",
                place=path,
                help="give the folder that rlhfsim launch --out wrote; a run that was killed before its "
                "first step has no trace",
            )


def read_environment(folder: Path) -> Row:
    """What environment.json says; empty without one."""
    path = folder / ENVIRONMENT
    return mapping(parse_json(read_text(path), str(path)).data) if path.is_file() else {}


def mapping(value: object) -> Row:
    """The value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def device_words(environment: Row, plan: Plan) -> str:
    """`2 x H100`, or the cores of a machine without GPUs."""
    devices = environment.get("devices")
    devices = devices if isinstance(devices, list) else []
    names = [str(d.get("name", d)) if isinstance(d, Mapping) else str(d) for d in devices]
    if names:
        return f"{len(names)} x {names[0]}"
    if "cores" in environment:
        return f"{environment.get('machine', 'cpu')}, {environment['cores']} cores"
    return " + ".join(f"{h.gpus} x {h.profile}" for h in plan.hardware)
