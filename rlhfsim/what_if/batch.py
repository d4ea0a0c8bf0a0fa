"""Whether a batch feeds the GPUs that are asked for: fewer GPUs, or a batch that all share evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from math import gcd

from rlhfsim.frozen import frozen
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.search.space import pools_of
from rlhfsim.what_if.engine import ASIDE, Question
from rlhfsim.what_if.points import on_gpus, points, setting
from rlhfsim.what_if.verdict import aside

HUNGRY = 2.0
"""Sequences of an update and GPU up to which fewer GPUs are tried."""
DEARER = 1.25
"""Money of a sample on twice the GPUs over that on half of them, from which on these are past the knee."""
HALVINGS = 8
"""Most halvings of the GPUs that are tried."""
SHARES = (1, 8)
"""Sequences of a GPU and update that its share is a multiple of: large micro-batches need more than one."""
MOST_CHANGE = 0.25
"""Share by which the batch may change."""
WORTH = 1.05
"""Samples per second, over those of the batch that was asked for, from which on another is worth a line; that
much less time, where it is the larger one, whose fixed costs weigh less."""


@frozen
class FewerGpus:
    """A good plan on the most GPUs, by halving, on which a sample costs little more than on half of them."""

    gpus: int
    step_s: float


@frozen
class EvenBatch:
    """A good plan for a batch close to the one that was asked for, which divides over all GPUs."""

    prompts: int
    step_s: float
    gain: float
    """Samples per second over those of the batch that was asked for."""


def fewer_gpus(request: Request, best: Candidate) -> FewerGpus | None:
    """The knee: the GPUs beyond which money per sample rises by a quarter; None where that is not below them.

    Asked only where a GPU has hardly a sequence of an update, of plans whose roles share pools as those of
    the best one do; met by warm starts, not proven.
    """
    work = request.workload
    gpus, step_s = request.cluster.gpus, best.seconds
    if work.num_sequences / work.mini_batches > HUNGRY * gpus or len(request.cluster.node_groups) > 1:
        return None
    knee: FewerGpus | None = None
    halves = takewhile(bool, (gpus >> times for times in range(1, HALVINGS + 1)))
    alike = Question(request=request, scope=replace(ASIDE, only=pools_of(best.placement)[0]))
    for point in points(alike, on_gpus(request, halves), lambda asked: [aside(asked)]):
        half, [met] = point.question.request.cluster.gpus, point.answer
        if met is None or step_s * gpus <= DEARER * met.seconds * half:
            break
        gpus, step_s = half, met.seconds
        knee = FewerGpus(gpus=gpus, step_s=step_s)
    return knee


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
