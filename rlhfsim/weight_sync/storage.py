"""Weight paths through disk and host memory."""

from __future__ import annotations

from rlhfsim.elementwise import Size, least, where
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import (
    Rate,
    gather_rate,
    host_rate,
    moved,
    network,
    pipelined,
    read_rate,
    serial,
    slower,
    write_rate,
)
from rlhfsim.weight_sync.endpoints import Route
from rlhfsim.weight_sync.stages import (
    Priced,
    bucket,
    calls,
    crossing,
    gather,
    group,
    load,
    num_buckets,
    quantise_all,
    start,
)


def disk(ends: Route, *, shared: bool) -> Priced:
    """S6: gather and write once, then every node of the rollout reads what its replicas need.

        T = pipe(gather, S / (w B_write)) + pipe(S min(1, g/r) / B_read, copy in, load)

    w nodes write, g GPUs a node, r GPUs a replica; a node reads a file once (page cache).
    """
    writers = where(ends.sharded | (ends.train.pp > 1), _nodes(ends.train.gpus, ends.source), 1)
    node_share = least(1.0, ends.target.gpus_per_node / ends.rollout.replica_gpus)
    out = write_rate(ends.source, shared=shared).scaled(writers)
    save = (moved(ends.sent, out),)
    fetch = (moved(ends.sent * node_share, read_rate(ends.target, shared=shared)),)
    copy = (moved(ends.rollout_shard, host_rate(ends.target)),)
    ready = gather(ends, all_stages=False) + quantise_all(ends)
    count = num_buckets(ends, ends.sent)
    cost = (
        serial([start(ends)])
        + pipelined([ready, save], count)
        + pipelined([*crossing(ends, ends.sent), fetch, copy, load(ends)], count)
    )
    reads = ends.sent * node_share * _nodes(ends.rollout.gpus, ends.target)
    return Priced(
        cost=cost,
        bytes_moved=ends.sent + reads,
        train_bytes=bucket(ends),
        rollout_bytes=bucket(ends),
        host_bytes=ends.sent * node_share,
    )


def _nodes(gpus: Size, device: Device) -> Size:
    return -(-gpus // device.gpus_per_node)


def host_update(ends: Route, *, staged: Rate | None = None) -> Priced:
    """S4, the update itself: weights are in pinned host memory, cut over the rollout GPUs.

        T = start + communicator + (S / n) / B_h2d + pipeline(broadcast, reload)

    n rollout GPUs. The process group is made for each update (checkpoint-engine `ps.py`,
    `auto_pg`), so that engines may come and go; copies into the GPU and the broadcast share PCIe, so they do
    not overlap (Kimi K2, arXiv 2507.20534, appendix; checkpoint-engine README). `staged` replaces B_h2d.
    """
    gpus = ends.rollout.gpus
    copy = (moved(ends.sent / gpus, staged or host_rate(ends.target)),)
    spread = (moved(ends.sent, gather_rate(ends.target, gpus)),)
    count = num_buckets(ends, ends.sent)
    cost = serial([start(ends), group(ends), calls(ends, count), copy]) + pipelined(
        [spread, load(ends)], count
    )
    node = least(ends.target.gpus_per_node, gpus)
    return Priced(
        cost=cost,
        bytes_moved=ends.sent * gpus,
        rollout_bytes=3 * bucket(ends),
        host_bytes=ends.sent / gpus * node,
    )


def host(ends: Route) -> Priced:
    """S4 with the way out: gather, quantise, copy to the host, then the update.

    In another pool the weights cross the network from host to GPU, at the slower of NIC and PCIe.
    """
    out = (moved(ends.sent / ends.train.gpus, host_rate(ends.source)),)
    ready = gather(ends, all_stages=False) + quantise_all(ends)
    link = host_rate(ends.target)
    far = None if ends.same_pool else slower(link, network(ends.target))
    update = host_update(ends, staged=far)
    cost = pipelined([ready, out], num_buckets(ends, ends.sent)) + update.cost
    return Priced(
        cost=cost,
        bytes_moved=update.bytes_moved + ends.sent,
        train_bytes=2 * bucket(ends),
        rollout_bytes=update.rollout_bytes,
        host_bytes=update.host_bytes,
    )
