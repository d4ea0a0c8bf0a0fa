"""A point of a what-if against its base: what was changed, what is chosen otherwise, what comes out.

Only what tells plans apart is listed here; `rlhfsim diff` shows every field of two plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.what_if.differences import (
    ChangedField,
    ChangedFigure,
    Leaf,
    Value,
    changed_figures,
    changes,
    leaves,
)
from rlhfsim.what_if.scenarios.result import PointResult
from rlhfsim.what_if.work import By

OF_A_STEP = ("step", "price of a step")
"""Figures of one step, whatever the run."""


def asked(point: PointResult) -> tuple[ChangedField, ...]:
    """What the point sets to another value than the base has."""
    before, after = (
        dict(leaf for path, value in values.items() for leaf in _leaves(path, value))
        for values in (point.before, point.changes)
    )
    return tuple(changes(before, after))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Leaf]]:
    """A value, or the values inside a mapping, with their paths."""
    if isinstance(value, list) and not value:
        yield path, "none"
    elif isinstance(value, Mapping | list):
        yield from leaves(value, path)
    else:
        yield path, value


def chosen(base: Plan, plan: Plan) -> tuple[ChangedField, ...]:
    """What another plan is chosen to be."""
    return tuple(changes(in_short(base), in_short(plan)))


def in_short(plan: Plan) -> dict[str, Leaf]:
    """A plan in a line for each decision."""
    p, w = plan.placement, plan.workload
    decisions: dict[str, Leaf] = {"architecture": plan.architecture, "role_placement": plan.role_placement}
    decisions["pools"] = ", ".join(f"{pool.name} {pool.gpus:,}" for pool in p.pools)
    decisions["actor"] = p.actor.layout.label
    if p.rollout is not None:
        decisions["rollout"] = p.rollout.layout.label
    decisions["weights by"] = p.weight_path
    decisions["staleness"] = p.schedule.staleness
    decisions["streaming"] = p.schedule.streaming
    switches = {
        "LoRA": w.lora is not None,
        "4-bit base": w.lora is not None and w.lora.base == "nf4",
        "FP8 training": w.train_precision == "fp8",
        "FP8 rollout": w.rollout_precision == "fp8",
        "MXFP4 rollout": w.rollout_precision == "mxfp4",
        "NVFP4 rollout": w.rollout_precision == "nvfp4",
        "FP8 KV cache": w.kv_precision == "fp8",
        "8-bit Adam": w.optimizer == "adam8bit",
        "BF16 gradients": w.gradients == "bf16",
        "FP32 gradient sums": w.gradients == "fp32",
    }
    return {**decisions, "switches": ", ".join(name for name, on in switches.items() if on) or "none"}


def comes_out(base: PointResult, point: PointResult) -> tuple[ChangedFigure, ...]:
    """Figures that differ; of a sample or a token of each where the point does other work."""
    how = by(point, base)
    return tuple(changed_figures(figures(base, how), figures(point, how)))


def by(point: PointResult, base: PointResult) -> By:
    """What amounts of a point and of the base are compared by."""
    return point.work.by(base.work) if point.work and base.work else "work"


def relative(
    point: PointResult, base: PointResult, of: Callable[[PointResult], float | None]
) -> float | None:
    """Relative change of an amount, by the sample or the token where the work is not the same."""
    value, before = of(point), of(base)
    if value is None or not before or point.work is None or base.work is None:
        return None
    return point.work.change(value, base.work, before)


def figures(point: PointResult, by: By = "work") -> dict[str, Value]:
    """Step, time and money of a point by name; with `by` those of a sample or a token."""
    whole, work = _figures(point), point.work
    if by == "work" or work is None:
        return whole
    step = replace(work, steps=None)
    of = {name: step if name in OF_A_STEP else work for name in whole}
    return {
        f"{name}, per {by}": v.scaled(of[name].amount(1.0, by)) for name, v in whole.items() if v.unit != "1"
    }


def _figures(point: PointResult) -> dict[str, Value]:
    if point.plan is None:
        return {}
    p = point.plan.prediction
    by_name = {"step": Value(value=p.step_s, unit="s", interval=(p.low_s, p.high_s))}
    if point.run_s is None:
        if p.usd_per_step is not None:
            by_name["price of a step"] = Value(value=p.usd_per_step, unit="usd")
        return by_name
    if point.steps is not None:
        by_name["steps of the run"] = Value(value=point.steps, unit="1")
    by_name["time of the run"] = Value(value=point.run_s, unit="s")
    if point.run_usd is not None:
        by_name["price of the run"] = Value(value=point.run_usd, unit="usd")
    return by_name
