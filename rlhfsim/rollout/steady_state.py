"""Generation that never drains: the time one batch takes of an engine that is always refilled.

With staleness above 1, or with rollouts that are interrupted and continued, a replica starts on
samples of the next batch while the longest responses of this one still run. What counts is then
throughput, not the makespan of a batch (physics section 8; AReaL, arXiv 2505.24298):

    T = prefill + S / (R n) tau(n, c) + interrupts      c = p + E[l^2] / (2 E[l])
    T >= (l_max tau(n, c)) / staleness                  unless rollouts are interrupted

S response tokens of a batch, R replicas, n sequences that run on each. A running sequence is seen
at a length-biased point of its life, hence c. n is bounded by the engine, by its KV cache and by
admission: in flight and waiting are (staleness + 1) batches just after an update and `staleness`
when the next batch is complete; NeMo-RL admits `staleness` batches (async_utils.py, a semaphore of
num_prompts_per_step x max_trajectory_age_steps). Prompts are admitted with all their G samples and
make room when the longest has finished, so of these E[l] / E[max of G] run on average.

Not known here: variation of the load between replicas, and updates that wait for running requests.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.rollout.continuous_batching import StepTable
from rlhfsim.rollout.engine_step import RESOURCES
from rlhfsim.rollout.generation import Requests, kv_capacity, step_table, steps_cost
from rlhfsim.rollout.prefill import prefill, prompts
from rlhfsim.rollout.schedule import most_running
from rlhfsim.rollout.untimed import kernel_spread
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import GRID, AnyLengths, LengthStats, stats


@frozen
class SteadyState:
    """A continuously refilled rollout pool."""

    cost: Cost
    """Per batch. `tail` is what the staleness bound adds for the longest response."""
    running: float
    """Sequences that run on one replica."""
    context: float
    """Mean context of a running sequence, tokens."""
    step: float
    """Seconds of a decode step."""
    latency: float
    """Seconds that the longest response takes."""
    interrupt: Cost
    """Prefill of what was in flight at a weight update; part of `cost`."""


@lru_cache(maxsize=4096)
def steady_state(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    *,
    staleness: float,
    interrupted: bool,
    kv_tokens: float | None = None,
    worker: bool = False,
) -> SteadyState:
    """Time per batch of `layout.dp` replicas that are refilled as sequences finish.

    `interrupted`: a weight update stops the running sequences, which then prefill their prompt and
    what they had generated under the new weights (AReaL section 4.1, partial rollouts). `worker`: as
    in `rollout.generation.generate`.
    """
    prompt, response = stats(requests.prompt_lengths).mean, stats(requests.response_lengths)
    age = response.mean_square / (2 * response.mean)
    context = prompt + age
    capacity = kv_capacity(device, model, layout) if kv_tokens is None else kv_tokens
    own = prompt / requests.samples + age + VLLM.block_tokens / 2  # a prompt is shared by its group
    running = _running(layout, requests, staleness, capacity / own)
    table = step_table(
        device,
        model,
        layout,
        running,
        prompt + _longest(requests, response),
        worker=worker,
        adapters=requests.adapters,
    )
    step = _one_step(table, running, context)
    tau = sum(step.values())
    steps = requests.sequences * response.mean / (layout.dp * running)
    share = requests.sequences / (layout.dp * layout.attention_dp)
    spread = kernel_spread(device, model, layout)
    first = prompts(device, model, layout, share, requests, prompt).cost(device, spread)
    again = (
        prefill(device, model, layout, running / layout.attention_dp, context).cost(device, spread)
        if interrupted
        else Cost()
    )
    busy = {r: s * steps for r, s in step.items()}
    passes = steps / layout.tokens_per_step
    work = first + steps_cost(device, layout, busy, passes, "vllm", worker, spread) + again
    latency = _longest(requests, response) * tau
    waits = 0.0 if interrupted else max(0.0, latency / staleness - work.seconds)
    tail = Cost(parts=(part("tail", waits, "staleness"),)) if waits else Cost()
    return SteadyState(
        cost=work + tail, running=running, context=context, step=tau, latency=latency, interrupt=again
    )


def _running(layout: RolloutLayout, requests: Requests, staleness: float, kv_slots: float) -> float:
    """Sequences of one replica: limits of the engine, of its KV cache and of admission."""
    engine = float(most_running(layout, requests))
    batches = batches_at_once(staleness)
    response = stats(requests.response_lengths)
    alive = response.mean / mean_of_longest(requests.response_lengths, requests.samples)
    admitted = batches * requests.sequences / layout.dp * alive
    return max(1.0, min(engine, kv_slots, admitted))


def batches_at_once(staleness: float) -> float:
    """Batches whose sequences run side by side on an engine that never drains."""
    return max(staleness, min(1.0, staleness + 0.5))


def mean_of_longest(lengths: AnyLengths, count: int) -> float:
    """E[max of `count` draws], tokens: the mean of the quantile function at levels u^(1/count)."""
    levels = ((np.arange(GRID) + 0.5) / GRID) ** (1.0 / count)
    return float(lengths.quantile(levels).mean())


def _longest(requests: Requests, response: LengthStats) -> float:
    return response.expected_max(requests.sequences)


def _one_step(table: StepTable, running: float, context: float) -> dict[Resource, float]:
    """Seconds of a decode step by resource, integrated over one token of context."""
    n, c = np.full(1, running), np.full(1, context)
    parts = table.parts(n, c - 0.5, c + 0.5)
    return {r: float(np.sum(parts[r])) for r in RESOURCES}
