"""Generation batches of one step, one after the other: dynamic sampling.

    T = sum over M batches of T_batch        E[T] = E[M] T_batch

A batch waits for its longest response, then rules say which groups are kept; whatever is missing is generated
by a batch of full size, and groups beyond those that the step trains on are thrown away. Samples are
handed on when the step is full. Not known here: that hard and easy prompts (whose groups are thrown
away) have responses of another length, and sleep and wake between batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhfsim.kernels.cost import total
from rlhfsim.rollout.generation import FINISH_POINTS, Generation


def one_after_the_other(batches: Sequence[Generation], count: float, trained_tokens: float) -> Generation:
    """The rollout stage of `count` generation batches, on average like those given.

    `trained_tokens`: response tokens of the step that are trained on.
    """
    times, largest = count / len(batches), max(batches, key=lambda b: b.kv_tokens)
    cost = total(b.cost for b in batches).scaled(times)
    tokens = times * sum(b.decode_tokens for b in batches)
    steps = times * sum(b.decode_steps for b in batches)
    return replace(
        largest,
        cost=cost,
        decode_tokens=tokens,
        discarded_tokens=max(0.0, tokens - trained_tokens),
        prefill_seconds=times * sum(b.prefill_seconds for b in batches),
        decode_steps=steps,
        mean_step=times * sum(b.decode_steps * b.mean_step for b in batches) / steps,
        lower_bound=times * sum(b.lower_bound for b in batches),
        finish=(cost.seconds,) * FINISH_POINTS,
    )
