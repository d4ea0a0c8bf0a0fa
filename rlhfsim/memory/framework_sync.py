"""What both ends of a weight sync hold on their GPUs in frameworks other than ours, read in their sources.

A framework fills buckets of whole tensors, gathers tensors one by one next to them, or hands them to vLLM's
packed transfer (`memory.transfer`). FSDP2 keeps what is trained in FP32; where it is rounded before it is
sent, both copies of a tensor are there. The rank that sends holds most and is the one that counts.

Not known here: RDMA and delta syncs, staged adapters, the shards of a tensor-parallel gather, and the state
dict that a rank of AReaL has on the host for a sync by disk (FP32 and BF16: 6 bytes a parameter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from rlhfsim.frozen import frozen
from rlhfsim.memory.states import BASE_BYTES, lora_params
from rlhfsim.memory.transfer import (
    BF16,
    Arrival,
    TransferBytes,
    buckets_of,
    modules,
    trainer_tensors,
    transfer_bytes,
)
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Lora

FP32 = 4.0
ON_ONE_GPU: Mapping[str, tuple[int, int]] = {"verl": (1, 1), "slime": (2, 0)}
"""Buckets at a trainer and at an engine that share a GPU, where they are not one and none: verl's engine
clones what arrives (workers/rollout/vllm_rollout/bucketed_weight_transfer.py, 018aa20), slime's trainer makes
a flat copy of its tensors (backends/megatron_utils/update_weight/update_weight_from_tensor.py, 04b6c8d)."""


@frozen
class Ends:
    """What a framework's sync holds on the GPUs of both ends."""

    trainer: int = 0
    """Buckets at the rank that sends, each at least its largest tensor."""
    engine: int = 0
    """Buckets at the engine."""
    tensors: int = 1
    """Tensors that are gathered next to the buckets, in the trainer's precision, and there at one time."""
    casts: bool = False
    """FP32 tensors are rounded when they are whole."""
    packed: bool = False
    """vLLM's transfer engine packs what is gathered tensor by tensor, and its reload receives it."""
    source: str


SKYRL = Ends(
    packed=True,
    casts=True,
    source="SkyRL 0.4.0, weight_sync/sources.py 93-101 (FSDP2) and 104-170 (Megatron: the bridge's export), "
    "weight_senders.py 238-262 and 297-325: buckets of 1 GiB or the largest tensor; vLLM 0.30",
)
ENDS: Mapping[tuple[str, WeightPath, Backend], Ends] = {
    ("skyrl", "ipc", "fsdp2"): SKYRL,
    ("skyrl", "ipc", "megatron"): SKYRL,
    ("skyrl", "broadcast", "fsdp2"): SKYRL,
    ("skyrl", "broadcast", "megatron"): SKYRL,
    **dict.fromkeys(
        [("trl", "ipc", "deepspeed"), ("trl", "ipc", "fsdp2")],
        Ends(
            tensors=2,
            source="TRL 1.16.0, generation/vllm_generation.py 512-514: each tensor is loaded where it was "
            "gathered; the one before goes when the next is there",
        ),
    ),
    **dict.fromkeys(
        [("trl", "broadcast", "deepspeed"), ("trl", "broadcast", "fsdp2")],
        Ends(
            packed=True,
            source="TRL 1.16.0, generation/vllm_client.py 846-857: buckets of 1 GiB; vllm_generation.py "
            "414-435: FSDP2's tensors are sent in FP32, to which accelerate raises them",
        ),
    ),
    ("areal", "broadcast", "fsdp2"): Ends(
        trainer=2,
        engine=1,
        casts=True,
        source="AReaL 1.0.4, engine/fsdp_engine.py 1610-1644: a bucket is filled while one is sent; SGLang's "
        "update_weights_from_distributed makes all tensors of a bucket (vLLM's worker one at a time)",
    ),
    ("areal", "broadcast", "megatron"): Ends(
        trainer=1, engine=1, source="AReaL 1.0.4, engine/megatron_engine.py 1527-1561; the engine as above"
    ),
    **dict.fromkeys(
        [("areal", "disk", "fsdp2"), ("areal", "disk", "megatron")],
        Ends(
            source="AReaL 1.0.4, engine/fsdp_engine.py 1705-1706: a state dict goes to the host tensor by "
            "tensor; engine/vllm_ext/vllm_worker_extension.py 39-48: a file is loaded in place"
        ),
    ),
}
"""Framework, path and backend -> what was read."""


