"""Pipeline schedules: how long p stages take for m micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


def makespan(stages: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Seconds of a (interleaved) 1F1B iteration with equal micro-batches on unequal stages.

        T = sum_i t_i / v + (m - 1/v) max_i t_i  =  (m + (p-1)/v) t  for equal stages

    `stages` holds forward plus backward of one micro-batch through all v chunks of each stage: the
    first chunk passes every stage once, then the slowest stage never waits. Source: Narayanan et
    al., arXiv 2104.04473, sections 2.2.1 and 2.2.2. Sends between stages are not in it.
    """
    slowest = max(stages)
    ramp = (sum(stages) - slowest) / chunks
    return ramp + micro_batches * slowest


def one_f_one_b(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> float:
    """Seconds of 1F1B with times that differ by stage and micro-batch, `[stage][micro-batch]`.

    Max-plus recurrence: stage i runs min(p-i, m) - 1 forwards ahead, then alternates; a forward
    waits for the stage before, a backward for the stage after, and both for the GPU (T3).
    """
    stages, count = len(forward), len(forward[0])
    plans = [_order(stage, stages, count) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    position, free = [0] * stages, [0.0] * stages
    while any(position[i] < len(plans[i]) for i in range(stages)):
        for i in range(stages):
            while position[i] < len(plans[i]):
                kind, batch = plans[i][position[i]]
                ready = _ready(done, kind, i, batch, stages)
                if ready is None:
                    break
                seconds = (forward if kind == "F" else backward)[i][batch]
                free[i] = max(free[i], ready) + seconds
                done[kind, i, batch] = free[i]
                position[i] += 1
    return max(free)


def _ready(
    done: dict[tuple[str, int, int], float], kind: str, stage: int, batch: int, stages: int
) -> float | None:
    """When the input of a task is there; None while its producer has not been placed."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, batch))
    if stage == stages - 1:
        return done.get(("F", stage, batch))
    return done.get(("B", stage + 1, batch))


def _order(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    ahead = min(stages - stage - 1, count)
    tasks = [("F", i) for i in range(ahead)]
    for i in range(count - ahead):
        tasks += [("F", ahead + i), ("B", i)]
    return tasks + [("B", i) for i in range(count - ahead, count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How many layers the stages hold."""

    first: float
    middle: float
    last: float
    count: int

    def times(self, layer: float, embedding: float, head: float) -> list[float]:
        """Seconds of each stage: its layers, the embedding on the first, the head on the last."""
        if self.count == 1:
            return [self.first * layer + embedding + head]
        inner = [self.middle * layer] * (self.count - 2)
        return [self.first * layer + embedding, *inner, self.last * layer + head]


@lru_cache(maxsize=4096)
def split(num_layers: int, pp: int, vp: int = 1) -> Stages:
    """Layers on the first, a middle and the last stage.

    Where L divides by p v every chunk is equal. Elsewhere embedding and head each count as a layer,
    as Megatron lays out 61 or 126 layers: L + 2 units in chunks of ceil((L+2)/(p v)).
    """
    if pp == 1:
        return Stages(first=num_layers, middle=0, last=0, count=1)
    if num_layers % (pp * vp) == 0:
        each = num_layers / pp
        return Stages(first=each, middle=each, last=each, count=pp)
    most = -(-(num_layers + 2) // (pp * vp)) * vp
    ends = (num_layers - most * (pp - 2)) / 2
    if 0 < ends <= most:
        return Stages(first=ends, middle=most, last=ends, count=pp)
    mean = num_layers / pp
    return Stages(first=mean, middle=mean, last=mean, count=pp)
