"""How metrics.jsonl of a run of ours reads: `time/<phase>` under the names of its plan."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.frameworks.logs.framework import Framework, Timer
from rlhfsim.plan import Plan
from rlhfsim.units import GB, GIB

PEAK = "memory/peak_gib"


def _describe(settings: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
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
