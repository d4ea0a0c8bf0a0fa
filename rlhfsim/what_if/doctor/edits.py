"""What a doctor tries on a run: one field of its specs at a time, whatever the framework calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlhfsim.interchange.configuration.described import RunSpecs
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.placement import Residency, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.what_if.dotted_paths import keys, put

Edit = Mapping[str, Any]
"""Dotted paths into `RunSpecs`, and values or functions of the value there."""
Roles = Mapping[str, RolePlacement]
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Shares of a GPU's memory for the rollout engine."""
RUNNING = (128, 256, 512, 1024)
"""Sequences that an engine runs at once."""
FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Factors on a micro-batch."""


def edited(specs: RunSpecs, edit: Edit) -> RunSpecs:
    """The specs with an edit.

    Raises:
        RlhfsimError: a value that is not possible there.
    """
    for path, value in edit.items():
        specs = put(specs, keys(path), value)
    return specs


def edits(specs: RunSpecs) -> Iterator[Edit]:
    """Every edit that is tried on its own; what a framework has no key for drops out later."""
    placement = specs.placement
    if placement.rollout is not None:
        yield from _rollout(specs, placement.rollout)
    roles = placement.trainers
    trained: Roles = {n: s for n, s in roles.items() if n in TRAINED}
    yield from _micro_batch(specs, roles)
    if not specs.workload.packing:
        yield {"workload.packing": True}
    for value in ("none", "selective", "full"):
        if value != placement.actor.layout.recompute:
            yield _layouts(trained, recompute=value)
    yield from _residency(roles, trained)
    yield from _degrees(specs, roles)


def _rollout(specs: RunSpecs, rollout: RolloutPlacement) -> Iterator[Edit]:
    layout, path = rollout.layout, "placement.rollout.layout"
    yield {f"{path}.cuda_graphs": not layout.cuda_graphs}
    for share in SHARES:
        if not math.isclose(share, layout.memory_utilization):
            yield {f"{path}.memory_utilization": share}
    for running in RUNNING:
        if running != layout.max_num_seqs:
            yield {f"{path}.max_num_seqs": running}
    gpus = specs.placement.pool(rollout.pool).gpus
    node = specs.cluster.node_groups[specs.placement.pool(rollout.pool).hardware].gpus_per_node
    for tp in (1, 2, 4, 8):
        each = tp * layout.pp * layout.attention_dp
        if tp != layout.tp and tp <= node and gpus % each == 0:
            yield {path: partial(replace, tp=tp, dp=gpus // each)}
    shared = rollout.pool == specs.placement.actor.pool
    if shared and not rollout.sleep:
        yield {"placement.rollout.sleep": 2}


def _micro_batch(specs: RunSpecs, roles: Roles) -> Iterator[Edit]:
    """Larger and smaller ones; packs in place of sequences."""
    layout, work = specs.placement.actor.layout, specs.workload
    longest = math.ceil((work.prompt_len.maximum + work.response_len.maximum) / layout.cp)
    if layout.pack_tokens is None:
        now = {"micro_batch": layout.micro_batch, "score_micro_batch": layout.sequences(scoring=True)}
        for field, sequences in now.items():
            for size in sorted({1, *(int(sequences * factor) for factor in FACTORS)} - {0, sequences}):
                yield _layouts(roles, **{field: size})
        for count in (1, 2, 4, 8, 16):
            packs = _layouts(roles, micro_batch=1, pack_tokens=count * longest)
            yield {"workload.packing": True, **packs}
        return
    for field in ("pack_tokens", "score_pack_tokens"):
        for factor in FACTORS:
            size = int((getattr(layout, field) or layout.pack_tokens) * factor)
            if size >= longest:
                yield _layouts(roles, **{field: size})


def _residency(roles: Roles, trained: Roles) -> Iterator[Edit]:
    """Weights and optimizer states in GPU memory or on the host."""
    actor = trained["actor"]
    scoring = {name: role for name, role in roles.items() if name not in trained}
    weights: Residency = "resident" if actor.residency == "offloaded" else "offloaded"
    yield _of(trained, "residency", weights)
    yield _of(trained, "offload_between", not actor.offload_between)
    yield _of(trained, "residency", weights) | _of(trained, "offload_between", weights == "offloaded")
    states = "cpu" if actor.layout.offload_optimizer == "none" else "none"
    yield _layouts(trained, offload_optimizer=states)
    yield _layouts(trained, offload_optimizer=states, offload_params=states)
    for role in list(scoring.values())[:1]:
        yield _of(scoring, "residency", "resident" if role.residency == "offloaded" else "offloaded")


def _degrees(specs: RunSpecs, roles: Roles) -> Iterator[Edit]:
    """Twice and half of every parallel degree, paid for by data parallelism; other ZeRO stages."""
    backend, layout = specs.placement.backend, specs.placement.actor.layout
    for name in ("tp", "pp", "cp"):
        now = getattr(layout, name)
        if layout.dp % 2 == 0:
            yield _layouts(roles, **{name: 2 * now}, dp=layout.dp // 2)
        if now % 2 == 0:
            yield _layouts(roles, **{name: now // 2}, dp=layout.dp * 2)
    if layout.ep > 1:
        yield _layouts(roles, ep=layout.ep // 2)
        yield _layouts(roles, ep=layout.ep * 2)
    for zero in range(4):
        if zero != layout.zero and violation(backend, replace(layout, zero=zero)) is None:
            yield _layouts(roles, zero=zero)


def _of(roles: Roles, field: str, value: Any) -> dict[str, Any]:
    return {f"placement.{role}.{field}": value for role in roles}


def _layouts(roles: Roles, **fields: Any) -> dict[str, Any]:
    return _of(roles, "layout", partial(replace, **fields))
