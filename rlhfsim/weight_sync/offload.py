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

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from rlhfsim.elementwise import Size, alike, numbered, some
from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import handled, host_rate, moved, pageable_rate, read_rate, slower, write_rate
from rlhfsim.memory.states import (
    CUT,
    PARTED,
    Optimizer,
    Parted,
    Shard,
    cut_alike,
    frozen_states,
    lora_states,
    parted,
    shard_of,
    stacked,
    stages,
    trained_states,
)
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import AnyLayout, ManyRoles
from rlhfsim.specs.placement.placement import (
    AnyRolePlacement,
    Placement,
    Rest,
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


class MovedBytes(NamedTuple):
    """Bytes on each GPU of a role that a move may carry, by what happens to them; arrays of many layouts."""

    frozen: Size
    """Weights that a call does not change: dropped after it, the host copy stays."""
    learned: Size
    """Trained weights."""
    optimizer: Size
    """Moments and master weights."""


def held(
    model: ModelSpec,
    layout: AnyLayout,
    backend: Backend,
    *,
    optimizer: Optimizer | None,
    lora: Lora | None = None,
) -> MovedBytes:
    """What a role holds on a GPU of its fullest stage; states that live on the host anyway left out.

    Without an optimizer its weights are frozen. Of columns of layouts arrays.

    All stages move at once, so the fullest decides. Gradients are not counted: they are zero between
    steps, so frameworks free them.
    """
    if isinstance(layout, Layout):
        return _held(model, _fullest(model, backend, parted(layout)), layout, backend, optimizer, lora)
    cuts = list(zip(*(column.tolist() for column in layout.columns(CUT)), strict=True))
    pieces, place = numbered(zip(*(column.tolist() for column in layout.columns(PARTED)), strict=True))
    parts, sizes = stacked([_fullest(model, backend, part) for part in pieces]), np.zeros((3, len(cuts)))
    for _, rows in alike(cut_alike(lora is not None, *cut) for cut in cuts):
        one = Layout(**dict(zip(CUT, cuts[rows[0]], strict=True)))
        part = parts.only(np.array(place)[rows])
        for size, found in zip(sizes, _held(model, part, one, backend, optimizer, lora), strict=True):
            size[rows] = found
    return MovedBytes(*sizes)


def _fullest(model: ModelSpec, backend: Backend, part: Parted) -> Shard:
    each = [shard_of(model, backend, stage, part) for stage in stages(part[1])]
    return max(each, key=lambda p: p.dense / p.dense_ranks + p.expert / p.expert_ranks)


def _held(
    model: ModelSpec,
    part: Shard,
    layout: Layout,
    backend: Backend,
    optimizer: Optimizer | None,
    lora: Lora | None,
) -> MovedBytes:
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
    device: Device, size: Size, *, to: Store = "host", copying: int | None = None, pinned: bool = True
) -> Cost:
    """`size` bytes from every copying GPU of a node to host memory or through it to NVMe."""
    return _copied(device, size, to, copying, pinned, out=True)


def copy_in(
    device: Device, size: Size, *, source: Store = "host", copying: int | None = None, pinned: bool = True
) -> Cost:
    """`size` bytes to every copying GPU of a node from host memory or NVMe."""
    return _copied(device, size, source, copying, pinned, out=False)


def _copied(
    device: Device, size: Size, store: Store, copying: int | None, pinned: bool, *, out: bool
) -> Cost:
    copies = size > 0
    if not some(copies):
        return Cost()
    link = host_rate(device, copying) if pinned else pageable_rate(device, copying)
    if store == "nvme":
        disk = write_rate(device, shared=False) if out else read_rate(device, shared=False)
        link = slower(link, disk.scaled(1 / (copying or device.gpus_per_node)))
    pages = [handled(size / GB, device, "fresh_host_memory_time")] if out and not pinned else []
    return Cost(parts=(moved(size, link), *pages, handled(1.0 * copies, device, "pcie_latency")))


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
    role: AnyRolePlacement | ManyRoles,
    call: Call,
    workload: Workload,
    placement: Placement,
) -> tuple[Cost, Cost]:
    """Cost before a call (bring its role into GPU memory) and after it (out again); of many roles arrays.

    Each call pays for itself: a role that is used twice in a row moves twice, as frameworks do. With
    `blocking_moves` a trained role moves with all its states, also for a forward pass.
    """
    if isinstance(role, RolloutPlacement):
        return _around_rollout(device, model, role, placement)
    swapped = role.residency == "swapped"
    if swapped and workload.base_is_reference:
        return Cost(), Cost()  # the actor's base gives its log-probs
    learns = swapped or (bool(device["blocking_moves"]) and call.role in TRAINED)
    optimizer = workload.optimizer if call.kind == "train" or learns else None
    lora = workload.lora if call.role == "actor" else None
    rest = Rest(role.residency, role.offload_between)
    found = _moves if isinstance(role, RolePlacement) else _moves.__wrapped__
    return found(device, model, role.layout, rest, placement.backend, optimizer, lora)


def leaving(device: Device, model: ModelSpec, layout: Layout, backend: Backend) -> Cost:
    """A trained role leaves GPU memory with its weights and optimizer states, as before a colocated refit."""
    return _moves(device, model, layout, Rest("offloaded", False), backend, "adam", None)[1]


@lru_cache(maxsize=1024)
def _moves(
    device: Device,
    model: ModelSpec,
    layout: AnyLayout,
    rest: Rest,
    backend: Backend,
    optimizer: Optimizer | None,
    lora: Lora | None,
) -> tuple[Cost, Cost]:
    """Moves of a role: lengths and batches do not matter, so that one answer serves many workloads."""
    role = held(model, layout, backend, optimizer=optimizer, lora=lora)
    return _around_role(device, rest, role, pinned=backend in PINNING)


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


def _around_role(device: Device, rest: Rest, role: MovedBytes, *, pinned: bool) -> tuple[Cost, Cost]:
    """Weights move when the role is not resident, optimizer states also with `offload_between`.

    A swapped reference: the actor's weights out and its own in, then the actor's in again, all between
    page-locked memory and the same GPU buffers.
    """
    if rest.residency == "swapped":
        into = copy_in(device, role.learned)
        return copy_out(device, role.learned) + into, into
    if rest.residency == "recreated":
        size = role.frozen + role.learned + role.optimizer
        out = copy_out(device, role.learned + role.optimizer, pinned=pinned)
        return recreate(device, size), out + destroy(device)
    away = rest.residency == "offloaded"
    learned = role.learned if away else 0.0
    optimizer = role.optimizer if away or rest.offload_between else 0.0
    frozen = role.frozen if away else 0.0
    back = copy_out(device, learned + optimizer, pinned=pinned)
    if some(leaves := away | (learned + optimizer > 0)):
        back += Cost(parts=(handled(1.0 * leaves, device, "unload_latency"),))
    before = copy_in(device, frozen + learned + optimizer, pinned=pinned)
    if device["group_restart_time"] and some(learned > 0):
        before += Cost(parts=(handled(1.0 * (learned > 0), device, "group_restart_time"),))
    return before, back
