"""Whether a batch feeds the GPUs that are asked for: the number from which on more of them cost much more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.search.space import pools_of
from rlhfsim.what_if.engine import ASIDE, Question
from rlhfsim.what_if.verdict import aside

HUNGRY = 2.0
"""Sequences of an update and GPU up to which fewer GPUs are tried."""
DEARER = 1.25
"""Money of a sample on twice the GPUs over that on half of them, from which on these are past the knee."""
HALVINGS = 8
"""Most halvings of the GPUs that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerGpus:
    """A good plan on the most GPUs, by halving, on which a sample costs little more than on half of them."""

    gpus: int
    step_s: float


def fewer_gpus(request: Request, best: Candidate) -> FewerGpus | None:
    """The knee: the GPUs beyond which money per sample rises by a quarter; None where that is not below them.

    Asked only where a GPU has hardly a sequence of an update; met by warm starts, not proven.
    """
    work, groups = request.workload, request.cluster.node_groups
    gpus, step_s = request.cluster.gpus, best.seconds
    if work.num_sequences / work.mini_batches > HUNGRY * gpus or len(groups) > 1:
        return None
    knee: FewerGpus | None = None
    for _ in range(HALVINGS):
        half = None if gpus < 2 else _good_on(request, best, gpus // 2)
        if half is None or step_s * gpus <= DEARER * half.step_s * half.gpus:
            break
        knee, gpus, step_s = half, half.gpus, half.step_s
    return knee


def _good_on(request: Request, like: Candidate, gpus: int) -> FewerGpus | None:
    """A good plan whose roles share pools as those of another one do."""
    group = request.cluster.node_group
    cluster = replace(request.cluster, node_groups=(group.sized(gpus, group.gpus_per_node),))
    asked = replace(request, cluster=cluster)
    only, _ = pools_of(like.placement)
    met = aside(Question(request=asked, scope=ASIDE).scoped(only=only))
    return None if met is None else FewerGpus(gpus=gpus, step_s=met.seconds)
