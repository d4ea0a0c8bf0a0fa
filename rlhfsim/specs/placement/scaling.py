"""A placement and its workload made small, so that the way a large system works runs on a small machine.

Pools keep their number and their roles, weight path, residency and schedule stay; sizes shrink. A figure of
the small run says nothing about the large one: it shows that the plan runs, and in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import AnyRolePlacement, Placement, ResourcePool, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Workload

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, LORA_RANK = 8, 4, 16, 16, 4
MAX_TP = 2
"""Heads of the tiny model divide by it."""


@frozen
class Replaced:
    """One field of a plan that a small run has otherwise."""

    field: str
    """Dotted, as in plan.json: `placement.actor.layout.dp`."""
    before: Any
    now: Any
    why: str


SMALL = "sizes shrink to this machine"
WHY: Mapping[str, str] = {
    "backend": "the executor trains with DeepSpeed or FSDP2",
    "weight_path": "the executor broadcasts whole buckets",
    "software": "the small run has the executor's own training stack",
    "precision": "CPUs run vLLM in BF16",
    "kv_precision": "CPUs run vLLM in BF16",
    "train_precision": "CPUs train in FP32",
    "optimizer": "8-bit Adam needs a GPU",
    "recompute": "all or nothing is recomputed here",
    "offload_optimizer": "on a CPU the optimizer is on the host already",
    "offload_params": "on a CPU the weights are on the host already",
    "model": "every role has the tiny model",
    "critic": "every role has the tiny model",
    "reference": "every role has the tiny model",
    "reward": "every role has the tiny model",
    "environment": "the tiny model plays no environment",
}
"""Last name of a field -> why a small run has another value; the others are `SMALL`."""
WHOLE = (
    *("workload.reward", "workload.environment", "workload.lora", "workload.prompt_len"),
    *("workload.response_len", "placement.software", "placement.schedule"),
)
"""Fields that are told whole."""


def replaced(before: tuple[Placement, Workload], now: tuple[Placement, Workload]) -> tuple[Replaced, ...]:
    """Every field that differs between a plan and the small one made of it."""
    keyed = [(placed.keyed, work) for placed, work in (before, now)]
    parts = zip(("placement", "workload"), *keyed, strict=True)
    pairs = [pair for name, old, new in parts for pair in _differences(name, old, new)]
    return tuple(
        Replaced(field=name, before=old, now=new, why=WHY.get(name.rsplit(".", 1)[-1], SMALL))
        for name, old, new in pairs
    )


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}.{i}", a, b)
        return
    if not is_dataclass(old) or type(old) is not type(new) or path in WHOLE:
        yield path, old, new
        return
    for field in fields(old):
        yield from _differences(f"{path}.{field.name}", getattr(old, field.name), getattr(new, field.name))


def scaled_placement(placement: Placement, slots: int, trainers: Collection[Backend]) -> Placement:
    """The placement on about `slots` devices; every pool keeps at least one, or the TP that it needs.

    `trainers`: the backends that are run, the first in place of another one.
    """
    total = max(pool.start + pool.gpus for pool in placement.pools)
    pools, start = [], 0
    for pool in sorted(placement.pools, key=lambda p: p.start):
        size = min(max(_least(placement, pool), round(pool.gpus * slots / total)), pool.gpus)
        pools.append(ResourcePool(name=pool.name, start=start, gpus=size))
        start += size
    sizes = {pool.name: pool.gpus for pool in pools}
    roles = {name: _role(role, sizes[role.pool]) for name, role in placement.roles.items()}
    backend = placement.backend if placement.backend in trainers else next(iter(trainers))
    path = WEIGHT_PATHS[placement.weight_path].in_place_of or placement.weight_path
    software = placement.software if backend == placement.backend else None
    own: dict[str, Any] = {"backend": backend, "weight_path": path, "software": software}
    return Placement(pools=tuple(pools), roles=roles, schedule=placement.schedule, **own)


def _least(placement: Placement, pool: ResourcePool) -> int:
    """A pool that one tensor-parallel replica fills keeps two devices, so that it stays one."""
    filled = any(
        s.pool == pool.name and 1 < s.layout.tp == pool.gpus <= MAX_TP for s in placement.roles.values()
    )
    return MAX_TP if filled else 1


def _role(role: AnyRolePlacement, gpus: int) -> AnyRolePlacement:
    if isinstance(role, RolloutPlacement):
        tp, share = min(role.layout.tp, MAX_TP, gpus), min(0.3, role.layout.memory_utilization)
        return replace(role, layout=RolloutLayout(tp=tp, dp=gpus // tp, memory_utilization=share))
    layout = Layout(
        dp=gpus,
        zero=role.layout.zero if role.layout.dp > 1 else 0,
        micro_batch=min(role.layout.micro_batch, SAMPLES),
        recompute="none" if role.layout.recompute == "none" else "full",
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
        "rollout_bf16_attention": False,
        "rollout_bf16_layers": 0,
        "kv_precision": "bf16",
        "train_precision": "bf16",
        "speculation": None,
    }
    return replace(workload, **changes)
