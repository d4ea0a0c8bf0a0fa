"""Ways to shorten a rollout or its tail, as factors and times on top of `generate` (G10).

Closed forms for what-if questions; each says what it leaves out.
"""

from __future__ import annotations

import math

import numpy as np

from rlhfsim.rollout.continuous_batching import StepTable
from rlhfsim.rollout.generation import FINISH_POINTS, Generation


def oversampled(generation: Generation, kept: float) -> float:
    """Seconds until the share `kept` of all started sequences has finished; the rest is aborted.

    Starting 1/kept times the needed prompts and aborting the slowest cuts the tail but biases the
    batch towards short responses. Source: physics G10 (over-sampling and abort).
    """
    assert 0 < kept <= 1
    index = max(0, math.ceil(kept * FINISH_POINTS - 1e-9) - 1)
    return generation.finish[index]


def partial_rollout(lengths: np.ndarray, limit: float) -> tuple[float, float]:
    """Share of sequences that finish within `limit` tokens, and share of tokens left for later.

    A response longer than the limit is interrupted and goes on in the next step; its KV cache is
    rebuilt then (price that with `rollout.prefill.prefill`).
    """
    known = np.asarray(lengths, dtype=np.float64)
    left = np.maximum(known - limit, 0.0).sum()
    return float(np.mean(known <= limit)), float(left / known.sum())


def accepted_tokens(acceptance: float, draft_tokens: int) -> float:
    """Expected tokens of one verification with `draft_tokens` proposals.

    (1 - a^(g+1)) / (1 - a), a = acceptance of each proposal, taken as independent

    Source: Leviathan et al., arXiv 2211.17192, equation 1.
    """
    assert 0 <= acceptance <= 1
    assert draft_tokens >= 0
    if acceptance == 1:
        return draft_tokens + 1.0
    return (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)


def speculative_step(
    table: StepTable,
    sequences: float,
    context: float,
    *,
    acceptance: float,
    draft_tokens: int,
    draft_seconds: float,
) -> float:
    """Seconds per generated token of a sequence with speculative decoding.

        (g t_draft + tau(n (g+1), c)) / accepted

    Verification is a step with g+1 rows a sequence; its attention reads the cache once, so a step
    of n (g+1) sequences at the same context is too slow by the extra reads: the context is divided
    by g+1. A gain at small n turns into a loss where the step is bound by compute.
    """
    rows = np.array([sequences * (draft_tokens + 1.0)])
    verify = float(table.tau(rows, np.array([context / (draft_tokens + 1.0)]))[0])
    return (draft_tokens * draft_seconds + verify) / accepted_tokens(acceptance, draft_tokens)


def migrated(generation: Generation, left: float, replicas: int) -> float:
    """Seconds with the last `left` of all sequences moved to one replica, the others released.

    Returns the time at which replicas x (1 - 1/replicas) of the GPUs become free: the finish time
    of the share 1 - left. The stage itself ends as before, at most one prefill of the moved
    contexts later. Source: RLHFuse (arXiv 2409.13221), migration of the tail.
    """
    return oversampled(generation, 1.0 - left) if replicas > 1 else generation.seconds


def with_tools(decode_seconds: float, calls: float, latency: float, concurrency: float) -> float:
    """Seconds of a stage whose sequences wait for `calls` tool calls of `latency` each.

    max(decode, calls latency / concurrency) + latency: calls of different sequences overlap with
    decode as long as other sequences run; the last one is always exposed. `calls` over all
    sequences, `concurrency` calls at a time.
    """
    return max(decode_seconds, calls * latency / concurrency) + (latency if calls else 0.0)
