"""Moves of a role between GPU memory, host memory and disk: sleep, wake, offload, reload, recreate.

    T = bytes per GPU / B + constant        B of `costs.transfer.host_rate`, all GPUs of a node at once

Physics section 6. Level 1 of vLLM's sleep copies the weights to the host, level 2 drops them (the
weight sync must bring them back); the KV cache is dropped by both. Not known here: pinning of host
memory at the first offload, which takes seconds once, and NUMA placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhfsim.costs.cost import Cost
from rlhfsim.costs.device import Device
from rlhfsim.costs.transfer import handled, host_rate, moved, read_rate, slower, write_rate
from rlhfsim.phases.weight_route import TRAINED_BYTES, adapter_params, weights_of
from rlhfsim.specs.backends import BACKENDS, Backend
from rlhfsim.specs.dataflow import Call
from rlhfsim.specs.layout import Layout, RolloutLayout
from rlhfsim.specs.model import ModelSpec
from rlhfsim.specs.placement import Placement, RolloutSeat, Seat
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.specs.workload import Workload

Store = Literal["host", "nvme"]
OPTIMIZER_BYTES: dict[str, float] = {"adam": 12.0, "adam8bit": 6.0}
"""Master copy (FP32) and two moments per trained element; 8-bit Adam stores a byte per moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one trained or frozen model on each GPU."""

    params: float
    gradients: float
    optimizer: float


def states(
    model: ModelSpec,
    layout: Layout,
    *,
    backend: Backend,
    trained: bool,
    optimizer: str = "adam",
    adapters: float | None = None,
) -> States:
    """What one GPU holds of a model under a layout (physics M1), experts over their own ranks.

    `adapters`: trained LoRA elements, when the base is frozen.
    """
    weights = weights_of(model)
    expert_ranks = layout.ep * layout.etp if layout.ep > 1 else layout.tp
    elements = (weights.dense / layout.tp + weights.experts / expert_ranks) / layout.pp
    copies = layout.gpus / (layout.tp * layout.pp)
    whole = elements / copies if layout.zero == 3 else elements
    learned = elements * (adapters / weights.params if adapters is not None else 1.0)
    return States(
        params=whole * TRAINED_BYTES,
        gradients=_cut(learned, copies, layout.zero >= 2) * BACKENDS[backend].gradient_bytes
        if trained
        else 0.0,
        optimizer=_cut(learned, copies, layout.zero >= 1) * OPTIMIZER_BYTES[optimizer]
        if trained
        else 0.0,
    )


def _cut(elements: float, copies: float, sharded: bool) -> float:
    return elements / copies if sharded else elements


def rollout_shard(model: ModelSpec, layout: RolloutLayout) -> float:
    """Bytes of weights on one rollout GPU."""
    weights = weights_of(model)
    dense = weights.dense / (layout.tp * layout.pp)
    width = BYTES_PER_ELEMENT[layout.precision]
    return (dense + weights.experts / layout.replica_gpus) * width


# --- single moves -------------------------------------------------------------------------------------


def copy_out(device: Device, size: float, *, to: Store = "host", copying: int | None = None) -> Cost:
    """`size` bytes from every copying GPU of a node to host memory or through it to NVMe."""
    return _copied(device, size, to, copying, out=True)


def copy_in(
    device: Device, size: float, *, source: Store = "host", copying: int | None = None
) -> Cost:
    """`size` bytes to every copying GPU of a node from host memory or NVMe."""
    return _copied(device, size, source, copying, out=False)


def _copied(device: Device, size: float, store: Store, copying: int | None, *, out: bool) -> Cost:
    if size <= 0:
        return Cost()
    link = host_rate(device, copying)
    if store == "nvme":
        disk = write_rate(device, shared=False) if out else read_rate(device, shared=False)
        link = slower(link, disk.scaled(1 / (copying or device.gpus_per_node)))
    return Cost(parts=(moved(size, link), handled(1, device, "pcie_latency")))


def sleep(device: Device, weights: float, *, level: int) -> Cost:
    """The engine frees its memory: level 0 nothing, 1 weights to the host, 2 weights dropped."""
    if level == 0:
        return Cost()
    copy = copy_out(device, weights) if level == 1 else Cost()
    return copy + Cost(parts=(handled(1, device, "sleep_latency"),))


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
    seat: Seat | RolloutSeat,
    call: Call,
    workload: Workload,
    placement: Placement,
) -> tuple[Cost, Cost]:
    """Cost before a call (bring its role into GPU memory) and after it (out again).

    Each call pays for itself: a role that is used twice in a row moves twice, as frameworks do.
    """
    if isinstance(seat, RolloutSeat):
        return _around_rollout(device, model, seat, placement)
    trained = call.kind == "train"
    lora = workload.lora if call.role == "actor" else None
    held = states(
        model, seat.layout, backend=placement.backend, trained=trained,
        optimizer=workload.optimizer,
        adapters=adapter_params(model, lora.rank) if lora else None,
    )  # fmt: skip
    return _around_role(device, seat, held, trained=trained)


def _around_rollout(
    device: Device, model: ModelSpec, seat: RolloutSeat, placement: Placement
) -> tuple[Cost, Cost]:
    size = rollout_shard(model, seat.layout)
    if seat.residency == "recreated":
        arrives = placement.weight_path not in ("none", "lora")
        return recreate(device, 0.0 if arrives else size), destroy(device)
    level = max(seat.sleep, 1) if seat.residency == "offloaded" else seat.sleep
    return wake(device, size, level=level), sleep(device, size, level=level)


def _around_role(
    device: Device, seat: Seat, held: States, *, trained: bool
) -> tuple[Cost, Cost]:
    """Weights move when the role is not resident; optimizer and gradients when it is trained.

    Weights that did not change are dropped, not copied back; gradients are dropped after the step.
    """
    layout = seat.layout
    weights = 0.0 if layout.offload_params != "none" else held.params
    optimizer = 0.0 if layout.offload_optimizer != "none" else held.optimizer
    if seat.residency == "recreated":
        size = weights + optimizer
        out = copy_out(device, size) if trained else Cost()
        return recreate(device, size), out + destroy(device)
    moving = weights if seat.residency == "offloaded" else 0.0
    if trained and (seat.offload_between or seat.residency == "offloaded"):
        size = moving + optimizer
        return copy_in(device, size), copy_out(device, size)
    return copy_in(device, moving), Cost()
