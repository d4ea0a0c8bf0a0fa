"""Which sequence runs when, in decode steps: dealing to replicas, slots, waves and preemption.

Nothing here depends on the GPU: steps are the clock. `rollout.generation` turns steps into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.rollout.continuous_batching import Timeline, continuous_timeline, one_wave, start_steps
from rlhfsim.rollout.engine_step import Floats
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import AnyLengths, stats
from rlhfsim.specs.workload.workload import Environment

TRIES = 4
"""Corrections of the number of slots until the peak of the schedule fits."""


@frozen
class Requests:
    """All sequences of one step."""

    prompts: int
    samples: int
    """Responses per prompt (G)."""
    prompt_lengths: AnyLengths
    response_lengths: AnyLengths
    wanted: int | None = None
    """Prompts whose samples must finish; the others are aborted then. None: all."""
    seed: int = 0
    """Seed of the deal of prompts to replicas."""
    adapters: bool = False
    """LoRA adapters are applied in addition to the base weights, as the engine does not merge them."""
    environment: Environment | None = None
    """Sequences wait for it between their turns, each by itself."""

    answered: Environment | None = None
    """The same, where its answers have tokens or its context is not all cached; in lockstep too."""
    prefills: bool = True
    """False: other replicas prefill."""

    @property
    def sequences(self) -> int:
        """prompts x samples."""
        return self.prompts * self.samples


def most_running(layout: RolloutLayout, requests: Requests) -> int:
    """Sequences that run at a time on a replica: the engine's limit, and the sandboxes that a fleet holds."""
    engine, environment = layout.max_num_seqs * layout.attention_dp, requests.environment
    if environment is None or environment.sandboxes is None:
        return engine
    return max(1, min(engine, environment.sandboxes // layout.dp))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceSchedule:
    """The decode of all replicas in steps."""

    timeline: Timeline
    each: int
    """Sequences of the replica with the most."""
    slots: int
    """Sequences that run at a time, at most."""
    prompt: float
    """Mean prompt, tokens."""
    shared: float
    """Part of a prompt that costs a sequence no KV cache, because its group holds it once."""
    tokens: float
    """Response tokens of all replicas."""
    longest: float
    """Longest response, tokens."""
    preempted: float
    """Sequences of a replica that lose their KV cache once."""
    recomputed: float
    """Tokens of context that they prefill again."""
    group_ends: Floats | None = None
    """(replicas, groups) steps until the last sample of a prompt finishes, 0 pads; None: all are wanted."""
    group_tokens: Floats | None = None
    """(replicas, groups) response tokens."""
    wanted: int | None = None
    """Groups that must finish; None: all."""

    @property
    def kv_tokens(self) -> float:
        """Most context that one replica holds at a time, tokens."""
        return float(
            np.max(self.timeline.running * (self.timeline.start + self.timeline.steps - self.shared))
        )


@lru_cache(maxsize=256)
def expected_lengths(requests: Requests) -> Floats:
    """Sorted response lengths: expected order statistics, the largest at E[max] of all draws."""
    known = stats(requests.response_lengths)
    drawn = np.sort(known.representative(requests.sequences))
    if requests.sequences > 1:
        drawn[-1] = max(drawn[-1], known.expected_max(requests.sequences))
    whole: Floats = np.maximum(np.rint(drawn), 1.0)
    return whole


def known_lengths(requests: Requests, drawn: Sequence[float] | Floats | None) -> Floats:
    """Given lengths as whole tokens, or the expected order statistics."""
    if drawn is None:
        return expected_lengths(requests)
    whole: Floats = np.maximum(np.rint(np.asarray(drawn, dtype=np.float64)), 1.0)
    return whole


@lru_cache(maxsize=1024)
def expected_schedule(requests: Requests, replicas: int, most: int, capacity: float) -> SequenceSchedule:
    """The schedule of the expected lengths; cached, because many layouts share it."""
    return schedule(expected_lengths(requests), requests, replicas, most, capacity)


def schedule(
    lengths: Floats, requests: Requests, replicas: int, most: int, capacity: float
) -> SequenceSchedule:
    """Sequences dealt to `replicas`, at most `most` at a time and `capacity` tokens of KV cache each.

    Where all fit they start together (G8), else finished ones are replaced (G9).
    """
    prompt = stats(requests.prompt_lengths).mean
    common = prompt - (requests.answered.answers_total if requests.answered else 0.0)
    saved = common * (1.0 - 1.0 / requests.samples)
    dealt = deal(lengths, replicas, requests.samples, requests.seed)
    timeline, slots = _fitted(dealt, prompt, saved, most, capacity)
    preempted, recomputed = _preemption(int(dealt.shape[1]), slots, most, prompt - saved, capacity)
    schedule = SequenceSchedule(
        timeline=timeline,
        each=int(dealt.shape[1]),
        slots=slots,
        prompt=prompt,
        shared=saved,
        tokens=float(lengths.sum()),
        longest=float(lengths.max()),
        preempted=preempted,
        recomputed=recomputed,
    )
    return schedule if requests.wanted is None else _with_groups(schedule, dealt, requests)


def _with_groups(schedule: SequenceSchedule, dealt: Floats, requests: Requests) -> SequenceSchedule:
    """With the end and the tokens of each prompt's samples; those that are spread count alone."""
    assert requests.wanted is not None
    slots, size = schedule.slots, requests.samples if requests.prompts >= len(dealt) else 1
    ends = dealt if slots >= dealt.shape[1] else start_steps(dealt, slots) + dealt
    shape = len(dealt), -1, size
    return replace(
        schedule,
        group_ends=np.where(dealt > 0, ends, 0.0).reshape(shape).max(axis=2),
        group_tokens=dealt.reshape(shape).sum(axis=2),
        wanted=requests.wanted * requests.samples // size,
    )


@lru_cache(maxsize=64)
def first_to_finish(requests: Requests, drawn: tuple[float, ...] | None) -> tuple[float, ...]:
    """Response lengths of the wanted groups, those with the shortest longest response, tokens."""
    lengths = expected_lengths(requests) if drawn is None else np.asarray(drawn)
    groups = np.random.default_rng(requests.seed).permutation(lengths).reshape(-1, requests.samples)
    order = np.argsort(groups.max(axis=1), kind="stable")
    return tuple(groups[order[: requests.wanted]].ravel().tolist())


def deal(lengths: Floats, replicas: int, samples: int, seed: int) -> Floats:
    """(replicas, n) lengths: prompts with their samples dealt at random, as evenly as they go; 0 pads.

    With fewer prompts than replicas, samples of one prompt are spread.
    """
    shuffled = np.random.default_rng(seed).permutation(lengths)
    size = samples if len(lengths) % samples == 0 and len(lengths) // samples >= replicas else 1
    groups = shuffled.reshape(-1, size)
    per_replica = -(-len(groups) // replicas)
    padded = np.zeros((per_replica * replicas, size))
    padded[: len(groups)] = groups
    return padded.reshape(per_replica, replicas, size).transpose(1, 0, 2).reshape(replicas, -1)


def _fitted(dealt: Floats, prompt: float, saved: float, most: int, capacity: float) -> tuple[Timeline, int]:
    """The timeline whose peak fits the cache, and its slots.

        all, if they fit;  else C / (p + E[l^2] / 2 E[l] + half a block), lowered until the peak fits

    In the steady state of a refilled batch a running sequence is on average at E[l^2] / (2 E[l])
    of its response (length-biased age); sequences that start together peak above that.
    """
    each, held = int(dealt.shape[1]), prompt - saved + VLLM.block_tokens / 2
    if each <= most:
        whole = one_wave(dealt, prompt)
        if _peak(whole, saved) <= capacity:
            return whole, each
    real = dealt[dealt > 0]
    age = float(np.mean(real**2) / (2 * np.mean(real)))
    slots = max(1, min(each, most, int(capacity / (held + age))))
    timeline = continuous_timeline(dealt, slots, prompt)
    tries = 1
    while (peak := _peak(timeline, saved)) > capacity and slots > 1 and tries < TRIES:
        worst = dealt[_fullest(timeline, saved)][None]  # one replica decides; all are checked again
        while peak > capacity and slots > 1 and tries < TRIES:
            slots, tries = max(1, min(slots - 1, int(slots * capacity / peak))), tries + 1
            peak = _peak(continuous_timeline(worst, slots, prompt), saved)
        timeline = continuous_timeline(dealt, slots, prompt)
    return timeline, slots


def _fullest(timeline: Timeline, saved: float) -> int:
    """The replica with the highest peak."""
    ends = timeline.start + timeline.steps - saved + VLLM.block_tokens / 2
    return int(timeline.replica[np.argmax(timeline.running * ends)])


def _peak(timeline: Timeline, saved: float) -> float:
    ends = timeline.start + timeline.steps - saved + VLLM.block_tokens / 2
    return float(np.max(timeline.running * ends))


def _preemption(each: int, slots: int, most: int, prompt: float, capacity: float) -> tuple[float, float]:
    """Sequences evicted after the start, and the tokens that they prefill again.

        evicted = n_0 - n_1;   tokens = sum over n from n_1 to n_0 of C / n = C ln(n_0 / n_1)

    The engine admits as long as prompts fit (n_0) and evicts the latest when contexts outgrow the
    cache, each at a context of C / n, until n_1 = slots remain. Source: vLLM V1 scheduler,
    preemption by recomputation. Later starts are taken to fit.
    """
    admitted = min(each, most, int(capacity / (prompt + VLLM.block_tokens)))
    if slots >= each or admitted <= slots:
        return 0.0, 0.0
    return float(admitted - slots), capacity * math.log(admitted / slots)
