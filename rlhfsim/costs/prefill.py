"""Time of prefill: whole prompts, chunks, prompts shared by a group, and steps that mix it with decode.

Legend: x new tokens, c cached tokens before them, s prompt length, G samples per prompt, n running
sequences, B the engine's token budget of one step (`max_batched_tokens`). Attention-data-parallel
ranks prefill their own prompts at the same time; sizes are per rank.

    T = 2 N_a x / (t F eta) + attention(x, c) + T_tp(x) + T_ep(x) + eager launch            (G6)
"""

from __future__ import annotations

import numpy as np

from rlhfsim.costs.decode import (
    ACTIVATION_BYTES,
    Engine,
    coefficient,
    head_work,
    padded,
    pipeline_work,
    token_work,
)
from rlhfsim.costs.device import Device
from rlhfsim.costs.layers import heads
from rlhfsim.costs.step import Floats, Step, kernel, nothing, on
from rlhfsim.specs.layout import RolloutLayout
from rlhfsim.specs.model import ModelSpec
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT


def prefill(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    prompts: float,
    length: float,
    *,
    cached: float = 0.0,
    engine: Engine = "vllm",
) -> Step:
    """Seconds to prefill `prompts` prompts of `length` new tokens on one attention-DP rank.

    Prompts are packed into passes of at most `max_batched_tokens`; a longer prompt is cut into
    chunks that attend to what came before them. `cached` tokens of each prompt are in the prefix
    cache already. With pipeline stages the passes follow each other: passes + p - 1 stage times.
    """
    if prompts <= 0 or length <= 0:
        return nothing()
    budget = min(float(layout.max_batched_tokens), prompts * length)
    passes = max(1.0, prompts * length / budget)
    ramp = (passes + layout.pp - 1) / layout.pp
    tokens = np.asarray(budget)
    finished = max(1.0, prompts / passes)
    work = token_work(device, model, layout, tokens) + pipeline_work(device, model, layout, tokens).scaled(1.0 / layout.pp)  # fmt: skip
    work = work + head_work(device, model, layout, np.asarray(finished))
    attention = prefill_attention(device, model, layout, prompts, length, cached)
    work = work + eager(device, model, layout, work.seconds + attention.seconds / passes, engine)
    return work.scaled(ramp) + attention.scaled(ramp / passes)


def group_prefill(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    sequences: float,
    samples: float,
    length: float,
    *,
    shared: bool = True,
    engine: Engine = "vllm",
) -> Step:
    """Prefill of `sequences` sequences in groups of `samples` with one prompt each (G6).

    With a prefix cache and all G samples on one replica, a prompt is computed once per group.
    """
    prompts = sequences / samples if shared else sequences
    return prefill(device, model, layout, prompts, length, engine=engine)


def prefill_attention(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    prompts: float,
    length: float,
    cached: float = 0.0,
) -> Step:
    """Attention cores of all layers for `prompts` prompts, whatever the chunks.

        2 a (d_k + d_v) (s^2/2 + c s) FLOP a prompt; windowed layers see at most their window

    Chunks of one prompt together see the pairs of the whole prompt; that their smaller query tiles
    run less efficiently is not counted.
    """
    at, windowed = model.attention, model.attention.num_windowed_layers
    full = _prefill_core(device, model, layout, prompts, length, cached)
    step = full.scaled(float(model.num_layers - windowed))
    if windowed and at.sliding_window:
        share = _pairs(length, cached, at.sliding_window) / _pairs(length, cached, None)
        step = step + full.scaled(windowed * share)
    return step


def _pairs(length: float, cached: float, window: float | None) -> float:
    """Query-key pairs of a causal prompt after `cached` tokens."""
    if window is None:
        return length * length / 2 + cached * length
    seen = np.minimum(cached + np.arange(64) / 64 * length + length / 128, window)
    return float(seen.mean() * length)


def _prefill_core(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    prompts: float,
    length: float,
    cached: float,
) -> Step:
    at, kv_bytes = model.attention, BYTES_PER_ELEMENT[layout.kv_precision]
    local = heads(at, layout.tp)
    if at.kv_lora_rank is not None:
        seconds = device.curves.mla_prefill(prompts, length, local.query, cached)
    else:
        seconds = device.curves.prefill_attention(prompts, length, local.query, local.kv, at.head_dim, cached)  # fmt: skip
    pairs = prompts * _pairs(length, cached, None)
    flop = 2.0 * local.query * (local.qk_dim + local.v_dim) * pairs
    written = prompts * length * local.kv * (local.qk_dim + local.v_dim) * kv_bytes
    read = prompts * length * local.query * (local.qk_dim + local.v_dim) * ACTIVATION_BYTES
    return kernel(device, seconds, flop=flop, size=written + read, precision="bf16")


def eager(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    gpu_seconds: Floats,
    engine: Engine,
) -> Step:
    """Overhead of one pass outside CUDA graphs: what launching all kernels takes beyond GPU time.

    max(0, eager_layer_overhead L - gpu) + prefill_overhead
    """
    launch = coefficient(device, "eager_layer_overhead", engine) * model.num_layers
    fixed = coefficient(device, "prefill_overhead", engine)
    return on("overhead", fixed + np.maximum(0.0, launch - np.asarray(gpu_seconds)))


def interference(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    sequences: float,
    length: float,
    *,
    engine: Engine = "vllm",
) -> Step:
    """Seconds that the prefill of one prompt adds to the decode of `sequences` running ones.

        mixed engines: sum over chunks of [ tokens(chunk + n) - tokens(n) ] + attention(s) + eager

    One pass computes the chunk and the decode tokens together, so weights are read once. SGLang by
    default prefills in passes of its own, during which decode waits: the whole prefill is added.
    """
    if engine == "sglang":
        return prefill(device, model, layout, 1.0, length, engine=engine)
    room = max(1.0, layout.max_batched_tokens - sequences)
    chunks = max(1.0, np.ceil(length / room))
    rows = np.asarray(length / chunks + sequences)
    base = padded(np.asarray(sequences, dtype=np.float64), layout.cuda_graphs)
    mixed, alone = (token_work(device, model, layout, r) for r in (rows, base))
    attention = prefill_attention(device, model, layout, 1.0, length)
    ends = eager(device, model, layout, mixed.seconds + attention.seconds / chunks, engine)
    return mixed.scaled(chunks) + alone.scaled(-chunks) + attention + ends.scaled(chunks)
