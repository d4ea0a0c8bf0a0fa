"""What is made of a sample's reward before groups are compared, and which samples are learned from.

    shaped = clip( reward_scale r ) - length_penalty R / L - overlong_penalty max(0, R - (L - b)) / b

Legend: R response tokens, L most tokens of a response, b the last `overlong_tokens` of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor.samples import Sample
from executor.settings import Algorithm
from rlhfsim.errors import RlhfsimError


def shaped(sample: Sample, settings: Algorithm, max_tokens: int | None) -> float:
    """The reward that is learned from. Source of the last term: DAPO, arXiv 2503.14476, equation 13.

    Raises:
        RlhfsimError: there is no finite reward.
    """
    if sample.reward is None or not math.isfinite(sample.reward):
        raise RlhfsimError(
            "reward-not-finite",
            f"the reward of sample {sample.id} is {sample.reward}",
            help="a reward function must return a finite number for every response",
        )
    reward, limit = settings.reward_scale * sample.reward, settings.reward_clip
    reward = reward if limit is None else float(np.clip(reward, -limit, limit))
    return reward - length_penalty(sample.num_tokens, settings, max_tokens)


def length_penalty(tokens: int, settings: Algorithm, max_tokens: int | None) -> float:
    """What a response of so many tokens costs."""
    if not (settings.length_penalty or settings.overlong_tokens):
        return 0.0
    assert max_tokens is not None, "penalties of length need the longest response"
    penalty = settings.length_penalty * tokens / max_tokens
    if (last := settings.overlong_tokens) is not None:
        penalty += settings.overlong_penalty * max(0, tokens - (max_tokens - last)) / last
    return penalty


def filtered(samples: Sequence[Sample], settings: Algorithm) -> list[Sample]:
    """The samples; with `overlong_filter` nothing is learned from those that were cut.

    Source: DAPO, arXiv 2503.14476, section 3.4.
    """
    if not settings.overlong_filter:
        return list(samples)
    return [
        replace(s, mask=np.zeros(s.num_tokens, np.float32)) if s.finish == "length" else s for s in samples
    ]
