"""Whether a batch feeds the GPUs that are asked for: what half of them would take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.what_if.engine import Question, good
from rlhfsim.what_if.remedies import sized
from rlhfsim.what_if.verdict import refusal

HUNGRY = 2.0
"""Sequences of an update and GPU up to which half the GPUs are tried."""
WORTH = 0.75
"""Share of the money from which on half the GPUs are not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerGpus:
    """A good plan on half the GPUs."""

    gpus: int
    step_s: float


def fewer_gpus(request: Request, best: Candidate) -> FewerGpus | None:
    """Half the GPUs where they take less than 1.5 times as long, and so cost less than three quarters.

    Asked only where a GPU has hardly a sequence of an update; met by a warm start, not proven.
    """
    work, groups = request.workload, request.cluster.node_groups
    gpus = request.cluster.gpus
    if work.num_sequences / work.mini_batches > HUNGRY * gpus or len(groups) > 1 or gpus < 2:
        return None
    half = sized(groups[0], gpus // 2, groups[0].gpus_per_node)
    asked = replace(request, cluster=replace(request.cluster, node_groups=(half,)))
    met = None if refusal(asked) else good(Question(request=asked, rivals=False))
    if met is None or met.seconds * half.gpus > WORTH * best.seconds * gpus:
        return None
    return FewerGpus(gpus=half.gpus, step_s=met.seconds)
