"""Prefill of what a replica's sequences need: prompts by group, answers between turns, what no cache keeps.

With T turns, an answer of a tokens after each but the last, a response of r tokens a turn and a prompt of q:

    shared by a group    q
    at each later turn   a + (1 - c) (q + (T/2) (r + a)) new tokens behind c (...) cached ones

c is `environment.prefix_reuse`, the share of the context that the prefix cache still has. Where other
replicas prefill (`layout.prefill` of the dp), the r tokens that were decoded elsewhere are prefilled there
too, and the KV of all that is new moves. Those p replicas work beside the d that decode:

    T_rollout = max( decode on d + first prompt,  prefill and transfer on p + one turn of decode )

Not known here: KV that flows back to where prompts are prefilled, turns of unequal length.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import network, scale_up
from rlhfsim.memory.kv_cache import kv_bytes_per_token
from rlhfsim.rollout.decode import Engine
from rlhfsim.rollout.engine_step import EngineStep
from rlhfsim.rollout.prefill import group_prefill, prefill
from rlhfsim.rollout.schedule import Requests
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import stats


def prompts(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    sequences: float,
    requests: Requests,
    prompt: float,
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
    new = asked.answer_tokens + (1 - asked.prefix_reuse) * context + (turn if layout.prefill else 0.0)
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
    busy = prompts(device, model, layout, rank, requests, prompt, engine=engine).cost(device)
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
