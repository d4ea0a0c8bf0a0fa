"""Time of prefill: whole prompts, chunks, prompts shared by a group, and steps that mix it with decode.

Legend: x new tokens, c cached tokens before them, s prompt length, G samples per prompt, n running
sequences, B the engine's token budget of one step (`max_batched_tokens`). Attention-data-parallel
ranks prefill their own prompts at the same time; sizes are per rank.

    T = 2 N_a x / (t F eta) + attention(x, c) + T_tp(x) + T_ep(x) + eager launch            (G6)

With T turns, an answer of a tokens after each but the last, a response of r tokens a turn and a prompt of q:

    shared by a group    q
    at each later turn   a + (1 - u) (q + (T/2) (r + a)) new tokens behind u (...) cached ones

u is `environment.prefix_reuse`, the share of the context that the prefix cache still has. Where other
replicas prefill (`layout.prefill` of the dp), the r tokens that were decoded elsewhere are prefilled there
too, and the KV of all that is new moves. Those p replicas work at the same time as the d that decode:

    T_rollout = max( decode on d + first prompt,  prefill and transfer on p + one turn of decode )

Not known here: KV that flows back to where prompts are prefilled, turns of unequal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlhfsim.elementwise import Size, least, most, number, remembered, some, where
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.layers import heads
from rlhfsim.kernels.links import network, scale_up
from rlhfsim.memory.kv_cache import kv_bytes_per_token
from rlhfsim.rollout import untimed
from rlhfsim.rollout.decode import Engine, coefficient, head_work, pipeline_hop, token_work
from rlhfsim.rollout.engine_step import ACTIVATION_BYTES, EngineStep, Floats, chosen, kernel, nothing, on
from rlhfsim.rollout.schedule import Requests
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout, kind_of
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.specs.workload.lengths import stats


def prefill(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    prompts: Size,
    length: Size,
    *,
    cached: Size = 0.0,
    engine: Engine = "vllm",
) -> EngineStep:
    """Seconds to prefill `prompts` prompts of `length` new tokens on one attention-DP rank.

    Prompts are packed into passes of at most `max_batched_tokens`; a longer prompt is cut into
    chunks that attend to what came before them. `cached` tokens of each prompt are in the prefix
    cache already. With pipeline stages the passes follow each other: passes + p - 1 stage times.
    In columns every layout has some prompts.
    """
    if not some((prompts > 0) & (length > 0)):
        return nothing()
    return _remembered(_prefill, ALL, device, model, layout, engine, prompts, length, cached)


CUT = "tp", "ep", "attention_dp"
"""Fields that a pass reads of a layout, in addition to its kind."""
ALL = *CUT, "pp", "max_batched_tokens"


def _remembered(
    price: Callable[..., EngineStep],
    fields: Sequence[str],
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    engine: Engine,
    *sizes: Size,
) -> EngineStep:
    """`price` of the sizes in each layout, which those with equal `fields` share."""

    def seconds(*columns: Size) -> EngineStep:
        cut = replace(layout, **dict(zip(fields, columns, strict=False)))
        return price(device, model, cut, *columns[len(fields) :], engine)

    known = _known(price, device, model, kind_of(layout), engine)
    found = remembered(known, seconds, *(getattr(layout, field) for field in fields), *sizes)
    return EngineStep(*map(np.asarray, found))


@lru_cache(maxsize=128)
def _known(
    price: object, device: Device, model: ModelSpec, kind: object, engine: Engine
) -> dict[tuple[Any, ...], Floats]:
    """Seconds by resource."""
    return {}


def _prefill(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    prompts: Size,
    length: Size,
    cached: Size,
    engine: Engine,
) -> EngineStep:
    budget = least(1.0 * layout.max_batched_tokens, prompts * length)
    passes = most(1.0, prompts * length / budget)
    ramp = (passes + layout.pp - 1) / layout.pp
    finished = most(1.0, prompts / passes)
    work = _remembered(token_work, CUT, device, model, layout, engine, budget)
    alone, hop = layout.pp == 1, lambda: pipeline_hop(device, model, layout, budget).scaled(layout.pp)
    work = work + chosen(alone, nothing, hop)
    work = work + head_work(device, model, layout, np.asarray(finished), engine)
    attention = prefill_attention(device, model, layout, prompts, length, cached)
    gpu = (work + attention.scaled(1.0 / passes)).scaled(
        1.0 / coefficient(device, "prefill_efficiency", engine)
    )
    return (gpu + eager(device, model, layout, gpu.seconds, engine)).scaled(ramp)


def group_prefill(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Size,
    samples: float,
    length: Size,
    *,
    shared: bool = True,
    engine: Engine = "vllm",
) -> EngineStep:
    """Prefill of `sequences` sequences in groups of `samples` with one prompt each (G6).

    With a prefix cache and all G samples on one replica, a prompt is computed once per group. Of the
    other G - 1 times `prompt_reuse` is saved: all where the cache is on, none where it is off.
    """
    reuse = shared and model.recurrent is None  # a state is no cache that a second sequence could share
    saved = device["prompt_reuse"] if reuse else 0.0
    prompts = saved * (sequences / samples) + (1.0 - saved) * sequences
    return prefill(device, model, layout, prompts, length, engine=engine)


def prefill_attention(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    prompts: Size,
    length: Size,
    cached: Size = 0.0,
) -> EngineStep:
    """Attention cores of all layers for `prompts` prompts, whatever the chunks.

        2 a (d_k + d_v) (s^2/2 + c s) FLOP a prompt; windowed and sparse layers see at most their window

    Chunks of one prompt together see the pairs of the whole prompt; that their smaller query tiles
    run less efficiently is not counted.
    """
    at, windowed = model.attention, model.attention.num_windowed_layers
    full = _prefill_core(device, model, layout, prompts, length, cached)
    sparse = _pairs(length, cached, at.index_topk) / _pairs(length, cached, None)
    step = full.scaled(float(model.num_attention_layers - windowed) * sparse)
    pairs = prompts * _pairs(length, cached, None)
    step = step + untimed.index(device, model, np.asarray(pairs), np.asarray(prompts * length))
    step = step + untimed.scan(device, model, layout.tp, prompts * length)
    if windowed and at.sliding_window:
        share = _pairs(length, cached, at.sliding_window) / _pairs(length, cached, None)
        step = step + full.scaled(windowed * share)
    return step


def _pairs(length: Size, cached: Size, window: float | None) -> Size:
    """Query-key pairs of a causal prompt after `cached` tokens."""
    if window is None:
        return length * length / 2 + cached * length
    before, each = np.asarray(cached)[..., None], np.asarray(length)[..., None]
    seen = np.minimum(before + np.arange(64) / 64 * each + each / 128, window)
    return number(seen.mean(axis=-1) * length)


def _prefill_core(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, prompts: Size, length: Size, cached: Size
) -> EngineStep:
    at, kv_bytes = model.attention, BYTES_PER_ELEMENT[layout.kv_precision]
    local = heads(at, layout.tp)
    if at.kv_lora_rank is not None:
        seconds = device.curves.mla_prefill(prompts, length, local.query, cached)
    else:
        seconds = device.curves.prefill_attention(prompts, length, local.query, local.kv, at.head_dim, cached)
    pairs = prompts * _pairs(length, cached, None)
    flop = 2.0 * local.query * (local.qk_dim + local.v_dim) * pairs
    written = prompts * length * local.kv * (local.qk_dim + local.v_dim) * kv_bytes
    read = prompts * length * local.query * (local.qk_dim + local.v_dim) * ACTIVATION_BYTES
    return kernel(device, seconds, flop=flop, size=written + read, precision="bf16")


def eager(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, gpu_seconds: Floats, engine: Engine
) -> EngineStep:
    """Overhead of one pass outside CUDA graphs: what launching all kernels takes beyond GPU time.

    max(0, eager_layer_overhead L - gpu) + prefill_overhead
    """
    launch = coefficient(device, "eager_layer_overhead", engine) * model.launched_layers
    fixed = coefficient(device, "prefill_overhead", engine)
    return on("overhead", fixed + np.maximum(0.0, launch - np.asarray(gpu_seconds)))


def prompts(
    device: Device,
    model: ModelSpec,
    layout: AnyRolloutLayout,
    sequences: Size,
    requests: Requests,
    prompt: Size,
    *,
    shared: bool = True,
    engine: Engine = "vllm",
) -> EngineStep:
    """Prefill of `sequences` sequences of one attention-DP rank; `prompt` tokens hold answers too."""
    asked = requests.answered
    own = prompt - (asked.answers_total if asked else 0.0)
    first = group_prefill(
        device, model, layout, sequences, requests.samples, own, shared=shared, engine=engine
    )
    if asked is None or asked.turns_each <= 1:
        return first
    turn = stats(requests.response_lengths).mean / asked.turns_each
    context = own + asked.turns_each / 2 * (turn + asked.answer_tokens)
    new = asked.answer_tokens + (1 - asked.prefix_reuse) * context + where(layout.prefill > 0, turn, 0.0)
    later = sequences * (asked.turns_each - 1)
    kept = asked.prefix_reuse * context
    return first + prefill(device, model, layout, later, new, cached=kept, engine=engine)


def elsewhere(
    device: Device, model: ModelSpec, layout: RolloutLayout, requests: Requests, engine: Engine
) -> tuple[Cost, float]:
    """Prefill and transfer of a step on `layout.prefill` replicas, and seconds until a first prompt is there.

    Layers are sent while later ones are computed, so the slower of the two counts.
    """
    prompt, response = stats(requests.prompt_lengths).mean, stats(requests.response_lengths).mean
    each = requests.sequences / layout.prefill
    rank = each / layout.attention_dp
    step = prompts(device, model, layout, rank, requests, prompt, engine=engine)
    busy = step.cost(device, untimed.kernel_spread(device, model, layout))
    rate = scale_up(device) if layout.gpus <= device.domain else network(device)
    turns = requests.answered.turns_each if requests.answered else 1.0
    tokens = prompt + response * (1 - 1 / turns)
    moved = each * tokens * kv_bytes_per_token(model, layout) / rate.value
    sent = Cost(parts=(part(rate.resource, moved, rate.rests_on, spread=rate.spread),))
    first = (busy.seconds + moved) * layout.prefill / requests.prompts
    return (busy if busy.seconds >= moved else sent), first


def beside(decoded: Cost, other: Cost, first: float, turn: float) -> Cost:
    """Decode with prefill elsewhere: see the module; `turn` is the decode of one turn."""
    exposed = max(first, other.seconds + turn - decoded.seconds)
    return decoded + other.scaled(exposed / other.seconds)


def decoding(layout: RolloutLayout) -> RolloutLayout:
    """The replicas of a layout that decode."""
    return replace(layout, dp=layout.dp - layout.prefill, prefill=0)
