"""Packs of sequences: how full they are and what they cost."""

from __future__ import annotations

from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.training.packing import fill


def test_sequences_of_one_length_leave_the_rest_of_a_pack_empty() -> None:
    # 4 sequences of 1000 in 4096, the fifth does not fit
    assert fill(Fixed(value=100), Fixed(value=900), 400, 4096) == 4000


def test_sequences_longer_than_half_a_pack_stand_alone() -> None:
    assert fill(Fixed(value=100), Fixed(value=2100), 64, 4096) == 2200


def test_one_sequence_above_the_limit_is_cut() -> None:
    assert fill(Fixed(value=1000), Fixed(value=4000), 1, 4096) == 4096


def test_unequal_lengths_fill_packs_better_than_equal_ones() -> None:
    uneven = fill(Fixed(value=100), LogNormal(mean=2500, max=3946), 512, 4096)
    even = fill(Fixed(value=100), Fixed(value=2500), 512, 4096)
    assert even < uneven <= 4096
