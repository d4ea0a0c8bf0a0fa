"""Generation of one batch of responses: prefill, decode with a long tail, KV capacity, replicas.

All sequences of the step are known at its start. Prompts (with their G samples) are dealt to the
replicas at random; each replica decodes its share to the end; the stage ends with the slowest
replica, so E[max] over replicas and not the max of means (G8). Where the KV cache or
`max_num_seqs` holds fewer sequences, finished ones are replaced (G9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.rollout.continuous_batching import StepTable, Timeline, lower_bound, tabulate
from rlhfsim.rollout.decode import Engine, decode_step, own_name
from rlhfsim.rollout.engine_step import CURVE_SPREAD, Floats, Spread, cost_of, on
from rlhfsim.rollout.oversampling import Aborted, aborted
from rlhfsim.rollout.prefill import beside, decoding, elsewhere, prompts
from rlhfsim.rollout.schedule import (
    Requests,
    SequenceSchedule,
    expected_lengths,
    expected_schedule,
    most_running,
    schedule,
)
from rlhfsim.rollout.speculative import speculative_step
from rlhfsim.rollout.turns import RESTS_ON, Waiting, delayed, waits
from rlhfsim.rollout.untimed import kernel_spread
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import RolloutPlacement

__all__ = ["Generation", "Requests", "generate", "kv_capacity", "step_table"]

TAIL_SHARE = 0.25
"""The tail begins when fewer than this share of the slowest replica's first batch still runs."""
CONTEXT_POINTS = 9
FINISH_POINTS = 64
WORKER_STEP = "rollout_step_overhead"
"""Coefficient: what the rollout worker of an RL framework adds to a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a rollout stage takes and needs."""

    cost: Cost
    """Seconds of the slowest replica. `tail` is the decode time after fewer than `TAIL_SHARE` of its first
    batch still runs; the other parts leave that time out."""
    decode_tokens: float
    """Response tokens of all replicas, those thrown away included."""
    discarded_tokens: float = 0.0
    """Response tokens that are thrown away."""
    prefill_seconds: float
    """Part of `cost` before the first decode step, and recomputation after preemption."""
    running: float
    """Sequences that run at the start, on one replica."""
    waves: float
    """Sequences of a replica over those that run at a time: 1 when all start together."""
    preemptions: float
    """Sequences per replica that lose their KV cache once and recompute it."""
    kv_tokens: float
    """Most context of one replica at a time, tokens (shared prompts counted once)."""
    kv_capacity: float
    """Tokens that one replica holds."""
    longest_context: float
    """Longest prompt and response, tokens."""
    decode_steps: float
    """Steps of the slowest replica."""
    mean_step: float
    """Mean seconds of its decode steps."""
    mean_running: float
    """Sequences that run on average over the time of the slowest replica."""
    lower_bound: float
    """l_max tau(1), seconds: more replicas never go below it; 0 where the longest is not waited for."""
    finish: tuple[float, ...]
    """Seconds after which 1/64, 2/64, ... of all sequences have finished."""

    @property
    def seconds(self) -> float:
        """Duration of the stage."""
        return self.cost.seconds

    def scaled(self, factor: float) -> Generation:
        """The same stage with every time `factor` times as long."""
        if factor == 1:
            return self
        return replace(
            self,
            cost=self.cost.scaled(factor),
            prefill_seconds=self.prefill_seconds * factor,
            mean_step=self.mean_step * factor,
            lower_bound=self.lower_bound * factor,
            finish=tuple(t * factor for t in self.finish),
        )

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds at least the longest sequence; below that no engine starts."""
        return self.longest_context <= self.kv_capacity

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second over all replicas."""
        return self.decode_tokens / self.seconds


def generate(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    *,
    kv_tokens: float | None = None,
    lengths: Floats | None = None,
    engine: Engine = "vllm",
    worker: bool = False,
) -> Generation:
    """The rollout stage of `requests` on `layout.dp` replicas.

    `worker`: the engine runs inside a rollout worker of an RL framework, whose own time per decode
    step (`rollout_step_overhead`) is added.

    `kv_tokens` is the KV capacity of one replica in tokens (see `kv_capacity`); `lengths` replaces
    the expected order statistics of the response lengths by observed ones. Prompts are prefilled
    before their replica decodes; that passes of a refilled batch share weight reads is not counted.
    """
    if layout.prefill:
        return _apart(device, model, layout, requests, kv_tokens, lengths, engine, worker)
    capacity = kv_capacity(device, model, layout) if kv_tokens is None else kv_tokens
    limit = most_running(layout, requests)
    if lengths is None:
        plan = expected_schedule(requests, layout.dp, limit, capacity)
    else:
        known = np.maximum(np.rint(np.asarray(lengths, dtype=np.float64)), 1.0)
        plan = schedule(known, requests, layout.dp, limit, capacity)
    table = step_table(
        device,
        model,
        layout,
        float(plan.slots),
        plan.prompt + plan.longest,
        engine=engine,
        worker=worker,
        adapters=requests.adapters,
    )
    waiting = None
    if requests.environment is not None:
        known = expected_lengths(requests) if lengths is None else known
        waited = waits(requests.environment, requests.sequences, requests.seed + int(known.sum()))
        line = plan.timeline
        alone = table.between(line.running, line.start, line.start + line.steps).sum() / line.steps.sum()
        late = delayed(known, waited, float(alone))
        delays = schedule(late, requests, layout.dp, limit, capacity)
        plan = replace(delays, longest=plan.longest)
        waiting = Waiting(
            per_token=float(waited.sum() / known.sum()), workers=requests.environment.workers / layout.dp
        )
    first = _first(device, model, layout, requests, plan, engine)
    spread = kernel_spread(device, model, layout)
    cost = partial(steps_cost, device, layout, engine=engine, worker=worker, kernels=spread)
    return _assemble(layout, plan, table, first, capacity, cost, waiting)


