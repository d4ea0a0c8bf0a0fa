"""A run in MLflow's file store: `mlruns/EXPERIMENT/RUN` with a file a metric and a file a parameter.

A line of a metric is `TIMESTAMP VALUE STEP`, a parameter's file is its value, and a `/` in a name is a folder
(mlflow/store/tracking/file_store.py). Nothing of MLflow is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.logs.records import Record, number
from rlhfsim.interchange.logs.tail import LineTail
from rlhfsim.specs.loading import read_text

MARK = "meta.yaml"
"""File in the folder of a run, next to the folders of its metrics and parameters."""
METRICS, PARAMETERS = "metrics", "params"
SYSTEM = "system"
"""Metrics of the machine, which have steps of their own."""


def is_run(path: Path) -> bool:
    """Whether a folder is that of one run."""
    return (path / MARK).is_file() and (path / METRICS).is_dir()


def run_in(path: Path) -> Path | None:
    """The run of a store, an experiment or its own folder; None: it is no store.

    Raises:
        RlhfsimError: there are several.
    """
    if is_run(path):
        return path
    runs = [
        p.parent for depth in ("*", "*/*", "*/*/*") for p in path.glob(f"{depth}/{MARK}") if is_run(p.parent)
    ]
    if len(runs) > 1:
        shown = ", ".join(str(run) for run in sorted(runs)[:3])
        raise RlhfsimError(
            "several-runs",
            f"{len(runs)} runs of MLflow are in this folder",
            place=Place(file=str(path)),
            help=f"name the folder of one: {shown}" + (", ..." if len(runs) > 3 else ""),
        )
    return runs[0] if runs else None


def parameters(run: Path) -> dict[str, str]:
    """The configuration by dotted key."""
    folder = run / PARAMETERS
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {".".join(path.relative_to(folder).parts): read_text(path).strip() for path in files}


class MlflowMetrics:
    """The metrics of a run; every line is read once."""

    def __init__(self, run: Path) -> None:
        """The folder of the run."""
        self._folder = run / METRICS
        self._tails: dict[Path, LineTail] = {}

    def new(self) -> Iterator[Record]:
        """What was logged since the last time, by step."""
        by_step: dict[int, dict[str, float]] = {}
        for path in sorted(p for p in self._folder.rglob("*") if p.is_file()):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(f"{SYSTEM}/"):
                continue
            for text in self._tails.setdefault(path, LineTail(path)).texts():
                for step, value in _points(text.splitlines()):
                    by_step.setdefault(step, {})[name] = value
        return (Record(step=step, values=values) for step, values in sorted(by_step.items()))


def _points(lines: Sequence[str]) -> Iterator[tuple[int, float]]:
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[2].isdecimal() and len(words[2]) < 13:
            value = number(words[1])
            if value is not None:
                yield int(words[2]), value
