"""The weight paths: how each chains its stages, what it moves and the memory it needs meanwhile."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from rlhfsim.elementwise import Size, least, most
from rlhfsim.kernels.cost import Cost, Part
from rlhfsim.kernels.links import (
    Stage,
    gather_rate,
    handled,
    hbm,
    host_rate,
    moved,
    pipelined,
    read_rate,
    serial,
    write_rate,
)
from rlhfsim.weight_sync.endpoints import TRAINED_BYTES, Route, Weights, without_ffn
from rlhfsim.weight_sync.stages import (
    Priced,
    bucket,
    calls,
    crossing,
    gather,
    gathered,
    load,
    named,
    num_buckets,
    quantise,
    quantise_all,
    split,
    staging,
    start,
    wire,
    wire_rate,
)

INDEX_BYTES = 4.0
"""Position of one changed element in a delta (int32)."""


def ipc(ends: Route, *, prequantised: bool = False) -> Priced:
    """S2: gather a bucket on every GPU, quantise, hand over the pointer, the engine copies its slice.

    T = start + calls + gather + quantise + load; trainer and engine take turns on one GPU, and every
    GPU gathers the whole model because the loader picks its slice from full tensors (verl, slime,
    NeMo-RL). `prequantised`: each GPU quantises its own shard before the gather, and the engine keeps the
    routes of its names from one sync to the next (NeMo-RL pull request 3294).
    """
    own = ends.weights.dense_tensors / ends.train.pp + ends.weights.expert_tensors / (
        ends.train.ep * ends.train.pp
    )
    small = quantise(ends, ends.train_shard / TRAINED_BYTES, own) if prequantised else quantise_all(ends)
    ready = gather(ends, all_stages=True) + small
    count = num_buckets(ends, ends.stored)
    cost = serial([start(ends), calls(ends, count), ready, load(ends, routed=prequantised)])
    held = 2 * bucket(ends)
    return Priced(
        cost=cost, bytes_moved=gathered(ends, all_stages=True)[1] * ends.train.gpus, train_bytes=held
    )


def ipc_per_parameter(ends: Route) -> Priced:
    """S2 without buckets: each parameter is gathered, its handle sent and its slice copied in turn.

        T = sum over parameters (t_gather + t_load + t_rpc)

    OpenRLHF `broadcast_to_vllm` with `use_cuda_ipc`, and NeMo-RL before its metadata were prepared
    ahead (pull request 638).
    """
    cost = serial(
        [
            start(ends),
            gather(ends, all_stages=True),
            quantise_all(ends),
            load(ends),
            calls(ends, ends.tensors),
        ]
    )
    moved_bytes = gathered(ends, all_stages=True)[1] * ends.train.gpus
    held = ends.weights.largest * TRAINED_BYTES
    return Priced(cost=cost, bytes_moved=moved_bytes, train_bytes=held)


def broadcast(
    ends: Route, *, nics: Size = 1.0, lanes: bool = True, overlapped: bool = True, loaded: bool = True
) -> Priced:
    """S3: pipeline of gather (+ quantise), NCCL broadcast and load; the slowest decides.

    `nics` above 1: all training ranks of the root's node join the communicator (NeMo-RL, pull
    request 1264). With `lanes` each pipeline stage sends its own part (slime, miles), without them
    every tensor first goes to all stages (Megatron-Bridge `export_hf_weights`). Names are Python of
    the host, which runs ahead of the GPU's bytes. Without `overlapped` the stages follow each other;
    without `loaded` the bytes stop in the receivers' buffers. Where the engine quantises
    (`sync_quantised_on_arrival`), BF16 crosses the wire and every receiver casts all that it is sent.
    """
    late = bool(ends.source["sync_quantised_on_arrival"])
    wired = _unquantised(ends) if late else ends
    count = num_buckets(ends, wired.sent)
    stages = ends.stages if lanes else 1
    ready = gather(ends, all_stages=not lanes)
    if not late:
        small = quantise(ends, ends.weights.params / stages, ends.weights.tensors / stages)
        ready += small
    placed = quantise_all(ends) + load(ends) if late else load(ends)
    arrive = [placed, staging(wired)] if loaded else []
    chain = [*split(ready), wire(ends, wired.sent, nics), *arrive]
    cost = serial([start(ends), calls(ends, count)]) + (
        pipelined(chain, count) if overlapped else serial(chain)
    )
    held = 2 * bucket(ends)
    return Priced(cost=cost, bytes_moved=wired.sent, train_bytes=held, rollout_bytes=held)


def broadcast_per_parameter(ends: Route) -> Priced:
    """One remote call, one gather and one broadcast per parameter; nothing overlaps.

        T = sum over parameters (t_gather + b / B + t_load + t_rpc)

    OpenRLHF `broadcast_to_vllm` (issue #533: over 40 % of a step).
    """
    cost = serial(
        [
            start(ends),
            gather(ends, all_stages=False),
            quantise(ends, ends.weights.params, ends.weights.tensors),
            wire(ends, ends.sent),
            load(ends),
            calls(ends, ends.tensors),
        ]
    )
    held = ends.weights.largest * TRAINED_BYTES
    return Priced(cost=cost, bytes_moved=ends.sent, train_bytes=held, rollout_bytes=held)


def p2p(ends: Route, *, whole: bool = False, trained_fp8: bool = False, sliced: bool = False) -> Priced:
    """S5: MLPs and experts go shard to shard, everything else by a packed broadcast after them.

        T = start + n_mine a + n_local a + max( x_r, x_r n_r / n_t * p/min(p, s) ) / B_nic + T_rest

    x_r bytes that one rollout GPU receives, n_r and n_t rollout and training GPUs, p pipeline
    stages of which s send at a time (`sync_stage_streams`). The sender stacks its experts (n_mine
    names), both sides walk the stored tensors (n_local). Slices do not hold whole quantisation
    blocks, so BF16 crosses the wire and the receiver quantises, unless training stores FP8: then
    only the scales go the slow way. NVIDIA-NeMo/RL@docs/design-docs/nccl-reshard-refit.md; the
    same volume as LlamaRL's DDMA (arXiv 2505.24034). `whole`: no rest, all goes by shards. `sliced`: the
    sender handles each expert's slice for each rollout part by itself (NeMo-RL's Python transport).
    """
    as_trained = ends if trained_fp8 else _unquantised(ends)
    rest = without_ffn(ends.weights, scales=trained_fp8)
    bulk = ends.weights if whole else _only_ffn(ends.weights)
    direct = replace(as_trained, weights=bulk)
    received = direct.rollout_shard
    total = received * ends.rollout.gpus
    senders = ends.train.gpus * least(1.0, ends.source["sync_stage_streams"] / ends.train.pp)
    experts = ends.weights.expert_tensors / (ends.train.ep * ends.train.pp)
    slices = experts * ends.rollout.tp / ends.rollout.ep if sliced else 0.0
    transfer = (
        moved(most(received, total / senders), wire_rate(ends)),
        handled(experts + slices + direct.local_tensors, ends.source, "sync_gather_latency"),
    )
    names = (ends.weights.ffn_tensors + ends.weights.expert_tensors / ends.rollout.ep) / ends.rollout.pp
    ready = quantise(as_trained if trained_fp8 else ends, received / TRAINED_BYTES, names)
    ready = () if trained_fp8 else ready
    nics = least(ends.source.gpus_per_node, ends.train.gpus)
    after = (
        Cost() if whole else broadcast(replace(_unquantised(ends), weights=rest), nics=nics, lanes=False).cost
    )
    staged = bucket(ends)
    return Priced(
        cost=serial([start(ends), transfer, ready]) + after,
        bytes_moved=total + (0.0 if whole else rest.params * TRAINED_BYTES),
        train_bytes=staged,
        rollout_bytes=staged,
    )


def _unquantised(ends: Route) -> Route:
    if ends.rollout.precision == "bf16":
        return ends
    return replace(ends, rollout=replace(ends.rollout, precision="bf16"))


@lru_cache(maxsize=256)
def _only_ffn(weights: Weights) -> Weights:
    return replace(weights, dense=weights.ffn, dense_tensors=weights.ffn_tensors)


def p2p_staged(ends: Route) -> Priced:
    """p2p that gathers full tensors, then shapes each target's shard in pinned host memory.

        T = start + pipe( gather + quantise + d (load + copy) + (d-1) write, write )

    d distinct rollout ranks per sender; only the write to the last of them overlaps the next
    bucket. The form of miles with Mooncake: `update_weight_p2p.py`; senders are the GPUs of one
    pipeline stage, each with its own stage's tensors.
    """
    stages = ends.stages
    senders = least(ends.train.gpus // stages, ends.rollout.gpus)
    distinct = -(-ends.rollout.replica_gpus // senders)
    shard = ends.rollout_shard / stages
    targets = -(-ends.rollout.gpus // senders)
    write = moved(shard * targets, wire_rate(ends))
    ready = (
        *gather(ends, all_stages=False),
        *quantise(ends, ends.weights.params / stages, ends.weights.tensors / stages),
        *(_times(distinct / stages, part) for part in load(ends)),
        moved(shard * distinct, host_rate(ends.source)),
        _times(1 - 1 / distinct, write),
    )
    last = (_times(1 / distinct, write),)
    return Priced(
        cost=serial([start(ends)]) + pipelined([ready, last], num_buckets(ends, ends.sent)),
        bytes_moved=ends.rollout_shard * ends.rollout.gpus,
        train_bytes=2 * bucket(ends),
        host_bytes=ends.rollout_shard * least(ends.source.gpus_per_node, ends.train.gpus),
    )


def _times(factor: Size, part: Part) -> Part:
    return part._replace(seconds=factor * part.seconds)


def adapters(ends: Route) -> Priced:
    """S7, adapters only: r (in + out) elements a matrix, over IPC or a broadcast; one engine call."""
    size = ends.adapters * TRAINED_BYTES
    names = 2.0 * ends.weights.tensors
    link = hbm(ends.target) if ends.same_pool else wire_rate(ends)
    gathers = moved(size, gather_rate(ends.source, ends.gather_ranks))
    cost = serial(
        [
            start(ends),
            calls(ends, num_buckets(ends, size)),
            (gathers, named(ends, names)),
            (moved(size, link), handled(names, ends.target, "sync_load_latency")),
        ]
    )
    return Priced(cost=cost, bytes_moved=size, train_bytes=size, rollout_bytes=size)


def delta(ends: Route) -> Priced:
    """S7, changed elements only: compare with a pinned snapshot, gather, send and scatter the changes.

        S' = rho N (beta + 4)      rho changed share (`sync_delta_density`), 4 bytes of position
        T = shard / B_h2d + shard / B_hbm + n a + pipeline(gather S', wire S', scatter)

    verl `docs/advance/delta_weight_sync.md`. The snapshot is one training shard per GPU.
    """
    size = changed_bytes(ends)
    send = (moved(size, hbm(ends.target) if ends.same_pool else wire_rate(ends)),)
    chain = [_changes(ends, size), send, _scatter(ends)]
    return Priced(
        cost=serial([start(ends), _compare(ends)]) + pipelined(chain, num_buckets(ends, size)),
        bytes_moved=size,
        train_bytes=2 * bucket(ends),
        rollout_bytes=bucket(ends),
        host_bytes=_snapshot(ends),
    )


def delta_disk(ends: Route) -> Priced:
    """S7 through a shared folder: the changes are written once, and every rollout node reads them.

        T = compare + pipeline(gather S', S' / B_write) + pipeline(S' / B_read, scatter)

    slime `docs/en/advanced/delta-weight-sync.md`, SkyRL `weight_sync_backend: delta`: each rollout host
    patches a checkpoint of its own and its engine loads it, so the whole shard is copied in.
    """
    size, count = changed_bytes(ends), num_buckets(ends, changed_bytes(ends))
    write = (moved(size, write_rate(ends.source, shared=True)),)
    read = (moved(size, read_rate(ends.target, shared=True)),)
    copy = (moved(ends.rollout_shard, host_rate(ends.target)),)
    nodes = -(-ends.rollout.gpus // ends.target.gpus_per_node)
    return Priced(
        cost=serial([start(ends), _compare(ends)])
        + pipelined([_changes(ends, size), write], count)
        + pipelined([*crossing(ends, size), read, copy, load(ends)], count),
        bytes_moved=size * (1 + nodes),
        train_bytes=2 * bucket(ends),
        rollout_bytes=bucket(ends),
        host_bytes=_snapshot(ends),
    )


def changed_bytes(ends: Route) -> float:
    """Bytes of the elements that changed, with their positions (S')."""
    return ends.weights.params * ends.source["sync_delta_density"] * (TRAINED_BYTES + INDEX_BYTES)


def _compare(ends: Route) -> Stage:
    """Every training GPU reads the snapshot of its shard from the host and compares."""
    shard = ends.train_shard
    return moved(shard, host_rate(ends.source)), moved(2 * shard, hbm(ends.source))


def _changes(ends: Route, size: float) -> Stage:
    """The changes of all shards, gathered tensor by tensor."""
    gathers = moved(size, gather_rate(ends.source, ends.gather_ranks))
    return gathers, named(ends, ends.weights.tensors)


def _scatter(ends: Route) -> Stage:
    """The engine writes what changed into its weights: names cost, bytes do not."""
    return load(ends)[1:]


def _snapshot(ends: Route) -> Size:
    return ends.train_shard * least(ends.source.gpus_per_node, ends.train.gpus)