def _apart(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    kv_tokens: float | None,
    lengths: Floats | None,
    engine: Engine,
    worker: bool,
) -> Generation:
    """The same where some replicas only prefill."""
    asked, many = replace(requests, prefills=False), decoding(layout)
    decoded = generate(
        device, model, many, asked, kv_tokens=kv_tokens, lengths=lengths, engine=engine, worker=worker
    )
    other, first = elsewhere(device, model, layout, requests, engine)
    turns = requests.answered.turns_each if requests.answered else 1.0
    steps = decoded.decode_tokens / requests.sequences / layout.tokens_per_step / turns
    cost = beside(decoded.cost, other, first, steps * decoded.mean_step)
    late = cost.seconds / decoded.seconds
    return replace(decoded, cost=cost, prefill_seconds=first, finish=tuple(t * late for t in decoded.finish))


def _first(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    plan: SequenceSchedule,
    engine: Engine,
) -> Cost:
    """Prefill of one replica's prompts, and of what preempted sequences had generated."""
    each = plan.each / layout.attention_dp
    cost = Cost()
    if requests.prefills:
        cost = _prompts(device, model, layout, each, requests, plan.prompt, True, engine)
    if not plan.preempted:
        return cost
    context, evicted = plan.recomputed / plan.preempted, plan.preempted / layout.attention_dp
    again = replace(requests, samples=1, answered=None)
    return cost + _prompts(device, model, layout, evicted, again, context, False, engine)


@lru_cache(maxsize=4096)
def _prompts(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    each: float,
    requests: Requests,
    prompt: float,
    shared: bool,
    engine: Engine,
) -> Cost:
    step = prompts(device, model, layout, each, requests, prompt, shared=shared, engine=engine)
    return step.cost(device, kernel_spread(device, model, layout))


def step_table(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    most: float,
    longest: float,
    *,
    engine: Engine = "vllm",
    worker: bool = False,
    adapters: bool = False,
) -> StepTable:
    """Step time of one replica for up to `most` sequences and `longest` tokens of context.

    With speculation a step over the tokens that it gives: the time per token of a sequence.

    With LoRA `adapters` the host launches two more products beside every one of L layers and handles n
    sequences one by one, which bounds the step: at least L `adapter_layer_time` + n `adapter_sequence_time`.
    """
    top = 1.0
    while top < most:
        top *= 2
    reach = 1.0
    while reach < longest:
        reach *= 2
    replica = replace(layout, dp=1, prefill=0)  # how many there are changes no step
    return _table(device, model, replica, top, reach, engine, worker, adapters)


@lru_cache(maxsize=512)
def _table(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    top: float,
    reach: float,
    engine: Engine,
    worker: bool,
    adapters: bool,
) -> StepTable:
    powers = 2.0 ** np.arange(0, np.log2(max(top, 2.0)) + 1)
    between = np.concatenate([powers[:-1] * 1.5, powers[:-1] * 1.25, powers[:-1] * 1.75])
    n = np.unique(np.concatenate([powers, between[between >= 16]]))
    low = min(64.0, reach / 2)
    c = np.concatenate([[1.0], np.geomspace(low, max(reach, 2 * low), CONTEXT_POINTS)])
    per_rank = np.maximum(n / layout.attention_dp, 1.0)[:, None]
    if layout.speculation is None:
        step = decode_step(device, model, layout, per_rank, c[None, :], engine=engine)
    else:
        step = speculative_step(
            device, model, layout, layout.speculation, per_rank, c[None, :], engine=engine
        )
    if adapters:
        launch = device["adapter_layer_time"] * model.num_layers + device["adapter_sequence_time"] * per_rank
        step = step + on("overhead", np.maximum(0.0, launch - step.seconds))
    if worker:
        step = step + on("overhead", device[WORKER_STEP])
    return tabulate(n, c, step.scaled(1.0 / layout.tokens_per_step))


def kv_capacity(device: Device, model: ModelSpec, layout: RolloutLayout) -> float:
    """Tokens of KV cache that one replica holds (G7), as in the ledger; 0 where the weights leave no room."""
    alone = RolloutPlacement(pool="alone", layout=layout)
    return engine_bytes(model, alone, profile=device.profile).kv_tokens


