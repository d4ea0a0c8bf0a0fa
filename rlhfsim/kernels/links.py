"""Moving bytes: rates of the links that weights and offloaded states cross, pipelines, reshard volumes.

Rates are bytes/s as one GPU sees them. Not known here: other traffic on the same links, NUMA
placement, and what a file system's servers can do beyond the share of one node.
Sizes and rates may be arrays with an entry a transfer; what labels a rate is then that of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from rlhfsim.elementwise import Size, kept, largest, least, some, where
from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.units import GB


class Rate(NamedTuple):
    """A link as a transfer sees it."""

    value: Size
    """Byte/s."""
    resource: Resource
    rests_on: str
    """Coefficient that decides it."""
    spread: tuple[float, float]
    """P10 and P90 of the rate over its value."""

    def scaled(self, factor: Size) -> Rate:
        """The same link shared or bundled."""
        return Rate(self.value * factor, *self[1:])


Stage: TypeAlias = tuple[Part, ...]
"""One step that every byte passes: its busy seconds over the whole transfer."""


def rate(device: Device, resource: Resource, bandwidth: float, efficiency: str) -> Rate:
    """A datasheet bandwidth times an efficiency of the profile."""
    return Rate(
        value=bandwidth * device[efficiency],
        resource=resource,
        rests_on=efficiency,
        spread=device.spread(efficiency),
    )


@lru_cache(maxsize=4096)
def scale_up(device: Device) -> Rate:
    """NVLink (xGMI, PCIe) between GPUs of one domain, per GPU and direction."""
    return rate(device, "nvlink", device.profile.scale_up.bandwidth.value, "nvlink_efficiency")


@lru_cache(maxsize=4096)
def network(device: Device) -> Rate:
    """One GPU's share of the node's network, per direction."""
    return rate(device, "network", device.network_bandwidth, "nic_efficiency")


@lru_cache(maxsize=4096)
def hbm(device: Device) -> Rate:
    """Device memory, reads plus writes."""
    return rate(device, "hbm", device.profile.hbm.value, "hbm_efficiency")


def slower(first: Rate, second: Rate) -> Rate:
    """The link that decides when every byte crosses both."""
    return chosen(first.value <= second.value, first, second)


def chosen(holds: Size, first: Rate, second: Rate) -> Rate:
    """The first link where it holds, else the second."""
    if isinstance(holds, np.ndarray):
        return Rate(np.where(holds, first.value, second.value), *second[1:])
    return first if holds else second


@kept(maxsize=4096)
def gather_rate(device: Device, ranks: Size, link: Rate | None = None) -> Rate:
    """Bytes/s that each of `ranks` GPUs receives in an all-gather (or a broadcast they all join).

        B = min( B_nvlink,  g B_nic )          g = ranks of the group in one domain

    Rings enter a domain through the NIC of each of its g members, so the network bundle counts; `link`
    replaces the network of one. Source: NCCL's multi-channel rings; hierarchical form of physics section 4.
    """
    inside, fast = least(ranks, device.domain), scale_up(device)
    return chosen(inside >= ranks, fast, slower(fast, (link or network(device)).scaled(inside)))


@lru_cache(maxsize=4096)
def host_rate(device: Device, copying: int | None = None) -> Rate:
    """Bytes/s of a pinned copy between one GPU and host memory while `copying` GPUs of its node copy.

        B = min( s B_pcie eta_pcie,  B_ddr eta_ddr / n )     s = 1, or the shared share where n > 1

    `s` is `pcie_shared_fraction`: GPUs that hang on one switch port to the CPU halve each other's
    rate. Copies over NVLink-C2C (profiles above 100 GB/s) have no shared port.
    """
    n = copying if copying is not None else device.gpus_per_node
    lane = rate(device, "pcie", device.profile.pcie.value, "pcie_efficiency")
    if n > 1 and not _is_c2c(device):
        lane = lane.scaled(device["pcie_shared_fraction"])
    memory = device.profile.node.host_bandwidth.value / max(1, n)
    return slower(lane, rate(device, "host", memory, "host_copy_efficiency"))


@lru_cache(maxsize=4096)
def pageable_rate(device: Device, copying: int | None = None) -> Rate:
    """Bytes/s of a copy to or from ordinary host memory: staged through a pinned buffer by one thread."""
    pinned = host_rate(device, copying)
    low, high = device.spread("pageable_fraction")
    return Rate(
        value=pinned.value * device["pageable_fraction"],
        resource=pinned.resource,
        rests_on="pageable_fraction",
        spread=(low, high),
    )


def _is_c2c(device: Device) -> bool:
    return device.profile.pcie.value > 2 * PCIE5


PCIE5 = 63 * GB
"""Byte/s of PCIe 5 x16 after encoding; more than twice that is a chip-to-chip link."""


@lru_cache(maxsize=4096)
def write_rate(device: Device, *, shared: bool) -> Rate:
    """Bytes/s at which one node writes a checkpoint: to its own NVMe or to the shared file system."""
    node = device.profile.node
    if shared:
        return rate(device, "storage", node.shared_storage.value, "shared_storage_efficiency")
    return rate(device, "storage", node.local_storage.value, "local_storage_write")


@lru_cache(maxsize=4096)
def read_rate(device: Device, *, shared: bool) -> Rate:
    """Bytes/s at which one node reads a checkpoint."""
    node = device.profile.node
    if shared:
        return rate(device, "storage", node.shared_storage.value, "shared_storage_efficiency")
    return rate(device, "storage", node.local_storage.value, "local_storage_read_efficiency")


def moved(size: Size, link: Rate) -> Part:
    """`size` bytes over a link: t = S / B."""
    low, high = link.spread
    seconds = where(size > 0, size / link.value, 0.0)
    return part(link.resource, seconds, link.rests_on, spread=(1 / high, 1 / low if low else 1.0))


def through_memory(size: Size, device: Device, efficiency: str) -> Part:
    """`size` bytes through device memory at an efficiency of the profile."""
    return moved(size, rate(device, "hbm", device.profile.hbm.value, efficiency))


def handled(count: Size, device: Device, latency: str) -> Part:
    """`count` things that each cost a latency of the profile on the host."""
    seconds = where(count > 0, count * device[latency], 0.0)
    return part("overhead", seconds, latency, spread=device.spread(latency))


def serial(stages: Sequence[Stage]) -> Cost:
    """One stage after the other: t = sum t_i."""
    return Cost(parts=tuple(p for stage in stages for p in stage if some(p.seconds > 0)))


def pipelined(stages: Sequence[Stage], buckets: float) -> Cost:
    """Stages that overlap bucket by bucket.

        T = sum_i t_i / k + (1 - 1/k) max_i t_i          k buckets, t_i busy time of stage i

    The first term fills the pipeline, the second is the slowest stage. Source: physics S3.
    """
    k, slowest = max(1.0, buckets), largest(*(sum(p.seconds for p in stage) for stage in stages))
    shares = [1 / k + where(slowest == i, 1 - 1 / k, 0.0) for i in range(len(stages))]
    return Cost(
        parts=tuple(
            Part(p.resource, p.seconds * share, p.rests_on, p.spread)
            for stage, share in zip(stages, shares, strict=True)
            for p in stage
            if some(p.seconds > 0)
        )
    )


# --- HybridFlow, arXiv 2409.19256, Table 2: bytes that each GPU receives for a model of M bytes ------


def deepspeed_chat_volume(size: float, tp: Size, pp: Size, dp: Size) -> Size:
    """All-gather over every training GPU: (tpd - 1)/(tpd) M."""
    ranks = tp * pp * dp
    return (ranks - 1) / ranks * size


def vanilla_volume(size: float, tp: Size, pp: Size) -> Size:
    """All-gather over the model-parallel group: (tp - 1)/(tp) M, t and p of training."""
    ranks = tp * pp
    return (ranks - 1) / ranks * size
