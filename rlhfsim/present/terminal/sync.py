"""What `rlhfsim sync` shows: every way to move weights between two layouts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.terminal.console import WIDTH
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.weight_sync.endpoints import Route
from rlhfsim.weight_sync.weight_sync import SyncCost

SCHEMA = "rlhfsim.sync/1"
_PARTIAL = ("none", "lora", "quantised")
"""Paths that do not bring all trained weights over unchanged."""
_HEAVIEST = 3
"""Coefficients that are named per path."""


def as_data(
    model: ModelSpec, profile: Profile, gpus_per_node: int, route: Route, costs: Sequence[SyncCost]
) -> dict[str, Any]:
    """The answer as plain data; bytes, seconds and bytes per second."""
    return {
        "schema": SCHEMA,
        "model": model.name,
        "model_bytes": costs[0].model_bytes,
        "from": route.train.label,
        "to": route.rollout.label,
        "gpu": profile.name,
        "gpus_per_node": gpus_per_node,
        "backend": route.backend,
        "same_pool": route.same_pool,
        "paths": [_path(cost) for cost in costs],
    }


def _path(cost: SyncCost) -> dict[str, Any]:
    low, high = cost.cost.interval
    return {
        "name": cost.name,
        "path": cost.path,
        "title": cost.title,
        "available": cost.available,
        "why_not": cost.why_not,
        "seconds": cost.cost.seconds,
        "low": low,
        "high": high,
        "bytes_per_s": cost.bytes_per_s,
        "bytes_moved": cost.bytes_moved,
        "extra_train_bytes": cost.extra_train_bytes,
        "extra_rollout_bytes": cost.extra_rollout_bytes,
        "extra_host_bytes": cost.extra_host_bytes,
        "bound_by": cost.cost.bound_by if cost.cost.parts else None,
        "seconds_by_resource": cost.cost.by_resource(),
        "limits": cost.limits,
        "overlaps_with": cost.overlaps_with,
        "rests_on": list(cost.cost.rests_on),
    }


def report(
    model: ModelSpec, profile: Profile, route: Route, costs: Sequence[SyncCost]
) -> list[RenderableType]:
    """Two tables: figures, then conditions; unavailable paths are dim."""
    pool = "one shared pool" if route.same_pool else "separate pools"
    fastest = min((c for c in costs if c.available and c.name not in _PARTIAL), key=lambda c: c.cost.seconds)
    return [
        Text(
            f"{model.name}: {units.format(costs[0].model_bytes, 'byte')} in BF16, "
            f"{route.train.label} -> {route.rollout.label}, {profile.title}, {pool}\n"
        ),
        _figures(costs),
        _conditions(costs),
        Text(
            f"fastest with all weights as trained: {fastest.title}, "
            f"{units.format(fastest.cost.seconds, 's')}. "
            "GB/s: bytes of the model per second. Extra GPU memory: training / rollout side."
        ),
    ]


def _figures(costs: Sequence[SyncCost]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("path")
    table.add_column("here", no_wrap=True)
    for name in ("seconds", "P10-P90", "GB/s", "extra GPU", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for c in costs:
        low, high = c.cost.interval
        table.add_row(
            c.title,
            "yes" if c.available else "no",
            units.significant(c.cost.seconds),
            f"{units.significant(low, 2)}-{units.significant(high, 2)}",
            units.significant(c.bytes_per_s / units.GB) if c.cost.seconds else "-",
            f"{_size(c.extra_train_bytes)} / {_size(c.extra_rollout_bytes)}",
            _size(c.extra_host_bytes),
            c.cost.bound_by if c.cost.parts else "-",
            style="" if c.available else "dim",
        )
    return table


def _size(size: float) -> str:
    return units.format(size, "byte", digits=2).replace(" ", "") if size else "0"


def _conditions(costs: Sequence[SyncCost]) -> Table:
    table = Table(box=SIMPLE, width=WIDTH, padding=(0, 1))
    for name, ratio in (("path", 24), ("works only when", 26), ("overlaps with", 22), ("rests on", 26)):
        table.add_column(name, ratio=ratio)
    for c in costs:
        limits = Text(c.limits)
        if c.why_not:
            limits.append(f"\nnot here: {c.why_not}", style="yellow")
        rests = ", ".join(c.cost.rests_on[:_HEAVIEST]) or "nothing"
        table.add_row(c.title, limits, c.overlaps_with, rests, style="" if c.available else "dim")
    return table
