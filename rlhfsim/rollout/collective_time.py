"""Time of the collectives of one replica in an engine's step: all-reduces, and tokens to experts and back.

Legend as in `decode`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlhfsim.elementwise import Size, either, some
from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, group
from rlhfsim.kernels.routing import routing_of
from rlhfsim.rollout.engine_step import ACTIVATION_BYTES, EngineStep, Floats, chosen, nothing, on
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Dispatcher, RolloutLayout
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout

GENERATES_WITH: tuple[Dispatcher, ...] = ("allgather", "alltoall", "deepep-ll", "deepep")
"""Dispatchers of inference engines."""
LOW_LATENCY_TOKENS = 256
"""Most tokens of a GPU that engines send through DeepEP's low-latency kernels (VLLM_MOE_DP_CHUNK_SIZE of vLLM
0.11; SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK is 128)."""
FP8_BLOCK_BYTES = 1.0 + 4.0 / 128
"""An FP8 element with its share of the FP32 scale of 128."""


def tp_all_reduce(device: Device, model: ModelSpec, rows: Floats, tp: Size) -> EngineStep:
    """All-reduce of n h activations over TP (G4): inside a node the faster of custom one- or two-shot and
    NCCL."""
    return collective(device, "all_reduce", rows * model.hidden * ACTIVATION_BYTES, tp)


def collective(device: Device, op: collectives.Op, size: Floats, ranks: Size) -> EngineStep:
    """A collective over neighbouring GPUs: curves inside one domain, hierarchical beyond.

    Engines' own all-reduce opens handles of CUDA IPC, which hold inside a node: ranks of several nodes in one
    NVLink domain use NCCL (vLLM `CustomAllreduce`, issue 52778; SGLang's second version crosses nodes since
    July 2026, with an allocator that is not the default: issue 36429, where Llama-4 Scout at TP8 over two
    GB300 nodes loses 10.7 us an all-reduce without it; 18 here).
    """
    if not some(ranks > 1):
        return nothing()
    where = group(ranks, 1, device.domain)
    times = {
        "all_reduce": collectives.all_reduce,
        "all_gather": collectives.all_gather,
        "reduce_scatter": collectives.reduce_scatter,
    }

    def inside() -> EngineStep:
        seconds = device.curves.collective(op, size, ranks)
        if op != "all_reduce":
            return on("nvlink", seconds)
        own = either(
            ranks <= device.gpus_per_node,
            lambda: device.curves.custom_all_reduce(size, ranks),
            lambda: seconds,
        )
        return on("nvlink", np.minimum(seconds, own))

    return chosen(where.domains > 1, lambda: on("network", times[op](device, size, where)), inside)


# --- tokens to the experts and back -----------------------------------------------------------------


def exchange(device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats) -> EngineStep:
    """Bring tokens to the experts and back.

    Gathered where the layout says so, where experts are cut, and by default where one all-reduce does it or
    all GPUs share a domain; else sent by the dispatcher. One that is not said is the cheaper of both.
    """
    where = group(layout.tp * layout.attention_dp, 1, device.domain)
    gathered, by = _gathered(device, model, layout, rows), layout.dispatcher
    near = where.domains == 1
    inside = ((layout.attention_dp == 1) | near) & (by is None)

    def dispatched() -> EngineStep:
        sent = _sent(device, model, layout, rows, by)
        if by is None:
            return on("network", np.minimum(gathered.seconds, sent))
        return chosen(near, lambda: on("nvlink", sent), lambda: on("network", sent))

    return chosen((layout.ep < where.ranks) | inside | (by == "allgather"), lambda: gathered, dispatched)


def _gathered(device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats) -> EngineStep:
    """All tokens on all GPUs.

    Without attention DP every GPU holds them, one all-reduce adds the outputs. With it, q n tokens are
    gathered and the outputs reduce-scattered (vLLM `allgather_reducescatter`).
    """
    ranks = layout.tp * layout.attention_dp
    size = rows * layout.attention_dp * model.hidden * ACTIVATION_BYTES

    def spread() -> EngineStep:
        there = collective(device, "all_gather", size, ranks)
        return there + collective(device, "reduce_scatter", size, ranks)

    return chosen(layout.attention_dp == 1, lambda: tp_all_reduce(device, model, rows, layout.tp), spread)


def _sent(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats, by: Dispatcher | None
) -> Floats:
    """Seconds to dispatch n/t tokens of a GPU and to combine what the experts made of them.

    DeepEP and HybridEP dispatch in the weights' precision with block scales; outputs are BF16. Beyond
    `LOW_LATENCY_TOKENS` (prefill) engines take DeepEP's normal kernels in place of the low-latency ones. A
    dispatcher that is not said is priced as the low-latency ones.
    """
    assert model.moe is not None
    routing, where = routing_of(model.moe), group(layout.tp * layout.attention_dp, 1, device.domain)
    narrow = layout.precision == "fp8" and by != "alltoall"
    width = FP8_BLOCK_BYTES if narrow else ACTIVATION_BYTES

    tokens = np.maximum(rows / layout.tp, 1.0)

    def both(name: Dispatcher) -> Size:
        ways = (model.hidden * width, model.hidden * ACTIVATION_BYTES)
        return sum(collectives.dispatch(device, tokens, size, routing, where, by=name) for size in ways)

    many = (tokens > LOW_LATENCY_TOKENS) & (by == "deepep-ll")
    return np.asarray(either(many, lambda: both("deepep"), lambda: both(by or "deepep-ll")))


def exchange_spread(device: Device, model: ModelSpec, layout: RolloutLayout) -> tuple[float, float]:
    """Cheapest and dearest way to bring decoded tokens to the experts, over the price of one not said."""
    if model.moe is None or not layout.open_dispatcher:
        return 1.0, 1.0
    return _exchange_spread(device, model, replace(layout, dp=1, prefill=0, memory_utilization=1.0))


@lru_cache(maxsize=1024)
def _exchange_spread(device: Device, model: ModelSpec, layout: RolloutLayout) -> tuple[float, float]:
    rows = np.asarray(float(layout.max_num_seqs))
    priced = float(exchange(device, model, layout, rows).seconds)
    ways = [replace(layout, dispatcher=name) for name in GENERATES_WITH]
    each = [float(exchange(device, model, way, rows).seconds) / priced for way in ways]
    return min(1.0, *each), max(1.0, *each)