class Gathered(NamedTuple):
    """Tensors of a model as a backend gathers them, in bytes of BF16."""

    tensors: tuple[float, ...]
    largest: float
    pair: float
    """The largest two in a row."""


def framework_bytes(
    framework: str | None,
    path: WeightPath,
    model: ModelSpec,
    backend: Backend,
    bucket: float,
    lora: Lora | None,
) -> TransferBytes | None:
    """Bytes of both ends; None: nobody read them.

    What trainers with shards gather is apart (`group`), but Megatron's, whose ranks all export. With adapters
    AReaL sends these alone (fsdp_engine.py 1598-1604), TRL the merged base, in BF16, for which it gathers
    all of it at once under ZeRO-3 (vllm_generation.py 449-472).
    """
    ends = ENDS.get((framework or "", path, backend))
    if ends is None:
        return None
    if lora and framework == "areal":
        adapters = BF16 * lora_params(model, lora.rank)
        return TransferBytes(adapters, 0.0, (Arrival(adapters, 0.0),))
    width = FP32 / BF16 if backend == "fsdp2" and not lora else 1.0
    each = _gathered(model, backend)
    if ends.packed:
        held = _packed(ends, path, model, each, width, bucket)
    else:
        size = max(bucket, each.largest)
        gathered = (each.pair if ends.tensors > 1 else each.largest) * (width + (ends.casts and width > 1))
        held = TransferBytes(ends.trainer * size, gathered, (Arrival(ends.engine * size, 0.0),))
    if lora and backend == "deepspeed":
        return held._replace(group=BASE_BYTES[lora.base] * model.num_params)
    return held if backend != "megatron" else held._replace(sent=held.sent + held.group, group=0.0)


@lru_cache(maxsize=256)
def _gathered(model: ModelSpec, backend: Backend) -> Gathered:
    """All experts of a layer are two tensors in transformers 5; Megatron exports them one by one."""
    each: Iterator[tuple[float, ...]] = modules(model) if backend == "megatron" else trainer_tensors(model)
    tensors = tuple(tensor for module in each for tensor in module)
    return Gathered(tensors, max(tensors), max(sum(pair) for pair in pairwise((0.0, *tensors))))


@lru_cache(maxsize=256)
def _packed(
    ends: Ends, path: WeightPath, model: ModelSpec, each: Gathered, width: float, bucket: float
) -> TransferBytes:
    """Both ends of vLLM's packed transfer of tensors that are gathered one by one.

    FP32 tensors that nobody rounds fill its buckets. An IPC bucket takes each tensor when it is whole; of a
    broadcast all tensors of a bucket wait until it is packed, next to the one that is being sent. An engine
    apart has three buckets then, of which a ledger that counts a generation's activations as well takes one.
    """
    sent_as = 1.0 if ends.casts else width
    gathering = width + 1 if ends.casts and width > 1 else sent_as
    if path == "ipc":
        sent = max(bucket, sent_as * each.largest)
        peak = sent + gathering * each.largest
        return TransferBytes(sent, peak - sent, transfer_bytes(model, "ipc", bucket).arrivals)
    sent, peak = _broadcast([sent_as * tensor for tensor in each.tensors], bucket, gathering / sent_as)
    return TransferBytes(sent, peak - sent, (Arrival(max(bucket, sent_as * each.largest), 0.0),))


def _broadcast(tensors: Sequence[float], bucket: float, gathering: float) -> tuple[float, float]:
    """Most bytes of two buckets, and of these with the whole tensors of the second.

    `gathering`: bytes of a tensor while it is gathered, as a multiple of its own.
    """
    sent = peak = before = 0.0
    for tensors_of_one in buckets_of([tuple(tensors)], bucket, over=True):
        filled = sum(tensors_of_one)
        waiting = accumulate(tensors_of_one, initial=0.0)
        arriving = max(kept + gathering * new for kept, new in zip(waiting, tensors_of_one, strict=False))
        sent = max(sent, before + filled)
        peak = max(peak, before + max(arriving, 2 * filled))
        before = filled
    return sent, peak
