"""Moves of a role between GPU memory, host memory and disk: sleep, wake, offload, reload, recreate.

    T = bytes per GPU / B + constant        B of `kernels.links.host_rate`, all GPUs of a node at once

Physics section 6. Level 1 of vLLM's sleep copies the weights to the host, level 2 drops them (the
weight sync must bring them back); the KV cache is dropped by both (`sleep_latency`). After an offload of a
role the allocator's cache is emptied (`unload_latency`); some frameworks destroy the process groups of a
trained role that leaves and create them again (`group_restart_time`, once a step: before it trains). A copy
out to pageable memory takes fresh pages every time (`fresh_host_memory_time` a GB), slower than the copy
itself. Not known here: NUMA placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import handled, host_rate, moved, pageable_rate, read_rate, slower, write_rate
from rlhfsim.memory.states import Optimizer, frozen_states, lora_states, shard, stages, trained_states
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    AnyRolePlacement,
    Placement,
    Residency,
    RolePlacement,
    RolloutPlacement,
)
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.units import GB
from rlhfsim.weight_sync.endpoints import mean_bytes, weights_of

Store = Literal["host", "nvme"]
PINNING: frozenset[Backend] = frozenset({"deepspeed"})
"""Backends whose offload pins host memory: DeepSpeed `offload_states(pin_memory=True)`. The Megatron
and FSDP workers of verl and NeMo-RL use `tensor.to("cpu")`, which is pageable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Bytes on each GPU of a role that a move may carry, by what becomes of them."""

    frozen: float
    """Weights that a call does not change: dropped after it, the host copy stays."""
    learned: float
    """Trained weights."""
    optimizer: float
    """Moments and master weights."""


def held(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    *,
    optimizer: Optimizer | None,
    lora: Lora | None = None,
) -> MovedBytes:
    """What a role holds on a GPU of its fullest stage; states that live on the host anyway left out.

    Without an optimizer its weights are frozen.

    All stages move at once, so the fullest decides. Gradients are not counted: they are zero between
    steps, so frameworks free them.
    """
    parts = [shard(model, layout, backend, stage) for stage in stages(layout)]
    part = max(parts, key=lambda p: p.dense / p.dense_ranks + p.expert / p.expert_ranks)
    if optimizer is None:
        return MovedBytes(frozen=frozen_states(part, layout).weights, learned=0.0, optimizer=0.0)
    if lora is None:
        states = trained_states(part, layout, backend, optimizer=optimizer)
        return MovedBytes(frozen=0.0, learned=states.weights, optimizer=states.optimizer)
    base, adapters = lora_states(model, part, layout, backend, lora, optimizer=optimizer)
    return MovedBytes(frozen=base.weights, learned=adapters.weights, optimizer=adapters.optimizer)


def rollout_shard(model: ModelSpec, layout: RolloutLayout) -> float:
    """Bytes of weights on one rollout GPU."""
    weights = weights_of(model)
    dense = weights.dense / (layout.tp * layout.pp)
    width = mean_bytes(weights, layout)
    return (dense + weights.experts / layout.replica_gpus) * width


# --- single moves -------------------------------------------------------------------------------------


def copy_out(
    device: Device, size: float, *, to: Store = "host", copying: int | None = None, pinned: bool = True
) -> Cost:
    """`size` bytes from every copying GPU of a node to host memory or through it to NVMe."""
    return _copied(device, size, to, copying, pinned, out=True)


def copy_in(
    device: Device, size: float, *, source: Store = "host", copying: int | None = None, pinned: bool = True
) -> Cost:
    """`size` bytes to every copying GPU of a node from host memory or NVMe."""
    return _copied(device, size, source, copying, pinned, out=False)


def _copied(
    device: Device, size: float, store: Store, copying: int | None, pinned: bool, *, out: bool
) -> Cost:
    if size <= 0:
        return Cost()
    link = host_rate(device, copying) if pinned else pageable_rate(device, copying)
    if store == "nvme":
        disk = write_rate(device, shared=False) if out else read_rate(device, shared=False)
        link = slower(link, disk.scaled(1 / (copying or device.gpus_per_node)))
    fresh = size / GB if out and not pinned else 0.0
    pages = handled(fresh, device, "fresh_host_memory_time")
    return Cost(parts=(moved(size, link), *([pages] if fresh else []), handled(1, device, "pcie_latency")))


def sleep(device: Device, weights: float, *, level: int) -> Cost:
    """The engine frees its memory: level 0 nothing, 1 weights to the host, 2 weights dropped.

    `engine_sleep_fraction` of `sleep_latency`: all of it on a GPU, next to nothing on a CPU, where vLLM
    frees nothing.
    """
    if level == 0:
        return Cost()
    copy = copy_out(device, weights) if level == 1 else Cost()
    share = device["engine_sleep_fraction"]
    return copy + Cost(parts=(handled(share, device, "sleep_latency"),))


def wake(device: Device, weights: float, *, level: int) -> Cost:
    """The engine maps its memory again; after level 1 the weights come back from the host.

    After level 2 the weight sync fills them: its time is not counted here.
    """
    if level == 0:
        return Cost()
    copy = copy_in(device, weights) if level == 1 else Cost()
    return copy + Cost(parts=(handled(1, device, "wake_latency"),))


def recreate(device: Device, size: float, *, source: Store = "host") -> Cost:
    """A destroyed process starts again and reads `size` bytes per GPU."""
    start = Cost(parts=(handled(1, device, "process_start"),))
    return start + copy_in(device, size, source=source)


def destroy(device: Device) -> Cost:
    """A process ends and its memory is free."""
    return Cost(parts=(handled(1, device, "sleep_latency"),))


# --- moves around one call ----------------------------------------------------------------------------


def moves(
    device: Device,
    model: ModelSpec,
    role: AnyRolePlacement,
    call: Call,
    workload: Workload,
    placement: Placement,
) -> tuple[Cost, Cost]:
    """Cost before a call (bring its role into GPU memory) and after it (out again).

    Each call pays for itself: a role that is used twice in a row moves twice, as frameworks do. With
    `blocking_moves` a trained role moves with all its states, also for a forward pass.
    """
    if isinstance(role, RolloutPlacement):
        return _around_rollout(device, model, role, placement)
    swapped = role.residency == "swapped"
    if swapped and workload.base_is_reference:
        return Cost(), Cost()  # the actor's base gives its log-probs
    learns = swapped or (bool(device["blocking_moves"]) and call.role in TRAINED)
    return _moves(
        device,
        model,
        role.layout,
        role.residency,
        role.offload_between,
        placement.backend,
        workload.optimizer if call.kind == "train" or learns else None,
        workload.lora if call.role == "actor" else None,
    )


def leaving(device: Device, model: ModelSpec, layout: Layout, backend: Backend) -> Cost:
    """A trained role leaves GPU memory with its weights and optimizer states, as before a colocated refit."""
    return _moves(device, model, layout, "offloaded", False, backend, "adam", None)[1]


@lru_cache(maxsize=1024)
def _moves(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    residency: Residency,
    between: bool,
    backend: Backend,
    optimizer: Optimizer | None,
    lora: Lora | None,
) -> tuple[Cost, Cost]:
    """Moves of a role: lengths and batches do not matter, so that one answer serves many workloads."""
    role = held(model, layout, backend, optimizer=optimizer, lora=lora)
    placed = RolePlacement(pool="any", layout=layout, residency=residency, offload_between=between)
    return _around_role(device, placed, role, pinned=backend in PINNING)


def _around_rollout(
    device: Device, model: ModelSpec, role: RolloutPlacement, placement: Placement
) -> tuple[Cost, Cost]:
    size = rollout_shard(model, role.layout)
    if role.residency == "recreated":
        rules = WEIGHT_PATHS[placement.weight_path]
        arrives = rules.copies and not rules.adapters_only
        return recreate(device, 0.0 if arrives else size), destroy(device)
    level = max(role.sleep, 1) if role.residency == "offloaded" else role.sleep
    return wake(device, size, level=level), sleep(device, size, level=level)


def _around_role(
    device: Device, placed: RolePlacement, role: MovedBytes, *, pinned: bool
) -> tuple[Cost, Cost]:
    """Weights move when the role is not resident, optimizer states also with `offload_between`.

    A swapped reference: the actor's weights out and its own in, then the actor's in again, all between
    page-locked memory and the same GPU buffers.
    """
    if placed.residency == "swapped":
        into = copy_in(device, role.learned)
        return copy_out(device, role.learned) + into, into
    if placed.residency == "recreated":
        size = role.frozen + role.learned + role.optimizer
        out = copy_out(device, role.learned + role.optimizer, pinned=pinned)
        return recreate(device, size), out + destroy(device)
    away = placed.residency == "offloaded"
    learned = role.learned if away else 0.0
    optimizer = role.optimizer if away or placed.offload_between else 0.0
    frozen = role.frozen if away else 0.0
    back = copy_out(device, learned + optimizer, pinned=pinned)
    if away or back.parts:
        back += Cost(parts=(handled(1, device, "unload_latency"),))
    before = copy_in(device, frozen + learned + optimizer, pinned=pinned)
    if learned and device["group_restart_time"]:
        before += Cost(parts=(handled(1, device, "group_restart_time"),))
    return before, back
