"""Generation of one batch of responses: prefill, decode with a long tail, KV capacity, replicas.

All sequences of the step are known at its start. Prompts (with their G samples) are dealt to the
replicas at random; each replica decodes its share to the end; the stage ends with the slowest
replica, so E[max] over replicas and not the max of means (G8). Where the KV cache or
`max_num_seqs` holds fewer sequences, finished ones are replaced (G9).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlhfsim.costs import kv_cache
from rlhfsim.costs.cost import Cost, Resource
from rlhfsim.costs.decode import Engine, decode_step
from rlhfsim.costs.device import Device
from rlhfsim.costs.prefill import group_prefill, prefill
from rlhfsim.costs.step import RESOURCES, Floats, cost_of
from rlhfsim.phases.drain import StepTable, Timeline, one_wave, refill, tabulate
from rlhfsim.specs.layout import RolloutLayout
from rlhfsim.specs.lengths import AnyLengths, stats
from rlhfsim.specs.model import ModelSpec

TAIL_SHARE = 0.25
"""The tail begins when fewer than this share of the slowest replica's first batch still runs."""
BLOCK_TOKENS = 16.0
"""Tokens of a KV block; a sequence wastes half a block on average."""
CONTEXT_POINTS = 9
FINISH_POINTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """All sequences of one step."""

    prompts: int
    samples: int
    """Responses per prompt (G)."""
    prompt_lengths: AnyLengths
    response_lengths: AnyLengths
    seed: int = 0
    """Seed of the deal of prompts to replicas."""

    @property
    def sequences(self) -> int:
        """prompts x samples."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a rollout stage takes and needs."""

    cost: Cost
    """Of the slowest replica. `tail` is the decode time after fewer than `TAIL_SHARE` of its first
    batch still runs; the other parts leave that time out."""
    decode_tokens: float
    """Response tokens of all replicas."""
    prefill_seconds: float
    """Part of `cost` before the first decode step, and recomputation after preemption."""
    running: float
    """Sequences that run at the start, on one replica."""
    waves: float
    """Sequences of a replica over those that run at a time."""
    preemptions: float
    """Sequences per replica that lose their KV cache once and recompute it."""
    kv_tokens: float
    """Most context of one replica at a time, tokens (shared prompts counted once)."""
    kv_capacity: float
    """Tokens that one replica holds."""
    decode_steps: float
    """Steps of the slowest replica."""
    mean_step: float
    """Mean seconds of its decode steps."""
    mean_running: float
    """Sequences that run on average over the time of the slowest replica."""
    lower_bound: float
    """l_max tau(1), seconds: more replicas never go below it."""
    finish: tuple[float, ...]
    """Seconds after which 1/64, 2/64, ... of all sequences have finished."""

    @property
    def seconds(self) -> float:
        """Duration of the stage."""
        return self.cost.seconds

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
    shared_prompts: bool = True,
) -> Generation:
    """The rollout stage of `requests` on `layout.dp` replicas.

    `kv_tokens` is the KV capacity of one replica in tokens (see `kv_capacity`); `lengths` replaces
    the expected order statistics of the response lengths by observed ones.
    """
    prompt = stats(requests.prompt_lengths).mean
    drawn = _lengths(requests, lengths)
    dealt = deal(drawn, layout.dp, requests.samples, requests.seed)
    capacity = kv_capacity(device, model, layout) if kv_tokens is None else kv_tokens
    saved = prompt * (1 - 1 / requests.samples) if shared_prompts else 0.0
    slots = _slots(layout, dealt, prompt - saved, capacity)
    each = dealt.shape[1]
    timeline = one_wave(dealt, prompt) if slots >= each else refill(dealt, slots, prompt)
    table = step_table(device, model, layout, float(min(slots, each)), prompt + float(drawn.max()), engine=engine)  # fmt: skip
    preempted = _preemptions(layout, slots, each, prompt - saved, capacity)
    first = _prefill_seconds(device, model, layout, requests, prompt, each, shared_prompts, engine)
    first = first + _recompute(device, model, layout, preempted, prompt + float(drawn.mean()) / 2, engine)  # fmt: skip
    return _assemble(device, layout, timeline, table, drawn, first, prompt, saved, slots, preempted, capacity)  # fmt: skip


def _lengths(requests: Requests, lengths: Floats | None) -> Floats:
    if lengths is not None:
        return np.maximum(np.rint(np.asarray(lengths, dtype=np.float64)), 1.0)
    known = stats(requests.response_lengths)
    drawn = known.representative(requests.sequences)
    drawn = np.sort(drawn)
    if requests.sequences > 1:
        drawn[-1] = max(drawn[-1], known.expected_max(requests.sequences))
    return np.maximum(np.rint(drawn), 1.0)


