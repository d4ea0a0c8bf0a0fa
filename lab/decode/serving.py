"""Time between output tokens of an engine that serves a closed loop of requests, each replaced when it ends.

Legend as in `rlhfsim.rollout.prefill`: n requests of a rank, o output tokens, L layers.
"""

from __future__ import annotations

import math

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.kernels.device import Device
from rlhfsim.rollout.decode import Engine, coefficient, gpu_work, padded, token_work
from rlhfsim.rollout.prefill import prefill_attention
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout


@frozen
class Terms:
    """GPU seconds of continuous batching at full slots, before what an engine adds."""

    decode: float
    """Kernels of one decode step."""
    mixed: float
    """Kernels of the passes that carry the chunks of one prompt."""
    spared: float
    """Kernels of as many decode steps, which those passes do as well (0 where prefill stands alone)."""
    chunks: float
    """Passes per prompt; below 1 where prompts share a pass."""
    layers: float
    sequences: float
    steps: float
    """Decode steps of a request."""
    launch: float
    """CPU time to launch one pass outside CUDA graphs."""


def serving_terms(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: float,
    input_tokens: float,
    output_tokens: float,
    *,
    engine: Engine = "vllm",
) -> Terms:
    """What `sequences` requests per rank, each replaced when it ends, ask of the GPU.

    One pass computes a chunk and the decode tokens together, so weights are read once. SGLang by
    default prefills in passes of its own, during which decode waits. Where more than one request
    ends a step (n / (o - 1)), their successors share a pass as far as the token budget goes. The
    mean context of a running request is its prompt and half its response.
    """
    n = np.asarray(float(sequences))
    work = gpu_work(device, model, layout, n, np.asarray(input_tokens + output_tokens / 2), engine=engine)
    alone = engine == "sglang"
    room = max(1.0, layout.max_batched_tokens - (0.0 if alone else float(n)))
    steps = max(1.0, output_tokens - 1.0)
    together = min(max(1.0, float(n) / steps), max(1.0, room / input_tokens))
    chunks = max(1.0, float(np.ceil(input_tokens / room))) / together
    rows = np.asarray(input_tokens / chunks + (0.0 if alone else float(n)))
    passes = token_work(device, model, layout, rows, engine).scaled(chunks)
    passes = passes + prefill_attention(device, model, layout, 1.0, input_tokens)
    base = token_work(device, model, layout, padded(n), engine).seconds
    return Terms(
        decode=float(work.seconds),
        mixed=float(passes.seconds),
        spared=0.0 if alone else chunks * float(base),
        chunks=chunks,
        layers=model.launched_layers,
        sequences=float(n),
        steps=steps,
        launch=coefficient(device, "eager_layer_overhead", engine) * model.launched_layers,
    )


def output_time(
    terms: Terms, *, layer: float, step: float, sequence: float, interference: float, overhead: float
) -> float:
    """Mean seconds between output tokens of a request, TPOT = X / (o - 1).

        X = (o - 1) tau + (n - 1) P X / (X + P + tau)
        tau = kernels + a_step + a_layer L + a_seq n
        P = interference (mixed - spared) + chunks (overhead + max(0, launch - mixed pass))

    While a request decodes (X seconds of its life X + P + tau) each of the other n - 1 slots starts
    anew once per life, and every start delays the running ones by P. The root of a quadratic.
    `interference` is 1 for prompts that arrive one by one; below 1 several prompts share a pass, or
    part of them arrived together before anything decoded (short benchmarks).
    """
    tau = terms.decode + step + layer * terms.layers + sequence * terms.sequences
    if terms.sequences <= 1:
        return tau
    ends = terms.chunks * (overhead + max(0.0, terms.launch - terms.mixed / terms.chunks))
    each = interference * max(0.0, terms.mixed - terms.spared) + ends
    decoding, own, others = terms.steps * tau, each + tau, (terms.sequences - 1.0) * each
    half = (decoding + others - own) / 2.0
    return (half + math.sqrt(half * half + decoding * own)) / terms.steps


def time_per_output_token(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: float,
    input_tokens: float,
    output_tokens: float,
    *,
    engine: Engine = "vllm",
) -> float:
    """TPOT of an engine under a closed loop of `sequences` requests per rank, see `output_time`."""
    terms = serving_terms(device, model, layout, sequences, input_tokens, output_tokens, engine=engine)
    return output_time(
        terms,
        layer=coefficient(device, "decode_layer_overhead", engine),
        step=coefficient(device, "decode_step_overhead", engine),
        sequence=coefficient(device, "decode_sequence_overhead", engine),
        interference=coefficient(device, "prefill_interference", engine),
        overhead=coefficient(device, "prefill_overhead", engine),
    )
