"""How metrics.jsonl of a run of ours reads: `time/<phase>` under the names of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, Timer
from rlhfsim.interchange.logs.records import record_of_json
from rlhfsim.plan import Plan
from rlhfsim.run_folder import MAX_METRICS, METRICS, Row
from rlhfsim.specs.loading import read_text
from rlhfsim.units import GB, GIB

PEAK = "memory/peak_gib"


def _describe(settings: FrameworkSettings) -> RunDescription:
    raise RlhfsimError("no-plan", "a run of ours is described by its plan.json", help="name it with --plan")


def as_today(values: Mapping[str, float]) -> Mapping[str, float]:
    """With the memory of the fullest GPU in GiB; `memory/planned_gb` is there where GPUs are counted."""
    if "memory/planned_gb" not in values or "memory/peak_gb" not in values:
        return values
    return {**values, PEAK: values["memory/peak_gb"] * GB / GIB}


def executor_of(plan: Plan) -> Framework:
    """How to read the metrics of a run of this plan."""
    return Framework(
        configuration=Configuration(name="rlhfsim", title="our own executor", describe=_describe),
        timers=tuple(Timer(metric=f"time/{p.name}", phase=p.name) for p in plan.prediction.phases),
        step="time/step",
        times=("time/",),
        response=("response/length_mean",),
        longest=("response/length_max",),
        clipped=("response/truncated",),
        device_gib=(PEAK,),
        as_today=as_today,
        console=lambda: lambda line: None,
    )


def read_metrics(folder: Path) -> tuple[list[Row], list[str]]:
    """Rows of metrics.jsonl that are whole, and a sentence about the others."""
    path = folder / METRICS
    if not path.is_file():
        return [], [f"{METRICS} is missing: lengths and step times are taken from plan and trace"]
    rows = [_row(line) for line in read_text(path, MAX_METRICS).splitlines() if line.strip()]
    broken = rows.count(None)
    notes = [f"{broken} lines of {METRICS} are not whole"] if broken else []
    return [row for row in rows if row is not None], notes


def _row(line: str) -> Row | None:
    record = record_of_json(line)
    return {**record.values, "step": record.step} if record else None
