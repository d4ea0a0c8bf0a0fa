"""What frameworks' own workers make of an export is the plan: degrees, micro-batches, batches, steps, offload.

A parser takes sizes that the workers then read otherwise, or not at all; here they set themselves up from the
exported file, without GPUs (`set_up`): what they derive is compared with the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rlhfsim.interchange.export import export
from rlhfsim.interchange.fields import leaves
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.placement import RolePlacement

OF = {
    "train_pack_tokens": "layout.pack_tokens",
    "score_pack_tokens": "layout.score_pack_tokens",
    "train_micro_batch": "layout.micro_batch",
    "score_micro_batch": "layout.score_micro_batch",
    "leaves": "offload_between",
    "sleeps": "sleep",
    "gpus": "pool",
}
"""Quantity of a role -> the field of the plan that says it, where it is not named alike."""
OF_WORKLOAD = {"updates": "workload.mini_batches", "rank_samples": "workload.samples"}


def planned(plan: Plan) -> dict[str, Any]:
    """What workers should make of a plan, by quantity."""
    work, placement = plan.workload, plan.placement
    said: dict[str, Any] = {
        "train.gpus": placement.pool(placement.actor.pool).gpus,
        "workload.packing": work.packing,
        "workload.prompts": work.prompts,
        "workload.samples": work.samples,
    }
    for role, placed in placement.roles.items():
        said |= {f"{role}.layout.{f.name}": getattr(placed.layout, f.name) for f in fields(placed.layout)}
        said[f"{role}.gpus"] = placement.pool(placed.pool).gpus
        if isinstance(placed, RolePlacement):
            said |= {f"{role}.{name}": value for name, value in _trained(plan, placed).items()}
        else:
            said[f"{role}.sleeps"] = placed.sleep > 0 or placement.schedule.lend
            said[f"{role}.sleep"] = placed.sleep_level
    return said


def _trained(plan: Plan, placed: RolePlacement) -> dict[str, Any]:
    work, layout = plan.workload, placed.layout
    packs = layout.pack_tokens is not None
    return {
        "layout.sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "layout.shards": layout.shards if layout.shards != layout.dp * layout.cp else None,
        "residency": placed.residency,
        "leaves": leaves(placed),
        "train_pack_tokens": layout.pack_tokens,
        "score_pack_tokens": layout.score_pack_tokens or layout.pack_tokens,
        "train_micro_batch": None if packs else layout.micro_batch,
        "score_micro_batch": None if packs else layout.sequences(scoring=True),
        "updates": work.mini_batches * work.epochs,
        "rank_samples": work.num_sequences // work.mini_batches // layout.dp,
    }


def differences(plan: Plan, name: str, derived: dict[str, Any]) -> Iterator[str]:
    """Quantities that are neither the plan's nor those that the export says it writes in their place."""
    unsaid = export(plan, name, frozenset()).written.unsaid
    named = {field for u in unsaid for field in u.of}
    said, instead = planned(plan), [planned(u.nearest) for u in unsaid if u.nearest is not None]
    for quantity, value in derived.items():
        role, _, rest = quantity.partition(".")
        as_said = [said[quantity], *(other.get(quantity) for other in instead)]
        fields_of = {f"{role}.{OF.get(rest, rest)}", role, OF_WORKLOAD.get(rest, quantity)}
        if value not in as_said and not fields_of & named:
            yield f"{quantity}: {said[quantity]} -> {value}"


_SIZES = {"layout.dp", "train_pack_tokens", "train_micro_batch"}
_STEPS = {"updates", "rank_samples"}
DERIVED = {
    "verl": {"layout.cp", "score_micro_batch", *_SIZES, *_STEPS},
    "openrlhf": {"layout.cp", "score_micro_batch", *_SIZES, *_STEPS},
    "skyrl": {"layout.cp", "score_micro_batch", *_SIZES, *_STEPS},
    "trl": _SIZES,
    "areal": {"layout.cp", "score_pack_tokens", "layout.dp", *_STEPS},
}
"""Framework -> quantities of the policy that its set-up must give."""
SLOW = ("openrlhf", "skyrl", "trl", "areal")
"""Those that are set up in long tests alone: their set-up imports for seconds what their parsers do not."""


def wrong(plan: Plan, name: str, found: dict[str, Any]) -> list[str]:
    """Why a framework refuses the export of a plan, or what its workers make of it otherwise, or not at all."""
    if found["refused"]:
        return [found["refused"]]
    missing = {f"actor.{quantity}" for quantity in DERIVED.get(name, ())} - found["derived"].keys()
    return [
        *(f"{quantity} is not derived" for quantity in missing),
        *differences(plan, name, found["derived"]),
    ]
