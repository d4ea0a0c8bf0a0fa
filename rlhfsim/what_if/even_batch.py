"""A batch that every GPU gets an equal share of, where the one that was asked for does not divide so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.what_if.engine import ASIDE, Question
from rlhfsim.what_if.points import points, setting
from rlhfsim.what_if.verdict import aside

SHARES = (1, 8)
"""Sequences of a GPU and update that its share is a multiple of: large micro-batches need more than one."""
MOST_CHANGE = 0.25
"""Share by which the batch may change."""
WORTH = 1.05
"""Samples per second, over those of the batch that was asked for, from which on another is worth a line; that
much less time, where it is the larger one, whose fixed costs weigh less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenBatch:
    """A good plan for a batch close to the one that was asked for, which divides over all GPUs."""

    prompts: int
    step_s: float
    gain: float
    """Samples per second over those of the batch that was asked for."""


def even_batch(request: Request, best: Candidate) -> EvenBatch | None:
    """The batch close to that of the question on which most samples are made in a second.

    None where that divides over all GPUs, or no other is worth it; met by warm starts, not proven.
    """
    prompts = request.workload.prompts
    if request.objective == "memory":
        return None
    found = [
        EvenBatch(prompts=n, step_s=met.seconds, gain=n / prompts * best.seconds / met.seconds)
        for n, met in _met(request)
    ]
    worth = [batch for batch in found if batch.gain >= WORTH * max(1.0, batch.prompts / prompts)]
    return max(worth, key=lambda batch: batch.gain, default=None)


def batches(request: Request) -> list[int]:
    """Prompts closest to those of the question whose samples divide over all GPUs and updates, by `SHARES`.

    None where those of the question do.
    """
    work = request.workload
    whole = request.cluster.gpus * work.mini_batches
    units = [whole * share // gcd(whole * share, work.num_sequences // work.prompts) for share in SHARES]
    if work.prompts % units[0] == 0:
        return []
    close = {round(work.prompts / unit) * unit for unit in units}
    return sorted(n for n in close if n and abs(n - work.prompts) <= MOST_CHANGE * work.prompts)


def _met(request: Request) -> Iterator[tuple[int, Candidate]]:
    """A good plan of each of those batches."""
    axis = (setting("", {"request.workload.prompts": prompts}) for prompts in batches(request))
    for point in points(Question(request=request, scope=ASIDE), axis, aside):
        yield point.question.request.workload.prompts, point.answer
