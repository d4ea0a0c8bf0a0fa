"""Rollouts in lockstep with an environment: its workers, and two half batches that take turns.

Sequences that go on by themselves: turns.py. Here (`lockstep`, or two buffers) a response has T equal turns;
after each the environment answers all n sequences of the batch on w CPU workers, which takes
a = ceil(n / w) s with s seconds a sequence. One buffer waits for it:

    T_rollout = g + T a                         g = generation without an environment

Two buffers (Sample Factory, arXiv 2006.11751, double-buffered sampling) alternate on the GPUs: one
generates a turn while the environment answers the other. Turn j of buffer b

    generated_b(j) = max( generated of the turn before on the GPUs, answered_b(j-1) ) + g_b / T
    answered_b(j)  = max( generated_b(j), workers free ) + a_b

Workers are free at once where they suffice for both halves, else when the other half is answered.
With equal halves and g' = g_b / T the rollout takes

    (T - 1) max(2 g', g' + a) + 2 g' + a        enough workers for both
    2 T max(g', a) + min(g', a)                 workers shared

Not known here: turns of unequal length, and responses with fewer turns than the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, part, total
from rlhfsim.rollout.generation import FINISH_POINTS, Generation
from rlhfsim.rollout.turns import RESTS_ON
from rlhfsim.specs.workload.workload import Environment, Workload

__all__ = ["RESTS_ON"]


@frozen
class Turns:
    """A rollout in turns: one buffer, or two that alternate."""

    buffers: tuple[Cost, ...]
    """Generation of each buffer, all turns together."""
    sequences: tuple[int, ...]
    """Sequences of each buffer."""
    environment: Environment

    @property
    def count(self) -> int:
        """Turns of a response."""
        return self.environment.turns

    @property
    def side_by_side(self) -> bool:
        """Whether the workers suffice for all buffers at a time."""
        return sum(self.sequences) <= self.environment.workers

    def answer(self, buffer: int, turn: int) -> float:
        """Seconds until the environment has answered every sequence of a buffer; sandboxes are made first."""
        workers, each = self.environment.workers, self.environment.seconds_per_turn
        mine = self.sequences[buffer]
        cold = self.environment.made(sum(self.sequences)) * mine / sum(self.sequences) if not turn else 0.0
        return math.ceil(mine / workers) * each + math.ceil(cold / workers) * self.environment.cold_start

    def ends(self) -> tuple[float, ...]:
        """Seconds until each buffer has its last answer, from the start of generation."""
        turn = [cost.seconds / self.count for cost in self.buffers]
        answered = [0.0] * len(turn)
        generated = busy = 0.0
        for number in range(self.count):
            for b, seconds in enumerate(turn):
                generated = max(generated, answered[b]) + seconds
                begin = generated if self.side_by_side else max(generated, busy)
                answered[b] = busy = begin + self.answer(b, number)
        return tuple(answered)


def halves(prompts: int, double_buffered: bool) -> tuple[int, ...]:
    """Prompts of each buffer; a single prompt cannot be split."""
    if not double_buffered or prompts < 2:
        return (prompts,)
    return (prompts + 1) // 2, prompts // 2


def with_environment(generation: Generation, turns: Turns) -> Generation:
    """The rollout stage with the time that the GPUs wait for the environment as a part on the host.

    Samples are finished when their buffer has its last answer.
    """
    ends = turns.ends()
    generated = total(turns.buffers)
    waits = max(0.0, max(ends) - generated.seconds)
    return replace(
        generation,
        cost=generated + Cost(parts=(part("environment", waits, RESTS_ON),)),
        finish=_finish(ends, turns.sequences),
    )


def _finish(ends: Sequence[float], sequences: Sequence[int]) -> tuple[float, ...]:
    """Seconds after which 1/64, 2/64, ... of all sequences have finished."""
    order = sorted(range(len(ends)), key=lambda b: ends[b])
    points: list[float] = []
    done = 0.0
    for b in order:
        done += sequences[b] / sum(sequences)
        until = math.floor(done * FINISH_POINTS + 1e-9)
        points += [ends[b]] * (until - len(points))
    return tuple(points)


def answered_at_least(cost: Cost, workload: Workload) -> Cost:
    """Generation per batch of an engine that never drains: no faster than the workers answer.

    T >= n (T s + c) / w          n sequences a batch, c seconds in which a sandbox is made
    """
    environment = workload.environment
    if environment is None:
        return cost
    work = workload.num_sequences * (environment.seconds_each + environment.cold_start)
    answered = Cost(parts=(part("environment", work / environment.workers, RESTS_ON),))
    return answered if answered.seconds > cost.seconds else cost
