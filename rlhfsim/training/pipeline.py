"""Pipeline schedules: how long p stages take for m micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from rlhfsim.elementwise import Size, each, most, where


def makespan(stages: Sequence[Size], micro_batches: Size, chunks: Size = 1) -> Size:
    """Seconds of a (interleaved) 1F1B iteration with equal micro-batches on unequal stages.

        T = sum_i t_i / v + (m - 1/v) max_i t_i  =  (m + (p-1)/v) t  for equal stages

    `stages` holds forward plus backward of one micro-batch through all v chunks of each stage: the
    first chunk passes every stage once, then the slowest stage never waits. Source: Narayanan et
    al., arXiv 2104.04473, sections 2.2.1 and 2.2.2. Sends between stages are not in it.
    """
    slowest = most(*stages)
    ramp = (sum(stages) - slowest) / chunks
    return ramp + micro_batches * slowest


class Sends(NamedTuple):
    """Sends between stages that the slowest stage waits for in one iteration, by link."""

    near: float
    far: float


@lru_cache(maxsize=4096)
def hops(pp: int, stride: int, domain: int) -> tuple[bool, ...]:
    """Which of the p-1 hops between stages leave a domain of `domain` GPUs.

    Stage i holds GPUs i stride to (i+1) stride - 1; a hop is as slow as its slowest pair of ranks.
    """
    return tuple(
        stride >= domain or ((i + 2) * stride - 1) // domain > i * stride // domain for i in range(pp - 1)
    )


def sends(crossing: tuple[bool, ...], rounds: int, *, back: bool = True) -> Sends:
    """How many sends the slowest stage waits for in `rounds` micro-batches (times chunks).

    In every round a stage exchanges with the stage before and the one after it, activations ahead and
    gradients back; the first round passes all hops. `back=False`: a forward, one send a round.
    """
    if not crossing:
        return Sends(0.0, 0.0)
    if not back:
        far = float(any(crossing))
        return Sends(
            rounds * (1 - far) + crossing.count(False) - (1 - far), rounds * far + sum(crossing) - far
        )
    pairs = zip((crossing[0], *crossing), (*crossing, crossing[-1]), strict=True)
    far = max(a + b for a, b in pairs)
    ramp_far = max(0, 2 * sum(crossing) - far)
    ramp_near = max(0, 2 * (len(crossing) - sum(crossing)) - (2 - far))
    return Sends(rounds * (2 - far) + ramp_near, rounds * far + ramp_far)


class Stages(NamedTuple):
    """How many layers the stages hold."""

    first: Size
    middle: Size
    last: Size
    number: Size
    """How many stages there are."""

    def times(self, layer: Size, embedding: Size, head: Size) -> list[Size]:
        """Seconds of each stage: its layers, the embedding on the first, the head on the last; then 0."""
        begin = self.first * layer + embedding
        inner, end, behind = self.middle * layer, self.last * layer + head, self.number - 1
        return [
            where(behind == 0, begin + head, begin),
            *(
                where(behind > i, inner, where(behind == i, end, 0.0))
                for i in range(1, int(np.max(self.number)))
            ),
        ]


def split(num_layers: int, pp: Size, vp: Size = 1) -> Stages:
    """Layers on the first, a middle and the last stage.

    Where L divides by p v every chunk is equal. Elsewhere embedding and head each count as a layer,
    as Megatron lays out 61 or 126 layers: L + 2 units in chunks of ceil((L+2)/(p v)).
    """
    return Stages(*each(partial(_split, num_layers), pp, vp))


@lru_cache(maxsize=4096)
def _split(num_layers: int, pp: int, vp: int) -> Stages:
    if pp == 1:
        return Stages(num_layers, 0, 0, 1)
    mean = num_layers / pp
    if num_layers % (pp * vp) == 0:
        return Stages(mean, mean, mean, pp)
    largest = -(-(num_layers + 2) // (pp * vp)) * vp
    ends = (num_layers - largest * (pp - 2)) / 2
    if 0 < ends <= largest:
        return Stages(ends, largest, ends, pp)
    return Stages(mean, mean, mean, pp)
