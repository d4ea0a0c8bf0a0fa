"""Packs of sequences: how full they are and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal
from rlhfsim.specs.workload.micro_batch import BatchLengths, batch_lengths
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.training.packing import fill, pack_len


def workload(prompt: float, response: AnyLengths, count: int = 512) -> Workload:
    return Workload(prompts=count, prompt_len=Fixed(value=prompt), response_len=response)


def test_sequences_of_one_length_leave_the_rest_of_a_pack_empty() -> None:
    # 4 sequences of 1000 in 4096, the fifth does not fit
    assert fill(workload(100, Fixed(value=900)), 400, 4096) == 4000


def test_sequences_longer_than_half_a_pack_stand_alone() -> None:
    assert fill(workload(100, Fixed(value=2100)), 64, 4096) == 2200


def test_a_sequence_above_the_limit_stands_alone() -> None:
    assert fill(workload(1000, Fixed(value=4000)), 4, 4096) == 5000


def test_drawn_lengths_fill_their_own_packs() -> None:
    # 3000 | 2000 + 1000 + 500
    assert fill(workload(500, Fixed(value=1)), 4, 4096, (2500.0, 1500.0, 500.0, 0.0)) == 3250


def test_unequal_lengths_fill_packs_better_than_equal_ones() -> None:
    uneven = fill(workload(100, LogNormal(mean=2500, max=3946)), 512, 4096)
    even = fill(workload(100, Fixed(value=2500)), 512, 4096)
    assert even < uneven <= 4096


def test_a_layout_counts_sequences_or_tokens() -> None:
    work = workload(100, Fixed(value=900))
    assert pack_len(work, Layout(micro_batch=4)) is None
    assert pack_len(work, Layout(pack_tokens=2048, cp=2)) == 4000
    assert pack_len(work, Layout(pack_tokens=2048, score_pack_tokens=1024), scoring=True) == 1000
    for wrong in ({"pack_tokens": 4096, "micro_batch": 2}, {"score_pack_tokens": 4096}):
        with pytest.raises(RlhfsimError, match="one pack of pack_tokens"):
            Layout(**wrong)


def test_memory_is_sized_for_the_pack_or_the_longest_sequence() -> None:
    batch = batch_lengths(workload(100, LogNormal(mean=900, max=3900)))
    assert batch.tokens(Layout(pack_tokens=8192, cp=2)) == 16384
    assert batch.tokens(Layout(pack_tokens=2000)) == 4000
    assert batch.tokens(Layout(pack_tokens=8192, score_pack_tokens=16384), scoring=True) == 16384
    assert batch.tokens(Layout(pack_tokens=10_000_000)) == batch.sequences * batch.mean_tokens
    assert batch.micro_batches(Layout(dp=4, micro_batch=4)) == 32


def test_a_pack_holds_no_more_than_a_rank_has_for_one_optimizer_step() -> None:
    lengths = BatchLengths(max_tokens=600, mean_tokens=350, deviation=0, sequences=1280, scored=1280)
    wide = Layout(dp=32, zero=3, pack_tokens=24_000)
    assert lengths.tokens(wide) == 40 * 350
    assert lengths.tokens(wide, scoring=True) == 24_000
    assert lengths.tokens(Layout(dp=8, zero=3, pack_tokens=24_000)) == 24_000


def test_a_pack_holds_no_more_than_a_rank_has() -> None:
    # 512 sequences of 1650 tokens: 105,600 a rank on 8 ranks, although one pack would hold 245,760
    even = Workload(prompts=32, samples=16, prompt_len=Fixed(value=150), response_len=Fixed(value=1500))
    wide = Layout(cp=4, dp=8, zero=3, pack_tokens=61440)
    assert pack_len(even, wide) == 512 * 1650 / 8
    assert pack_len(even, replace(wide, dp=32)) == 512 * 1650 / 32
    assert pack_len(even, replace(wide, dp=1024)) == 1650  # a sequence is never cut