def deal(lengths: Floats, replicas: int, samples: int, seed: int) -> Floats:
    """(replicas, n) lengths: prompts with their samples dealt at random, as evenly as they go; 0 pads."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(lengths)
    size = samples if len(lengths) % samples == 0 and len(lengths) // samples >= replicas else 1
    groups = shuffled.reshape(-1, size)
    per_replica = -(-len(groups) // replicas)
    padded = np.zeros((per_replica * replicas, size))
    padded[: len(groups)] = groups
    # group i goes to replica i mod R, so that replicas differ by one group at most
    return padded.reshape(per_replica, replicas, size).transpose(1, 0, 2).reshape(replicas, -1)


def step_table(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    most: float,
    longest: float,
    *,
    engine: Engine = "vllm",
) -> StepTable:
    """Step time of one replica for up to `most` sequences and `longest` tokens of context."""
    top = 1.0
    while top < most:
        top *= 2
    reach = 1.0
    while reach < longest:
        reach *= 2
    return _table(device, model, layout, top, reach, engine)


@lru_cache(maxsize=512)
def _table(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    top: float,
    reach: float,
    engine: Engine,
) -> StepTable:
    powers = 2.0 ** np.arange(0, np.log2(max(top, 2.0)) + 1)
    between = np.concatenate([powers[:-1] * 1.5, powers[:-1] * 1.25, powers[:-1] * 1.75])
    n = np.unique(np.concatenate([powers, between[between >= 16]]))
    low = min(64.0, reach / 2)
    c = np.concatenate([[1.0], np.geomspace(low, max(reach, 2 * low), CONTEXT_POINTS)])
    per_rank = np.maximum(n / layout.attention_dp, 1.0)[:, None]
    step = decode_step(device, model, layout, per_rank, c[None, :], engine=engine)
    return tabulate(n, c, step)


def kv_capacity(device: Device, model: ModelSpec, layout: RolloutLayout) -> float:
    """Tokens of KV cache that one replica holds (G7), 0 where the weights leave no room.

    The memory ledger's figure, where it is known, should be passed to `generate` instead.
    """
    graphs = device["cuda_graph_bytes"] if layout.cuda_graphs else 0.0
    nccl = device["nccl_bytes"] if layout.replica_gpus > 1 else 0.0
    return kv_cache.kv_capacity(
        model,
        layout,
        total_memory=device.profile.usable_memory.value,
        weights=kv_cache.rollout_weights(model, layout),
        activation_peak=kv_cache.profile_peak(
            model, layout, sampler_bytes_per_logit=device["sampler_bytes_per_logit"]
        ),
        non_torch=device["framework_bytes"] + nccl,
        graphs=graphs,
    ).tokens


def _slots(layout: RolloutLayout, dealt: Floats, prompt: float, capacity: float) -> int:
    """Sequences of one replica that run at a time.

        all, if their peak fits;  else C / (p + E[l^2] / 2 E[l] + half a block)

    In the steady state of a refilled batch a running sequence is on average at E[l^2] / (2 E[l])
    of its response (length-biased residual life). `prompt` leaves out the part shared in a group.
    """
    each = int(dealt.shape[1])
    limit = min(each, layout.max_num_seqs * layout.attention_dp * layout.pp)
    if limit == each and one_wave(dealt, prompt + BLOCK_TOKENS / 2).kv_tokens <= capacity:
        return each
    real = dealt[dealt > 0]
    age = float((real**2).mean() / (2 * real.mean()))
    return max(1, min(limit, int(capacity / (prompt + age + BLOCK_TOKENS / 2))))


def _preemptions(
    layout: RolloutLayout, slots: int, each: int, prompt: float, capacity: float
) -> float:
    """Sequences admitted at the start, when only prompts need room, beyond those that can stay."""
    limit = min(each, layout.max_num_seqs * layout.attention_dp * layout.pp)
    admitted = min(limit, int(capacity / (prompt + BLOCK_TOKENS)))
    return float(max(0, admitted - slots)) if slots < each else 0.0


def _prefill_seconds(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    prompt: float,
    each: int,
    shared: bool,
    engine: Engine,
) -> Cost:
    per_rank = each / layout.attention_dp
    return group_prefill(device, model, layout, per_rank, requests.samples, prompt, shared=shared, engine=engine).cost(device)  # fmt: skip


def _recompute(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    preempted: float,
    context: float,
    engine: Engine,
) -> Cost:
    """Prefill of what preempted sequences had generated (G7: recompute = G6 of the evicted context)."""
    per_rank = preempted / layout.attention_dp
    return prefill(device, model, layout, per_rank, context, engine=engine).cost(device)


def _assemble(
    device: Device,
    layout: RolloutLayout,
    timeline: Timeline,
    table: StepTable,
    lengths: Floats,
    first: Cost,
    prompt: float,
    saved: float,
    slots: int,
    preempted: float,
    capacity: float,
) -> Generation:
    end = timeline.start + timeline.steps
    seconds = table.between(timeline.running, timeline.start, end)
    per_replica = np.bincount(timeline.replica, weights=seconds, minlength=layout.dp)
    slowest = timeline.replica == int(np.argmax(per_replica))
    n, steps, spent = timeline.running[slowest], timeline.steps[slowest], seconds[slowest]
    parts = table.parts(n, timeline.start[slowest], end[slowest])
    tail = n < TAIL_SHARE * n[0]
    busy: dict[Resource, float] = {r: float(parts[r][~tail].sum()) for r in RESOURCES}
    busy["tail"] = float(spent[tail].sum())
    bound = table.between(np.ones(1), np.full(1, prompt), np.full(1, prompt + lengths.max()))
    return Generation(
        cost=first + cost_of(device, busy),
        decode_tokens=float(lengths.sum()),
        prefill_seconds=first.seconds,
        running=float(n[0]),
        waves=float(np.bincount(timeline.replica, weights=timeline.completions).max() / slots),
        preemptions=preempted,
        kv_tokens=float(np.max(timeline.running * (end - saved))),
        kv_capacity=capacity,
        decode_steps=float(steps.sum()),
        mean_step=float(spent.sum() / steps.sum()),
        mean_running=float((n * spent).sum() / spent.sum()),
        lower_bound=float(bound[0]),
        finish=_finish(timeline, seconds, first.seconds),
    )


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
