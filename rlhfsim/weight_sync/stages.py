"""Stages that weights pass on their way to the rollout: gather, quantise, wire, load, remote calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rlhfsim.elementwise import Size, least, most, some, where
from rlhfsim.kernels.cost import Cost, Part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import (
    Rate,
    Stage,
    chosen,
    gather_rate,
    handled,
    hbm,
    moved,
    network,
    scale_up,
    slower,
)
from rlhfsim.kernels.wan import ramp, round_trips, wan_rate
from rlhfsim.units import GB
from rlhfsim.weight_sync.endpoints import TRAINED_BYTES, Route


class Priced(NamedTuple):
    """Time, traffic and extra memory of one path."""

    cost: Cost
    bytes_moved: Size = 0.0
    """Bytes over the deciding link, all GPUs together."""
    train_bytes: Size = 0.0
    """Extra device memory per training GPU."""
    rollout_bytes: Size = 0.0
    """Extra device memory per rollout GPU."""
    host_bytes: Size = 0.0
    """Host memory per node."""


def gathered(ends: Route, *, all_stages: bool) -> tuple[Size, Size]:
    """Bytes that one training GPU receives until it holds its stage, or the model (all stages).

    received = want - own        dense and experts by their own groups
    """
    want = TRAINED_BYTES * (1.0 if all_stages else 1 / ends.stages)
    return want * ends.weights.params, most(0.0, want * ends.weights.params - ends.train_shard)


def gather(ends: Route, *, all_stages: bool) -> Stage:
    """Full tensors from training shards: other stages, all-gather over tp, ep or ZeRO ranks, renaming.

        t = shard p_far / B_nic + (received - shard p_far) / B_gather + 2 held / B_hbm + n_tensors a

    p_far pipeline stages that are in other domains: each GPU receives their shards over its own NIC
    before its group gathers them. B_gather of the group's size (`kernels.links.gather_rate`); a is
    `sync_unshard_latency` where every parameter is gathered by itself (ZeRO-3, FSDP), else
    `sync_gather_latency`, with `sync_far_latency` on top where tensors cross nodes one by one. A
    collective a tensor reaches `sync_network_efficiency` of the network. Pipeline stages work side by
    side unless every GPU needs all of them.
    """
    held, received = gathered(ends, all_stages=all_stages)
    layout, device = ends.train, ends.source
    stages = ends.stages if all_stages else 1
    far_stages = stages - least(stages, most(1, device.domain // most(1, layout.gpus // layout.pp)))
    far = least(received, ends.train_shard * far_stages)
    crosses = (far_stages > 0) | (ends.gather_ranks > device.domain)
    names = ends.weights.tensors / (1 if all_stages else ends.stages)
    link = shared_network(device)
    return (
        moved(far, link),
        moved(received - far, gather_rate(device, ends.gather_ranks, link)),
        moved(2 * held, hbm(device)),
        named(ends, names),
        *([handled(where(crosses, names, 0), device, "sync_far_latency")] if some(crosses) else []),
    )


def named(ends: Route, names: Size) -> Part:
    """What gathers of `names` tensors take on the host."""
    return handled(names, ends.source, "sync_unshard_latency" if ends.sharded else "sync_gather_latency")


@lru_cache(maxsize=4096)
def shared_network(device: Device) -> Rate:
    """One GPU's share of the network as collectives of one tensor each reach it."""
    link, share = network(device), "sync_network_efficiency"
    low, high = device.spread(share)
    return Rate(
        value=link.value * device[share],
        resource=link.resource,
        rests_on=share,
        spread=(link.spread[0] * low, link.spread[1] * high),
    )


def quantise(ends: Route, elements: Size, tensors: Size) -> Stage:
    """BF16 to the rollout's format: read 2, write 1 byte an element, some kernels a tensor."""
    if not ends.quantised:
        return ()
    bytes_touched = elements * (TRAINED_BYTES + ends.sent_bytes_per_element)
    return (moved(bytes_touched, hbm(ends.source)), handled(tensors, ends.source, "sync_quantise_latency"))


