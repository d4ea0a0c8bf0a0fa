"""Packs: sequences laid end to end up to a number of tokens, as the trainers of RL frameworks do.

First-fit decreasing on the expected lengths of a batch (Johnson 1973; `modified_first_fit_decreasing`
of NeMo-RL, `rearrange_micro_batches` of verl). Not known here: packs that a framework adds so that
all ranks run equally many, and the padding of packs to their limit in Megatron pipelines (2 to 3 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlhfsim.specs.workload.lengths import AnyLengths, stats

MOST_SEQUENCES = 2048
"""Sequences that are packed one by one; a larger batch has the same mean fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Packs of one training role."""

    train: float
    """Most tokens of a pack in training."""
    forward: float
    """Most tokens of a pack in forwards without gradients (NeMo-RL `logprob_mb_tokens`)."""


@lru_cache(maxsize=1024)
def fill(prompts: AnyLengths, responses: AnyLengths, count: int, tokens: float) -> float:
    """Mean real tokens of a pack: tokens of `count` sequences over the packs that hold them.

    Lengths are the expected order statistics of the responses plus the mean prompt; one above
    `tokens` is cut there.
    """
    number = max(1, min(count, MOST_SEQUENCES))
    lengths = stats(prompts).mean + stats(responses).representative(number)
    lengths = np.sort(np.minimum(lengths, tokens))[::-1]
    room = np.zeros(number)
    packs = 0
    for length in lengths:
        place = int(np.argmax(room[: packs + 1] >= length)) if packs else packs
        if room[place] < length:
            place, packs = packs, packs + 1
            room[place] = tokens
        room[place] -= length
    return float(lengths.sum() / packs)
