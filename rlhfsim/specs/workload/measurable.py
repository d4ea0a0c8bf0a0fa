"""What a workload states and a run measures: seconds of reward rules, environments and own parts; turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import Any, get_args

from rlhfsim.specs.hardware.calibrated import Measurable
from rlhfsim.specs.workload.workload import Workload

RULES: Measurable = "reward.rules.seconds_per_sample"
ANSWER: Measurable = "environment.seconds_per_turn"
TURNS: Measurable = "environment.mean_turns"
OWN_LOSS: Measurable = "custom.loss"


def stated(workload: Workload) -> dict[Measurable, float]:
    """What a workload says of each, in SI units; what it does not have is left out."""
    values: dict[Measurable, Any] = {
        name: reduce(_inner, name.split("."), workload) for name in get_args(Measurable)
    }
    if workload.environment is not None:
        values[TURNS] = values[TURNS] or workload.environment.turns
    return {name: float(value) for name, value in values.items() if value}


def _inner(spec: Any, name: str) -> Any:
    return getattr(spec, name) if spec is not None else None


def restated(workload: Workload, values: Mapping[Measurable, float]) -> Workload:
    """The workload with other values of what it has; mean turns stay between 1 and the most."""
    known = stated(workload)
    for name, value in values.items():
        if name == TURNS and workload.environment is not None:
            value = min(max(1.0, value), workload.environment.turns)
        if name in known:
            workload = _with(workload, name.split("."), value)
    return workload


def as_measured(workload: Workload, steps: Mapping[Measurable, tuple[float, ...]]) -> Workload:
    """The workload with the median of what each was in the steps of a run."""
    return restated(workload, {name: median(values) for name, values in steps.items() if values})


def _with(spec: Any, path: list[str], value: float) -> Any:
    first, *rest = path
    return replace(spec, **{first: _with(getattr(spec, first), rest, value) if rest else value})
