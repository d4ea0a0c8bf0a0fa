"""Fields of a plan that change its price, and of which an export says nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rlhfsim.api import cluster_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.served_reward import served_reward
from rlhfsim.interchange.export import Written, exporter, in_keys
from rlhfsim.interchange.refusal import lacks_of
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Environment, Lora
from rlhfsim.what_if.estimate import priced_placement, step_of

LAYOUT: Mapping[str, tuple[Any, ...]] = {
    "micro_batch": (1, 2, 4),
    "score_micro_batch": (None, 2, 8),
    "pack_tokens": (None, 4096, 8192),
    "score_pack_tokens": (None, 16384),
    "zero": (1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (True, False),
    "offload_optimizer": ("none", "cpu"),
    "offload_params": ("none", "cpu"),
    "offload_fraction": (1.0, 0.5),
    "shards": (None, 2),
    "vp": (1, 2),
    "etp": (1, 2),
    "dispatcher": (None, "alltoall", "deepep"),
    "ep_overlap": (False, True),
}
ROLLOUT: Mapping[str, tuple[Any, ...]] = {
    "max_num_seqs": (128, 256),
    "max_batched_tokens": (8192, 16384),
    "memory_utilization": (0.5, 0.7),
    "cuda_graphs": (True, False),
    "precision": ("bf16", "fp8"),
    "kv_precision": ("bf16", "fp8"),
    "dispatcher": (None, "allgather", "deepep-ll"),
    "bf16_attention": (False, True),
    "bf16_layers": (0, 2),
    "engine": (None, "sglang"),
}
PLACED: Mapping[str, tuple[Any, ...]] = {
    "residency": ("resident", "offloaded", "swapped"),
    "offload_between": (False, True),
    "sleep": (0, 1, 2),
}
SCHEDULE: Mapping[str, tuple[Any, ...]] = {
    "staleness": (0, 1, 4),
    "partial_rollout": (False, True),
    "overlapped_sync": (False, True),
    "streaming": (False, True),
    "double_buffered": (False, True),
    "lend": (False, True),
}
WORKLOAD: Mapping[str, tuple[Any, ...]] = {
    "prompts": (64, 128),
    "samples": (4, 8),
    "mini_batches": (1, 2, 4),
    "epochs": (1, 2),
    "packing": (True, False),
    "gradients": ("backend", "bf16", "fp32"),
    "kl": (True, False),
    "old_logprobs": ("recompute", "rollout", "reused"),
    "lora": (None, Lora(rank=8), Lora(rank=32), Lora(rank=8, base="nf4")),
    "optimizer": ("adam", "adam8bit"),
    "train_precision": ("bf16", "fp8"),
    "router_replay": (False, True),
    "teacher_top": (0, 32, 64),
    "response_len": (Fixed(value=1024), Fixed(value=3072)),
    "environment": (None, Environment(turns=2), Environment(turns=4)),
    "dynamic_sampling": (
        None,
        DynamicSampling(kept=0.5, max_gen_batches=10),
        DynamicSampling(kept=0.5, gen_prompts=1024, max_gen_batches=10),
    ),
}


def variants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with another value of one field, by the field's name."""
    placement = plan.placement
    for name, values in WORKLOAD.items():
        yield from _others(plan, f"workload.{name}", plan.workload, name, values)
    for name, values in SCHEDULE.items():
        yield from _others(plan, f"schedule.{name}", placement.schedule, name, values)
    for role, placed in placement.roles.items():
        layouts = ROLLOUT if role == "rollout" else LAYOUT
        for name, values in layouts.items():
            yield from _others(plan, f"{role}.layout.{name}", placed.layout, name, values)
        for name, values in PLACED.items():
            if hasattr(placed, name):
                yield from _others(plan, f"{role}.{name}", placed, name, values)


def _others(
    plan: Plan, path: str, owner: Any, name: str, values: tuple[Any, ...]
) -> Iterator[tuple[str, Plan]]:
    for value in values:
        if value != getattr(owner, name):
            with suppress(RlhfsimError):  # no such plan can be
                yield path, _with(plan, path, name, value)


def _with(plan: Plan, path: str, name: str, value: Any) -> Plan:
    root, *rest = path.split(".")
    if root == "workload":
        return replace(plan, workload=replace(plan.workload, **{name: value}))
    placement = plan.placement
    if root == "schedule":
        changed: Any = {"schedule": replace(placement.schedule, **{name: value})}
    else:
        role = placement.roles[root]
        placed = {"layout": replace(role.layout, **{name: value})} if rest[0] == "layout" else {name: value}
        changed = {root: replace(role, **placed)}
    return replace(plan, placement=replace(placement, **changed))


def keys_of(plan: Plan, name: str) -> Written | None:
    """The keys that say a plan, without what these cannot say; None where the framework refuses it."""
    with suppress(RlhfsimError):
        if not list(lacks_of(plan, framework(name).of(plan.workload), frozenset())):
            return exporter(name).write(plan)
    return None


def silent(plan: Plan, name: str) -> Iterator[str]:
    """Fields whose other value is run, priced otherwise, and neither written nor named."""
    own = keys_of(plan, name)
    if own is None:
        return
    price, said, own = None, _said(plan, own, name), in_keys(plan, name)
    for path, other in variants(plan):
        keys = keys_of(other, name)
        if keys is None or _said(other, keys, name) != said:
            continue
        with suppress(RlhfsimError):
            written = in_keys(other, name)
            if _named(own) != _named(written) or _of(path, own, written):
                continue
            price = price or _price(plan)
            if not np.allclose(_price(other), price, rtol=1e-9):
                yield f"{path}: {_value(plan, path)} -> {_value(other, path)}"


def _of(path: str, *written: Written) -> bool:
    """Whether a field is among those of which something is named."""
    of = {field for each in written for u in each.unsaid for field in u.of}
    of |= {"rollout.residency"} if "rollout.sleep" in of else set()
    return path in of or path.split(".")[0] in of or ("roles" in of and path.startswith("reward."))


def _value(plan: Plan, path: str) -> Any:
    root, *rest = path.split(".")
    owner: Any = plan.workload if root == "workload" else plan.placement.schedule
    if root not in ("workload", "schedule"):
        owner = plan.placement.roles[root]
    for name in rest:
        owner = getattr(owner, name)
    return owner


def _said(plan: Plan, written: Written, name: str) -> tuple[Any, ...]:
    """The keys, the command below them, whose entry point may say a schedule, and the comment of a reward."""
    launch = exporter(name).files(plan, written)["launch.sh"]
    return written.values, launch.rpartition("\n)\n")[2], served_reward(plan, launch)


def _named(written: Written) -> list[tuple[str, str]]:
    return sorted((u.what, u.instead) for u in written.unsaid)


def _price(plan: Plan) -> tuple[float, float]:
    priced = priced_placement(plan.placement, plan.workload, cluster_of(plan))
    return step_of(priced).seconds, priced.memory.peak.bytes
