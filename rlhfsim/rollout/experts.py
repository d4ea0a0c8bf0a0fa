"""Time of the experts of one layer in an engine's step, and of bringing tokens to them and back.

Legend as in `decode`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, group
from rlhfsim.kernels.layers import Matrix, expert_matrices, shared_matrices
from rlhfsim.kernels.routing import routing_of
from rlhfsim.rollout.collective_time import collective, tp_all_reduce
from rlhfsim.rollout.engine_step import EngineStep, Floats, kernel, on
from rlhfsim.rollout.matrices import ACTIVATION_BYTES, gemm, kernel_name, weight_only, widened
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Dispatcher, RolloutLayout
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT

GENERATES_WITH: tuple[Dispatcher, ...] = ("allgather", "alltoall", "deepep-ll", "deepep")
"""Dispatchers of inference engines."""
LOW_LATENCY_TOKENS = 256
"""Most tokens of a GPU that engines send through DeepEP's low-latency kernels (VLLM_MOE_DP_CHUNK_SIZE of vLLM
0.11; SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK is 128)."""
FP8_BLOCK_BYTES = 1.0 + 4.0 / 128
"""An FP8 element with its share of the FP32 scale of 128."""


def experts(device: Device, model: ModelSpec, layout: RolloutLayout, rows: Floats, linear: str) -> EngineStep:
    """Router, routed and shared experts of one layer with their communication.

    Tokens of all attention-DP ranks meet in the experts: q n rows. The curves are measured with
    skewed (power-law) routing and hold the experts that n tokens touch (G2) and the fullest rank.
    `linear`: kernel name of the dense products.
    """
    moe = model.moe
    assert moe is not None
    everyone = rows * layout.attention_dp
    router = Matrix(name="router", n=moe.num_experts, k=model.hidden, linear=False)
    step = gemm(device, router, rows, layout.precision)
    for matrix in (*shared_matrices(model, layout.tp), *expert_matrices(model, 1)[3:]):
        step = step + gemm(device, matrix, rows, linear)
    routed = expert_work(device, model, layout, everyone, linear)
    return step + routed + exchange(device, model, layout, rows)


def expert_work(
    device: Device, model: ModelSpec, layout: RolloutLayout, tokens: Floats, linear: str
) -> EngineStep:
    """Routed experts of one layer for `tokens` tokens of the whole replica, on its fullest GPU.

        at least beta params max(1, k/e) bytes and 2 params n k / e FLOP      params: of one expert / etp

    How many experts n tokens touch (G2: E (1 - (1 - k/E)^n) for uniform routing, fewer and
    hotter ones with skew) and the fullest rank are inside the measured curve.
    """
    moe = model.moe
    assert moe is not None
    ep, etp = expert_layout(layout)
    if widened(device, layout.precision):
        step = expert_work(device, model, replace(layout, precision="bf16"), tokens, "bf16")
        return _weight_only(device, model, layout, tokens, step)
    m, precision = np.maximum(tokens, 1.0), expert_precision(linear)
    params = (3 if model.gated else 2) * model.expert_width * moe.expert_ffn / etp
    touched = max(1.0, moe.top_k / ep)
    seconds = device.curves.moe(
        m, model.expert_width, moe.expert_ffn, moe.top_k, moe.num_experts, etp, ep, precision
    )
    return kernel(
        device,
        seconds,
        flop=2.0 * params * m * moe.top_k / ep,
        size=BYTES_PER_ELEMENT[layout.precision] * params * touched,
        precision=kernel_name(layout.precision),
    )


def _weight_only(
    device: Device, model: ModelSpec, layout: RolloutLayout, tokens: Floats, step: EngineStep
) -> EngineStep:
    """Experts that n tokens touch are read: E (1 - (1 - k/E)^n) of a layer, over its ranks (G2)."""
    moe = model.moe
    assert moe is not None
    ep, etp = expert_layout(layout)
    n, params = np.maximum(tokens, 1.0), (3 if model.gated else 2) * model.expert_width * moe.expert_ffn / etp
    touched = moe.num_experts / ep * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** n)
    return weight_only(device, step, 2.0 * params * n * moe.top_k / ep, params * touched, layout.precision)


def expert_precision(linear: str) -> str:
    """Kernel name of the experts' precision: FP8 checkpoints of MoE models are scaled by block.

    DeepSeek-V3, Qwen3-MoE-FP8 and MiniMax-M2 ship 128 x 128 blocks. Their dense products are priced
    with the per-tensor curve: the block-scaled one was timed outside CUDA graphs, where the launch
    of its quantisation, not the GPU, takes 60 to 190 us whatever the size. Checkpoints of ModelOpt have one
    scale a tensor.
    """
    return "fp8_block" if linear == "fp8" else kernel_name(linear)


def expert_layout(layout: RolloutLayout) -> tuple[int, int]:
    """Expert parallelism and the tensor parallelism inside one expert: ep x etp = tp x attention_dp."""
    ranks = layout.tp * layout.attention_dp
    ep = min(layout.ep, ranks)
    return ep, max(1, ranks // ep)


def exchange(device: Device, model: ModelSpec, layout: RolloutLayout, rows: Floats) -> EngineStep:
    """Bring tokens to the experts and back.

    Gathered where the layout says so, where experts are cut, and by default where one all-reduce does it or
    all GPUs share a domain; else sent by the dispatcher. One that is not said is the cheaper of both.
    """
    where = group(layout.tp * layout.attention_dp, 1, device.domain)
    gathered = _gathered(device, model, layout, rows)
    inside = layout.attention_dp == 1 or where.domains == 1
    if layout.dispatcher == "allgather" or layout.ep < where.ranks or (layout.dispatcher is None and inside):
        return gathered
    sent = _sent(device, model, layout, rows, layout.dispatcher)
    if layout.dispatcher is None:
        return on("network", np.minimum(gathered.seconds, sent))
    return on("nvlink" if where.domains == 1 else "network", sent)


def _gathered(device: Device, model: ModelSpec, layout: RolloutLayout, rows: Floats) -> EngineStep:
    """All tokens on all GPUs.

    Without attention DP every GPU holds them, one all-reduce adds the outputs. With it, q n tokens are
    gathered and the outputs reduce-scattered (vLLM `allgather_reducescatter`).
    """
    if layout.attention_dp == 1:
        return tp_all_reduce(device, model, rows, layout.tp)
    ranks, size = (
        layout.tp * layout.attention_dp,
        rows * layout.attention_dp * model.hidden * ACTIVATION_BYTES,
    )
    return collective(device, "all_gather", size, ranks) + collective(device, "reduce_scatter", size, ranks)


def _sent(
    device: Device, model: ModelSpec, layout: RolloutLayout, rows: Floats, by: Dispatcher | None
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

    def both(tokens: float) -> float:
        name = "deepep" if by == "deepep-ll" and tokens > LOW_LATENCY_TOKENS else by or "deepep-ll"
        ways = (model.hidden * width, model.hidden * ACTIVATION_BYTES)
        return sum(collectives.dispatch(device, tokens, size, routing, where, by=name) for size in ways)

    tokens = np.maximum(rows / layout.tp, 1.0)
    seconds: Floats = np.vectorize(both, otypes=[float])(tokens)
    return seconds


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
