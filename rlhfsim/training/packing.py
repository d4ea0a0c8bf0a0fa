"""Sequences of a step, and packs: laid end to end up to a number of tokens, as trainers of RL do.

First-fit decreasing on the expected lengths of a batch (Johnson 1973; `modified_first_fit_decreasing`
of NeMo-RL, `rearrange_micro_batches` of verl). Not known here: packs that a framework adds so that
all ranks run equally many, and the padding of packs to their limit in Megatron pipelines (2 to 3 %).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rlhfsim.elementwise import Size, each
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.workload.lengths import Floats, stats
from rlhfsim.specs.workload.workload import Workload

MOST_SEQUENCES = 2048
"""Sequences that are packed one by one; a larger batch has the same mean fill."""


@lru_cache(maxsize=64)
def sequences_of(workload: Workload, drawn: tuple[float, ...] | None = None) -> Sequences:
    """All sequences of one epoch, prompt and response joined; the two lengths are independent.

    With `drawn` response lengths their moments count, not those of the distribution.
    """
    prompt, response = stats(workload.prompt_len), stats(workload.response_len)
    mean_response, square = response.mean, response.mean_square
    longest = workload.response_len.maximum
    if drawn is not None:
        lengths = np.asarray(drawn)
        mean_response, square = float(lengths.mean()), float((lengths**2).mean())
        longest = float(lengths.max())
    mean = prompt.mean + mean_response
    variance = prompt.mean_square - prompt.mean**2 + square - mean_response**2
    return Sequences(
        count=workload.num_sequences,
        mean=mean,
        mean_square=mean**2 + max(0.0, variance),
        maximum=workload.prompt_len.maximum + longest,
        packed=workload.packing,
        together=workload.together,
    )


def pack_len(
    workload: Workload, layout: AnyLayout, drawn: tuple[float, ...] | None = None, *, scoring: bool = False
) -> Size | None:
    """Mean real tokens of a pack of `layout`; None (0 in an array) where micro-batches count sequences.

    Of the `drawn` response lengths, or of the expected ones; padded sequences are as long as the longest. A
    pack holds no more than a data-parallel rank has for one optimizer step, or the longest sequence.
    """
    count = workload.num_sequences // (1 if scoring else workload.mini_batches)

    def tokens_of(pack: float | None, ranks: int) -> float | None:
        if not pack:
            return pack
        if not workload.packing:
            longest = workload.prompt_len.maximum + max(drawn or (workload.response_len.maximum,))
            return max(1.0, pack // longest) * longest
        return min(fill(workload, count, pack, drawn), _rank(workload, count, ranks, drawn))

    return each(tokens_of, layout.pack(scoring=scoring), layout.dp)


@lru_cache(maxsize=1024)
def fill(workload: Workload, count: int, tokens: float, drawn: tuple[float, ...] | None = None) -> float:
    """Mean real tokens of a pack: tokens of `count` sequences over the packs that hold them.

    One above `tokens` is alone in its pack.
    """
    lengths = _lengths(workload, count, drawn)
    room = np.zeros(len(lengths))
    packs = 0
    for length in lengths:
        place = int(np.argmax(room[: packs + 1] >= length)) if packs else packs
        if room[place] < length:
            place, packs = packs, packs + 1
            room[place] = max(tokens, length)
        room[place] -= length
    return float(lengths.sum() / packs)


@lru_cache(maxsize=1024)
def _rank(workload: Workload, count: int, ranks: int, drawn: tuple[float, ...] | None) -> float:
    """Tokens of the fullest of `ranks` balanced ranks with `count` sequences: the mean or the longest."""
    lengths = _lengths(workload, count, drawn)
    return max(float(lengths[0]), float(lengths.mean()) * count / ranks)


def _lengths(workload: Workload, count: int, drawn: tuple[float, ...] | None) -> Floats:
    """The mean prompt plus the first `drawn` responses, or the expected order statistics, longest first."""
    number = max(1, min(count, MOST_SEQUENCES))
    responses = stats(workload.response_len).representative(number) if drawn is None else drawn[:number]
    return np.sort(stats(workload.prompt_len).mean + np.asarray(responses))[::-1]