def load(ends: Route, *, routed: bool = False) -> Stage:
    """The engine copies its slice of every tensor into place.

        t = 2 shard / B_hbm + n_mine a_load + n_experts_named E a_scan

    n_mine: tensors of which this GPU holds a part. Loaders of MoE models search their list of
    expert names for every expert tensor, half of it on average: hence E per tensor. `routed`: an earlier sync
    has found where each name goes.
    """
    factor = ends.tensors / ends.weights.tensors
    mine = ends.weights.dense_tensors + ends.weights.expert_tensors / ends.rollout.ep
    scans = 0.0 if routed else ends.weights.expert_tensors * ends.weights.num_experts * factor
    return (
        moved(2 * ends.rollout_shard, hbm(ends.target)),
        handled(mine * factor / ends.rollout.pp, ends.target, "sync_load_latency"),
        handled(scans / ends.rollout.pp, ends.target, "sync_scan_latency"),
    )


def quantise_all(ends: Route) -> Stage:
    """Every rank quantises what it gathered: kernels on full tensors, one after the other."""
    return quantise(ends, ends.weights.params, ends.weights.tensors)


def split(stage: Stage) -> list[Stage]:
    """What the host does for every name and what the GPU does with the bytes: neither waits for the other."""
    host = tuple(p for p in stage if p.resource == "overhead")
    return [tuple(p for p in stage if p.resource != "overhead"), host]


def staging(ends: Route) -> Stage:
    """Copies of the root and the engines between processes and buffers: S times `sync_staging_time` a GB."""
    return (handled(ends.sent / GB, ends.target, "sync_staging_time"),)


def start(ends: Route) -> Stage:
    """Barrier, fan-out of the request, last acknowledgement: once per sync; a WAN transfer gathers speed."""
    far = [ramp(ends.wan, ends.target)] if ends.wan else []
    return (handled(1, ends.target, "sync_start_latency"), *far)


def group(ends: Route) -> Stage:
    """A communicator made for this sync and destroyed after it."""
    return (handled(1, ends.target, "nccl_start_latency"),)


def calls(ends: Route, count: float) -> Stage:
    """`count` remote calls that nothing overlaps; to another region each is a round trip."""
    far = [round_trips(ends.wan, count)] if ends.wan else []
    return (handled(count, ends.target, "sync_rpc_latency"), *far)


def wire(ends: Route, size: float, nics: Size = 1.0) -> Stage:
    """Bytes from one root to every rollout GPU; receivers pass them on, so their number is free.

    Inside one domain NVLink, else the root's NIC (or `nics` of them where several ranks of the
    root's node have joined the communicator); to another region the WAN, which one copy crosses.
    """
    return (moved(size, wire_rate(ends, nics)),)


def wire_rate(ends: Route, nics: Size = 1.0) -> Rate:
    """Rate of a broadcast between the pools."""
    fast = slower(scale_up(ends.source), scale_up(ends.target))
    near = slower(fast, slower(network(ends.source), network(ends.target)).scaled(nics))
    near = slower(near, wan_rate(ends.wan, ends.target)) if ends.wan else near
    return chosen(ends.one_domain, fast, near)


def crossing(ends: Route, size: float) -> Sequence[Stage]:
    """The WAN under a shared folder: one copy crosses, and the nodes there read it."""
    return [(moved(size, wan_rate(ends.wan, ends.target)),)] if ends.wan else []


def bucket(ends: Route) -> float:
    """Bytes of one bucket; a tensor is never split."""
    return max(ends.target["sync_bucket_bytes"], ends.weights.largest * TRAINED_BYTES)


def num_buckets(ends: Route, size: float) -> float:
    """Buckets of one sync."""
    return max(1.0, size / bucket(ends))