def _assemble(
    layout: RolloutLayout,
    plan: SequenceSchedule,
    table: StepTable,
    first: Cost,
    capacity: float,
    decoding_cost: Callable[[dict[Resource, float], float], Cost],
    waiting: Waiting | None,
) -> Generation:
    cut = None if plan.wanted is None else aborted(plan, table, plan.wanted)
    plan = plan if cut is None else cut.plan
    timeline = plan.timeline
    end = timeline.start + timeline.steps
    decoding = timeline.running
    hidden = np.zeros(len(decoding), bool)
    if waiting is None:
        seconds = table.between(decoding, timeline.start, end)
    else:
        seconds, decoding, hidden = waiting.paced(table, decoding, timeline.start, end)
    per_replica = np.bincount(timeline.replica, weights=seconds, minlength=layout.dp)
    slowest = timeline.replica == int(np.argmax(per_replica))
    n, steps, spent = decoding[slowest], timeline.steps[slowest], seconds[slowest]
    tail = timeline.running[slowest] < TAIL_SHARE * timeline.running[slowest][0]
    begin, until = timeline.start[slowest], end[slowest]
    shown = ~hidden[slowest]  # decoding hides behind workers that answer no faster
    full = ~tail & shown
    busy: dict[Resource, float] = table.parts(n[full], begin[full], until[full])
    decoded = spent if waiting is None else table.between(n, begin, until) * shown
    busy["tail"] = float(decoded[tail].sum())
    engine_steps = steps / layout.tokens_per_step
    spent_on = decoding_cost(busy, float(engine_steps[full].sum()))
    if waiting is not None:
        spent_on += Cost(parts=(part("environment", float((spent - decoded).sum()), RESTS_ON),))
    return Generation(
        cost=first + spent_on,
        decode_tokens=plan.tokens,
        discarded_tokens=0.0 if cut is None else plan.tokens - cut.trained_tokens,
        prefill_seconds=first.seconds,
        running=float(n[0]),
        waves=plan.each / plan.slots,
        preemptions=plan.preempted,
        kv_tokens=plan.kv_tokens,
        kv_capacity=capacity,
        longest_context=plan.prompt + plan.longest,
        decode_steps=float(engine_steps.sum()),
        mean_step=float(spent.sum() / engine_steps.sum()),
        mean_running=float((n * spent).sum() / spent.sum()),
        lower_bound=lower_bound(table, plan.longest, plan.prompt) if cut is None else 0.0,
        finish=_finish(timeline, seconds, first.seconds) if cut is None else _points(cut, first.seconds),
    )


def _points(cut: Aborted, first: float) -> tuple[float, ...]:
    """Seconds until each 64th of the groups trained on has finished, prefill before decode."""
    at = np.ceil(np.arange(1, FINISH_POINTS + 1) / FINISH_POINTS * len(cut.finish)).astype(int) - 1
    return tuple(float(first + t) for t in cut.finish[at])


def steps_cost(
    device: Device,
    layout: RolloutLayout,
    busy: dict[Resource, float],
    steps: float,
    engine: Engine,
    worker: bool,
    kernels: Spread = CURVE_SPREAD,
) -> Cost:
    """`busy` of `steps` engine steps as a cost; what the host takes rests on what it takes it for.

    The scheduler's part has the interval of the engine's own coefficient, the rollout worker's that of
    `rollout_step_overhead`; the rest goes by sequence or, without CUDA graphs, into launches.
    """
    scheduler = own_name(device, "decode_step_overhead", engine)
    each = {scheduler: device[scheduler] * layout.pp}
    each |= {WORKER_STEP: device[WORKER_STEP]} if worker else {}
    left, parts = busy["overhead"], list[Part]()
    for name, seconds in each.items():
        taken = min(left, steps * seconds)
        left -= taken
        parts.append(part("overhead", taken, name, spread=device.spread(name)))
    rest = "decode_sequence_overhead" if layout.captured else "eager_decode_layer_time"
    name = own_name(device, rest, engine)
    parts.append(part("overhead", left, name, spread=device.spread(name)))
    timed = cost_of(device, {**busy, "overhead": 0.0}, kernels)
    return timed + Cost(parts=tuple(p for p in parts if p.seconds > 0))


def _finish(timeline: Timeline, seconds: Floats, first: float) -> tuple[float, ...]:
    """Seconds until each 64th of all sequences has finished, prefill before decode."""
    ends = np.cumsum(seconds)
    new = np.flatnonzero(np.diff(timeline.replica, prepend=-1))
    ends -= np.repeat(ends[new] - seconds[new], np.diff(np.append(new, len(seconds))))
    order = np.argsort(ends, kind="stable")
    done = np.cumsum(timeline.completions[order])
    wanted = np.arange(1, FINISH_POINTS + 1) / FINISH_POINTS * done[-1]
    at = np.minimum(np.searchsorted(done, wanted - 1e-9), len(ends) - 1)
    return tuple(float(first + ends[order[i]]) for i in at)
