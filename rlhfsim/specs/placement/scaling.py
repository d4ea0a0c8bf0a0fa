"""A placement and its workload made small, so that the way a large system works runs on a small machine.

Pools keep their number and their roles, weight path, residency and schedule stay; sizes shrink. A figure of
the small run says nothing about the large one: it shows that the plan runs, and in which order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Workload

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, LORA_RANK = 8, 4, 16, 16, 4
MAX_TP = 2
"""Heads of the tiny model divide by it."""


def scaled_placement(placement: Placement, slots: int) -> Placement:
    """The placement on about `slots` devices; every pool keeps at least one, or the TP that it needs."""
    total = max(pool.start + pool.gpus for pool in placement.pools)
    pools, start = [], 0
    for pool in sorted(placement.pools, key=lambda p: p.start):
        size = min(max(_least(placement, pool), round(pool.gpus * slots / total)), pool.gpus)
        pools.append(ResourcePool(name=pool.name, start=start, gpus=size))
        start += size
    sizes = {pool.name: pool.gpus for pool in pools}
    roles: dict[str, Any] = {name: _role(role, sizes[role.pool]) for name, role in placement.roles.items()}
    return replace(placement, pools=tuple(pools), backend="deepspeed", **roles)


def _least(placement: Placement, pool: ResourcePool) -> int:
    """A pool that one tensor-parallel replica fills keeps two devices, so that it stays one."""
    filled = any(
        s.pool == pool.name and 1 < s.layout.tp == pool.gpus <= MAX_TP for s in placement.roles.values()
    )
    return MAX_TP if filled else 1


def _role(role: RolePlacement | RolloutPlacement, gpus: int) -> RolePlacement | RolloutPlacement:
    if isinstance(role, RolloutPlacement):
        tp, share = min(role.layout.tp, MAX_TP, gpus), min(0.3, role.layout.memory_utilization)
        return replace(role, layout=RolloutLayout(tp=tp, dp=gpus // tp, memory_utilization=share))
    layout = Layout(
        dp=gpus,
        zero=role.layout.zero if role.layout.dp > 1 else 0,
        micro_batch=min(role.layout.micro_batch, SAMPLES),
        recompute="none" if role.layout.recompute == "none" else "full",  # DeepSpeed has no selective one
    )
    return replace(role, layout=layout)


def scaled_workload(workload: Workload, model: str) -> Workload:
    """The workload with a small batch, short lengths and `model` in every role."""
    changes: dict[str, Any] = {
        "model": model,
        "critic": "same",
        "reference": "none" if workload.reference == "none" else "same",
        "reward": replace(workload.reward, model="same" if workload.has_reward_model else None),
        "prompts": min(PROMPTS, workload.prompts),
        "samples": min(SAMPLES, workload.samples),
        "prompt_len": Fixed(value=PROMPT_TOKENS),
        "response_len": Fixed(value=RESPONSE_TOKENS),
        "mini_batches": min(2, workload.mini_batches),
        "epochs": min(2, workload.epochs),
        "environment": None,
        "lora": Lora(rank=LORA_RANK) if workload.lora else None,
        "optimizer": "adam",
        "rollout_precision": "bf16",
    }
    return replace(workload, **changes)
