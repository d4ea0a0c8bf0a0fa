"""Time of one decode step of one rollout replica, kernel by kernel.

Legend: n running sequences on one attention-DP rank, c their mean context, h hidden, a query heads,
g KV heads, d head width, V vocabulary, E experts, k experts per token, L layers; t tensor, p
pipeline, q attention-data parallelism. Everything is vectorised over n and c (arrays broadcast), and over
layouts of one kind where the layout is columns (`RolloutLayouts`).

    tau(n, c) = L (QKV + attention + O + MLP or experts + 2 all-reduce) + head + sampling
                + a_step + a_layer L + a_seq n                                            (G1)

Kernels do not overlap, so the sum of per-kernel roofs replaces G1's `max` (physics.md, open
points). Not known here: routing that drifts, contexts that differ within a batch beyond their mean,
clock drops under power caps, KV blocks (contexts are not rounded up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.layers import attention_matrices, head_matrix, heads, mlp_matrices, recurrent_matrices
from rlhfsim.rollout import untimed
from rlhfsim.rollout.collective_time import collective, exchange, tp_all_reduce
from rlhfsim.rollout.engine_step import ACTIVATION_BYTES, EngineStep, Floats, chosen, gemm, kernel, on
from rlhfsim.rollout.experts import experts
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT

Engine = Literal["vllm", "sglang", "trtllm", "trtllm_static"]
"""`trtllm_static`: TensorRT-LLM on an FP8 checkpoint that carries its scales (ModelOpt)."""
ENGINE_NAMES: Mapping[str, Engine] = {"vLLM": "vllm", "SGLang": "sglang"}
"""Engines as frameworks name them, with their own figures."""
LOGIT_BYTES = 4.0
"""Samplers upcast logits to FP32."""
ELEMENTWISE_PASSES = 14.0
"""Reads and writes of n x h per layer by two norms with residual, rotary, activation and (FP8)
quantisation, counted from the kernels that vLLM launches; their launch is `decode_layer_overhead`."""


def decode_step(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: ArrayLike,
    context: ArrayLike,
    *,
    engine: Engine = "vllm",
) -> EngineStep:
    """Seconds of one decode step of a replica with `sequences` running per attention-DP rank.

    `context` is the mean context in tokens, prompt and response so far. Pipeline stages work on
    n/p sequences at once (`pipelined`). Captured batch sizes round n up (G5).
    """
    n = np.asarray(sequences, dtype=np.float64)
    c = np.asarray(context, dtype=np.float64)
    work = gpu_work(device, model, layout, n, c, engine=engine)
    return work + overhead(device, model, layout, n, work.seconds, engine=engine)


def gpu_work(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Floats,
    context: Floats,
    *,
    engine: Engine = "vllm",
    tokens: int = 1,
) -> EngineStep:
    """Kernels and collectives of one decode step (`tokens` a sequence), without the engine's own time.

    Rows count as captured (G5) without graphs too: kernels work in tiles of about that size, and an engine
    that launches them one by one is never the faster one.
    """
    n = sequences / layout.pp
    rows = padded(np.ceil(n * tokens))
    layers = token_work(device, model, layout, rows, engine)
    core = decode_attention(device, model, layout, np.maximum(n, 1.0), context, engine=engine, tokens=tokens)
    layers = layers + core
    return pipelined(device, model, layout, sequences, layers, head_work(device, model, layout, rows, engine))


def padded(rows: Floats) -> Floats:
    """Rows rounded up to the next captured batch size (G5).

    1, 2, 4, then multiples of 8 to 256 and of 16 to 512; beyond, no padding.
    Source: vLLM, `cudagraph_capture_sizes` of `vllm/config`.
    """
    small = np.where(rows <= 1, 1.0, np.where(rows <= 2, 2.0, np.where(rows <= 4, 4.0, 8.0)))
    grid = np.where(rows <= 8, small, np.where(rows <= 256, np.ceil(rows / 8) * 8, np.ceil(rows / 16) * 16))
    return np.where(rows > VLLM.graph_limit, rows, grid)


def token_work(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats, engine: Engine = "vllm"
) -> EngineStep:
    """All layers' matrix products, experts, collectives and element-wise kernels for `rows` tokens.

    `rows` are the tokens of one attention-DP rank in one pass; attention cores and the LM head
    apart. With pipeline stages this is one pass of `rows` tokens through all of them.
    """
    if layout.bf16_layers:
        kept, rest = layout.bf16_share(model.num_layers), replace(layout, bf16_layers=0)
        step = token_work(device, model, replace(rest, precision="bf16"), rows, engine).scaled(kept)
        return step + token_work(device, model, rest, rows, engine).scaled(1 - kept)
    t = layout.tp
    own = "bf16" if layout.attention_precision != layout.precision else linear_precision(layout, engine)
    step = _elementwise(device, model, rows).scaled(model.launched_layers)
    mixers = (
        (model.num_attention_layers, attention_matrices(model, t)),
        (model.num_recurrent_layers, recurrent_matrices(model, t)),
    )
    for count, matrices in mixers:
        if count:
            block = tp_all_reduce(device, model, rows, t)
            for matrix in matrices:
                block = block + gemm(device, matrix, rows, own, fused=engine == "vllm")
            step = step + block.scaled(float(count))
    if model.num_dense_layers:
        step = step + _dense(device, model, layout, rows, engine).scaled(float(model.num_dense_layers))
    if model.moe:
        linear = linear_precision(layout, engine)
        block = experts(device, model, layout, rows, linear) + exchange(device, model, layout, rows)
        step = step + block.scaled(float(model.num_moe_layers))
    return step


def head_work(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats, engine: Engine = "vllm"
) -> EngineStep:
    """LM head, gather of n V logits over TP (G4) and sampling, which reads FP32 logits several times."""
    head = head_matrix(model, layout.tp)
    size = rows * model.vocab * ACTIVATION_BYTES
    passes = coefficient(device, "sampling_passes", engine) * LOGIT_BYTES * rows * model.vocab / layout.tp
    sampling = passes / device.hbm
    gather = collective(device, "all_gather", size, layout.tp)
    return gemm(device, head, rows, layout.precision) + gather + on("hbm", sampling)


def decode_attention(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Floats,
    context: Floats,
    *,
    engine: Engine = "vllm",
    tokens: int = 1,
) -> EngineStep:
    """Attention cores and state updates of all layers for new tokens of each sequence.

    Windowed layers see their window, sparse ones what their indexer chose. Several `tokens` read the cache
    once and compute each.

    GQA: 4 a d n c FLOP and kappa n c bytes    absorbed MLA: 2 a (2 d_c + d_rope) n c    (G1)
    """
    at, windowed = model.attention, model.attention.num_windowed_layers
    seen = context if at.index_topk is None else np.minimum(context, float(at.index_topk))
    full = _decode_core(device, model, layout, sequences, seen, engine, tokens)
    step = full.scaled(float(model.num_attention_layers - windowed))
    step = step + untimed.index(device, model, sequences * context * tokens, sequences * context)
    step = step + untimed.state_update(device, model, layout.tp, sequences, tokens)
    if windowed and at.sliding_window:
        seen = np.minimum(context, at.sliding_window)
        step = step + _decode_core(device, model, layout, sequences, seen, engine, tokens).scaled(
            float(windowed)
        )
    return step


def _decode_core(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    n: Floats,
    c: Floats,
    engine: Engine,
    tokens: int,
) -> EngineStep:
    at, kv_bytes = model.attention, BYTES_PER_ELEMENT[layout.kv_precision]
    local = heads(at, layout.tp)
    c = np.maximum(c, 1.0)
    if at.kv_lora_rank is not None:
        latent, rope = at.kv_lora_rank, at.qk_rope_head_dim or 0
        # the FP8-cache kernel in the Hopper tables is a slow path; engines take the better one
        seconds = np.minimum(
            device.curves.mla_decode(n, c, local.query, 2.0),
            device.curves.mla_decode(n, c, local.query, kv_bytes),
        )
        flop = 2.0 * local.query * (2 * latent + rope) * n * c * tokens
        return kernel(device, seconds, flop=flop, size=n * c * (latent + rope) * kv_bytes, precision="bf16")
    kind = engine.removesuffix("_static")
    seconds = device.curves.decode_attention(n, c, local.query, local.kv, at.head_dim, kv_bytes, kind)
    flop = 2.0 * local.query * (local.qk_dim + local.v_dim) * n * c * tokens
    size = n * c * local.kv * (local.qk_dim + local.v_dim) * kv_bytes
    return kernel(device, seconds, flop=flop, size=size, precision="bf16")


def linear_precision(layout: AnyRolloutLayout, engine: Engine) -> str:
    """Kernel name of the dense products."""
    return "fp8_static" if layout.precision == "fp8" and engine == "trtllm_static" else layout.precision


def _dense(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats, engine: Engine
) -> EngineStep:
    step, precision = tp_all_reduce(device, model, rows, layout.tp), linear_precision(layout, engine)
    for matrix in mlp_matrices(model, layout.tp):
        step = step + gemm(device, matrix, rows, precision, fused=engine == "vllm")
    return step


def _elementwise(device: Device, model: ModelSpec, rows: Floats) -> EngineStep:
    size = ELEMENTWISE_PASSES * rows * model.hidden * ACTIVATION_BYTES
    return on("hbm", size / device.hbm)


def pipelined(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Floats,
    layers: EngineStep,
    head: EngineStep,
) -> EngineStep:
    """A step of all n sequences from the pass of n/p of them through all layers and the head.

        max( layers + head + p hops, min(p, n) (ceil(L/p)/L layers + head + hop) )

    The n/p sequences of a micro-batch get their next token when all stages have passed them and it is back
    at the first; p micro-batches follow each other, and the last stage, which samples, is the slowest.
    """

    def staged() -> EngineStep:
        hop = pipeline_hop(device, model, layout, padded(np.ceil(sequences / layout.pp)))
        whole = layers + head + hop.scaled(layout.pp)
        share = -(-model.num_layers // layout.pp) / model.num_layers
        slowest = layers.scaled(share) + head + hop
        under_way = np.clip(np.ceil(sequences), 1.0, layout.pp)
        return whole.scaled(np.maximum(1.0, under_way * slowest.seconds / whole.seconds))

    return chosen(layout.pp == 1, lambda: layers + head, staged)


def pipeline_hop(device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats) -> EngineStep:
    """What `rows` tokens take from a stage to the next, by the slowest hop: across nodes if one is."""
    crosses = collectives.crosses(device, layout.pp, layout.tp * layout.attention_dp)
    seconds = collectives.p2p(device, np.asarray(rows * model.hidden * ACTIVATION_BYTES), crosses)
    return chosen(crosses, lambda: on("network", seconds), lambda: on("nvlink", seconds))


def overhead(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Floats,
    gpu_seconds: Floats,
    *,
    engine: Engine,
    rows: Floats | None = None,
) -> EngineStep:
    """Engine time that the kernels do not show: a_step p + a_layer L + a_seq n.

    One scheduler serves the p micro-batches of a pipeline one after the other.
    Without CUDA graphs the CPU launches every kernel of an uncompiled model: the step then takes at least
    `eager_decode_layer_time` x L; beyond the largest captured batch those of a compiled one,
    `eager_layer_overhead` x L. `rows`: tokens of a step, where a sequence has several.
    """
    alpha = coefficient(device, "decode_step_overhead", engine) * layout.pp
    layers = coefficient(device, "decode_layer_overhead", engine) * model.launched_layers
    seconds = alpha + layers + coefficient(device, "decode_sequence_overhead", engine) * sequences
    name = "eager_layer_overhead" if layout.captured else "eager_decode_layer_time"
    launch = device[name] * model.launched_layers
    captured = (sequences if rows is None else rows) / layout.pp <= VLLM.graph_limit
    eager = ~np.asarray(layout.captured & captured)
    return on("overhead", seconds + np.where(eager, np.maximum(0.0, launch - gpu_seconds), 0.0))


def coefficient(device: Device, name: str, engine: Engine) -> float:
    """The value of an engine's own coefficient where the profile has one, else of the common one."""
    return device[own_name(device, name, engine)]


def own_name(device: Device, name: str, engine: Engine) -> str:
    """`<name>_<engine>` where the profile has it, else the name."""
    own = f"{name}_{engine.removesuffix('_static')}"
    return own if own in device.profile.coefficients else name
