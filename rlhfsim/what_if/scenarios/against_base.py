"""A point of a what-if against its base: what was changed, what is chosen otherwise, what comes out.

Only what tells plans apart stands here; `rlhfsim diff` shows every field of two plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        "FP8 KV cache": w.kv_precision == "fp8",
        "8-bit Adam": w.optimizer == "adam8bit",
        "BF16 gradients": w.gradients == "bf16",
        "FP32 gradient sums": w.gradients == "fp32",
    }
    return {**decisions, "switches": ", ".join(name for name, on in switches.items() if on) or "none"}


def comes_out(base: PointResult, point: PointResult) -> tuple[ChangedFigure, ...]:
    """Figures that differ."""
    return tuple(changed_figures(figures(base), figures(point)))


def figures(point: PointResult) -> dict[str, Value]:
    """Step, time and money of a point by name."""
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
