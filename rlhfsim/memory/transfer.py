"""What both ends of a weight sync hold on their GPUs where vLLM's transfer engines carry the weights.

The trainer packs whole tensors into buckets; one with shards gathers the experts of a layer at once, for
transformers 5 keeps them in two tensors, and of every bucket the last expert's matrix is a copy that stays
in memory together with the next. The engine keeps what arrived until all tensors of a module
(QKV, gate and up, all experts of a layer) are there, makes the module of them and copies it into place.

Sources: vLLM 0.32.0, distributed/weight_transfer/packed_tensor.py (CUDA IPC: one buffer at the trainer, whose
tensors the engine clones; NCCL: two at the trainer, each closed by the tensor that exceeds its size, and at
the engine a third, made before the oldest is given back) and model_executor/model_loader/reload/layerwise.py
(`loaded_weights`, `materialize_layer`). Read on the rehearsal device: docs/gpu.md.

Not known here: copies of adapters, tensor-parallel gathers. Other frameworks: `memory.framework_sync`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from rlhfsim.kernels.layers import heads, layer_matrices
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.weight_paths import Transport

BF16 = 2.0
SLOTS = 2
"""Buffers of a broadcast on either side (`DEFAULT_PACKED_NUM_BUFFERS`)."""
FUSED = 3
"""Most tensors of a module (QKV) that is not a layer's experts."""
Module = tuple[float, ...]
"""Bytes of the tensors of a checkpoint that are one module of the engine."""


class Arrival(NamedTuple):
    """A moment of an engine that receives."""

    arrived: float
    """Bytes of whole tensors, whatever the engine's layout."""
    module: float
    """Bytes of the module that is made of them, which tensor parallelism cuts."""


class TransferBytes(NamedTuple):
    """GPU bytes of both ends."""

    sent: float
    """At a rank that sends."""
    group: float
    """Full tensors that a sharded trainer gathers at one time."""
    arrivals: tuple[Arrival, ...]
    """Moments of which none holds less of both than another one."""


@lru_cache(maxsize=1024)
def transfer_bytes(model: ModelSpec, transport: Transport, bucket: float) -> TransferBytes:
    """Bytes of a transfer in buckets of `bucket` bytes; a tensor is never split."""
    each, kept = list(modules(model)), list(trainer_tensors(model))
    largest, total = max(map(max, each)), sum(map(sum, each))
    size = max(largest, min(bucket, total))
    group = max(size, *map(max, kept))
    if transport in ("host", "disk"):  # tensors come from host memory
        return TransferBytes(0.0, group, _front([Arrival(0.0, max(map(sum, each)))]))
    chunks = buckets_of(each, size, over=transport == "broadcast")
    copy = max((tensor for module in each if len(module) > FUSED for tensor in module), default=0.0)
    if transport == "ipc":
        return TransferBytes(size + copy, group, _front(_arrivals(each, chunks, slots=1)))
    both, with_gathered = _packed(chunks, buckets_of(kept, size, over=False))
    return TransferBytes(
        both + SLOTS * copy, with_gathered - both, _front(_arrivals(each, chunks, slots=SLOTS))
    )


def modules(model: ModelSpec) -> Iterator[Module]:
    """Modules of the engine in the order of a checkpoint, without norms and biases."""
    table = BF16 * model.params_embedding
    yield (table,)
    for kind in model.kinds:
        yield from _layer(model, kind) * kind.layers
    if not model.tied_embeddings:
        yield (table,)


def trainer_tensors(model: ModelSpec) -> Iterator[Module]:
    """The same as transformers keeps them: gates and ups of a layer's experts in one tensor, downs in one."""
    for module in modules(model):
        if len(module) <= FUSED:
            yield module
        else:
            downs = len(module) // (3 if model.gated else 2)
            yield sum(module[:-downs]), sum(module[-downs:])


def _layer(model: ModelSpec, kind: LayerKind) -> list[Module]:
    found: list[Module] = []
    experts: list[float] = []
    for matrix in layer_matrices(model, kind=kind):
        size = BF16 * matrix.params / matrix.experts
        if matrix.name in ("expert_up", "expert_down"):
            parts = 2 if model.gated and matrix.name == "expert_up" else 1
            experts += [size / parts] * round(parts * matrix.experts)
        elif matrix.name == "qkv":
            found.append(_qkv(model, size))
        elif matrix.name == "mlp_up" and model.gated:
            found.append((size / 2, size / 2))
        else:
            found.append((size,))
    return [*found, tuple(experts)] if experts else found


def _qkv(model: ModelSpec, size: float) -> Module:
    local = heads(model.attention, 1)
    widths = local.query * local.qk_dim, local.kv * local.qk_dim, local.kv * local.v_dim
    return tuple(size * width / sum(widths) for width in widths)


def buckets_of(each: Sequence[Module], size: float, *, over: bool) -> list[list[float]]:
    """Tensors of every bucket: closed before the tensor that would exceed `size`, or (`over`) after it."""
    chunks: list[list[float]] = [[]]
    filled = 0.0
    for tensor in (tensor for module in each for tensor in module):
        if filled and (filled > size if over else filled + tensor > size):
            chunks.append([])
            filled = 0.0
        chunks[-1].append(tensor)
        filled += tensor
    return chunks


def _packed(chunks: Sequence[Sequence[float]], groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Bytes of two buckets at a broadcast's trainer; and of these with full tensors, gathered in `groups`.

    Gathered is from the first tensor of the bucket that is packed to the last of the group in which it ends.
    """
    filled = [sum(chunk) for chunk in chunks]
    ends = list(accumulate(filled))
    gathered = list(accumulate(map(sum, groups)))
    pairs = [sum(filled[max(0, i - SLOTS + 1) : i + 1]) for i in range(len(filled))]
    wholes = [gathered[min(bisect_left(gathered, end), len(gathered) - 1)] for end in ends]
    return max(pairs), max(
        pair + whole - end + size for pair, whole, end, size in zip(pairs, wholes, ends, filled, strict=True)
    )


def _arrivals(each: Sequence[Module], chunks: Sequence[Sequence[float]], *, slots: int) -> Iterator[Arrival]:
    """Moments at which a bucket is there, and those at which a module is made.

    With one slot (IPC) each tensor is a clone that goes with its module; else a module that is not whole
    keeps the buckets in which its tensors came, and a bucket is made before the one in its slot goes.
    """
    filled = [sum(chunk) for chunk in chunks]
    places = (place for place, chunk in enumerate(chunks) for _ in chunk)
    for module in each:
        at = [next(places) for _ in module]
        for place in dict.fromkeys(at):
            made = sum(module) if place == at[-1] else 0.0
            if slots == 1:
                kept = sum(tensor for tensor, bucket in zip(module, at, strict=True) if bucket < place)
                yield Arrival(filled[place] + kept, made)
            else:
                yield Arrival(sum(filled[max(0, min(at[0], place - slots)) : place + 1]), 0.0)
                yield Arrival(sum(filled[max(0, min(at[0], place - slots + 1)) : place + 1]), made)


def _front(moments: Iterator[Arrival] | Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The moments that hold more of something than all others."""
    found: list[Arrival] = []
    for one in sorted(set(moments), reverse=True):
        if not found or one.module > found[-1].module:
            found.append(one)
    return tuple(found)
