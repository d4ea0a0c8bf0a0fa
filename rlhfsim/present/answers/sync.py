"""What `rlhfsim sync` answers: every way to move weights between two layouts, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhfsim.kernels.wan import wan_rate
from rlhfsim.present.answers.tree import Column, Page, answer, hidden, table_of
from rlhfsim.present.regions import link_words, reached
from rlhfsim.present.tables import (
    BYTES,
    DECIMAL_ENDS,
    DECIMALS,
    LIST,
    NAME,
    QUANTITIES,
    RATE,
    SECONDS,
    YES,
    Fit,
    ValueKind,
    fields,
)
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.weight_sync.endpoints import Route
from rlhfsim.weight_sync.weight_sync import SyncCost

SCHEMA, RUN_SCHEMA = "rlhfsim.sync/1", "rlhfsim.sync_run/1"
_PARTIAL = ("none", "lora", "quantised")
"""Paths that do not bring all trained weights over unchanged."""
_HEAVIEST = 3
"""Coefficients that are named per path."""


def sync_page(
    model: ModelSpec, profile: Profile, gpus_per_node: int, route: Route, costs: Sequence[SyncCost]
) -> Page:
    """The answer of every path: figures, then conditions; unavailable paths are dim."""
    pool = "one shared pool" if route.same_pool else "separate pools"
    link = route.wan
    pool = f"separate regions ({link_words(link)})" if link else pool
    fastest = min((c for c in costs if c.available and c.name not in _PARTIAL), key=lambda c: c.cost.seconds)
    seconds = SECONDS.shown(fastest.cost.seconds)
    size, ends = costs[0].model_bytes, f"{route.train.label} -> {route.rollout.label}"
    between = [reached(link, route.target)] if link else []
    figures = table_of(
        "Paths",
        costs,
        *hidden("name", "path"),
        Column("path", "title"),
        Column("here", "available", YES),
        *hidden("why_not"),
        Column("takes", "cost.seconds", SECONDS),
        Column("P10-P90", lambda c: (*c.cost.interval, "s"), QUANTITIES),
        Column(None, "cost.interval.0", key="low"),
        Column(None, "cost.interval.1", key="high"),
        Column("rate", lambda c: c.bytes_per_s if c.cost.seconds else None, RATE),
        *hidden("bytes_per_s", "bytes_moved"),
        Column("trainer", "extra_train_bytes", BYTES),
        Column("rollout", "extra_rollout_bytes", BYTES),
        Column("host", "extra_host_bytes", BYTES),
        Column("bound by", lambda c: c.cost.bound_by if c.cost.parts else None, key="bound_by"),
        Column(None, lambda c: c.cost.by_resource(), key="seconds_by_resource"),
        *hidden("limits", "overlaps_with"),
        Column(None, lambda c: list(c.cost.rests_on), key="rests_on"),
        name="paths",
        style=_style,
        notes=(
            "rate: bytes of the model per second; trainer, rollout, host: extra memory while it runs",
            *between,
        ),
    )
    conditions = table_of(
        "Conditions",
        costs,
        Column("path", "title", fit=Fit("words", ratio=24)),
        Column(
            "works only when",
            lambda c: c.limits + (f"\nnot here: {c.why_not}" if c.why_not else ""),
            fit=Fit("words", ratio=26),
        ),
        Column("overlaps with", "overlaps_with", fit=Fit("words", ratio=22)),
        Column("rests on", lambda c: c.cost.rests_on[:_HEAVIEST], LIST, fit=Fit("words", ratio=26)),
        style=_style,
    )
    return answer(
        SCHEMA,
        figures,
        conditions,
        title=f"{model.name}: {BYTES.shown(size)} in BF16, {ends}, {profile.title}, {pool}",
        verdict=f"fastest with all weights as trained: {fastest.title}, {seconds}",
        data={
            "model": model.name,
            "model_bytes": size,
            "from": route.train.label,
            "to": route.rollout.label,
            "gpu": profile.name,
            "gpus_per_node": gpus_per_node,
            **fields(route, "backend", "same_pool"),
            "wan": None if link is None else asdict(link) | {"reached": wan_rate(link, route.target).value},
        },
    )


def run_page(model: str, repeats: int, paths: Sequence[Any], titles: Mapping[str, str]) -> Page:
    """Paths that ran, with their `titles`: seconds of the first transfer and of those behind it."""
    timed = table_of(
        "",
        paths,
        *hidden("path", "bytes", "first_s", "median_s", "low_s", "high_s", "logprob_gap"),
        Column("path", lambda p: titles[p.path], NAME),
        Column("moved", "bytes", BYTES),
        Column("first s", "first_s", DECIMALS[3]),
        Column("median s", "median_s", DECIMALS[3]),
        Column("range s", lambda p: (p.low_s, p.high_s), DECIMAL_ENDS[3]),
        Column("|dlogp| after", "logprob_gap", ValueKind("{:.1e}".format)),
        name="paths",
        notes=(
            "seconds at the sending end: gather, transfer and load; checksums of both ends were equal; "
            "rollout and trainer share this machine",
        ),
    )
    return answer(RUN_SCHEMA, timed, data={"model": model, "repeats": repeats})


def _style(cost: SyncCost) -> str:
    return "" if cost.available else "dim"
