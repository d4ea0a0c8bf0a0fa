"""A step of speculative decoding: k tokens are drafted for each sequence, the policy verifies k + 1 at once.

    tau = draft + verify(n (k + 1) rows, KV cache read once) + overhead      tokens = 1 + a + ... + a^k

(Leviathan et al. 2023, arXiv 2211.17192; a acceptance.) A drafter makes k passes of n rows, each with a host
launch of its own (`decode_step_overhead` of no engine in particular); n-grams are matched for nothing.
Not known here: trees of drafts, steps that lose asynchronous scheduling, drafters that are trained with the
policy, an acceptance that falls as the policy leaves its drafter, verification that waits for the luckiest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfsim.kernels.device import Device
from rlhfsim.rollout.decode import Engine, coefficient, gpu_work, overhead
from rlhfsim.rollout.engine_step import EngineStep, Floats, nothing, on
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.drafts import draft_of
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout
from rlhfsim.specs.placement.speculation import Speculation


def speculative_step(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    speculation: Speculation,
    sequences: Floats,
    context: Floats,
    *,
    engine: Engine = "vllm",
) -> EngineStep:
    """Seconds of one step of a replica with `sequences` running per attention-DP rank.

    It gives `speculation.tokens_per_step` tokens to each sequence.
    """
    each = speculation.draft_tokens + 1
    verify = gpu_work(device, model, layout, sequences, context, engine=engine, tokens=each)
    rows = sequences * each
    step = verify + overhead(device, model, layout, sequences, verify.seconds, engine=engine, rows=rows)
    return step + _drafting(device, model, layout, speculation, sequences, context, engine)


def _drafting(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    speculation: Speculation,
    sequences: Floats,
    context: Floats,
    engine: Engine,
) -> EngineStep:
    draft = draft_of(model, speculation)
    if draft is None:
        return nothing()
    own = replace(layout, precision="bf16", speculation=None)
    if draft.moe is None:  # no tokens are sent to experts of its own
        own = replace(own, ep=1, dispatcher=None)
    work = gpu_work(device, draft, own, sequences, context, engine=engine)
    layers = coefficient(device, "decode_layer_overhead", engine) * draft.num_layers
    launch = on("overhead", np.asarray(device["decode_step_overhead"] + layers))
    return (work + launch).scaled(float(speculation.draft_tokens))
