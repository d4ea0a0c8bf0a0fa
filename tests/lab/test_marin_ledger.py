"""What a published asynchronous run threw away and waited (docs/published_behaviour.md)."""

from __future__ import annotations

from statistics import fmean

import pytest

from lab.peers.marin import STALE, WAITING, AsCompleted, predicted
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool


def test_waiting_and_stale_tokens_of_the_marin_pilots_come_out_but_for_one() -> None:
    small, large = predicted(2048), predicted(4096)
    assert small.waiting == pytest.approx(WAITING[2048], abs=0.02), "fitted"
    assert small.stale == pytest.approx(STALE[2048], abs=0.05)
    assert large.waiting == pytest.approx(WAITING[4096], abs=0.05)
    assert 0.2 < large.stale < STALE[4096], "a third was thrown away; we predict about a quarter"


def test_the_order_in_which_that_runtime_takes_groups_is_not_what_is_missing() -> None:
    large = predicted(4096, rules=AsCompleted)
    assert large.stale == pytest.approx(predicted(4096).stale, abs=0.02)
    assert large.waiting == pytest.approx(WAITING[4096], abs=0.05)


@pytest.mark.parametrize("rules", [RolloutPool, AsCompleted])
def test_samples_of_a_prompt_that_are_alike_in_length_are_what_is_missing(rules: type[RolloutPool]) -> None:
    """A correlation of 0.2 between the logarithms of their lengths, which is not published, brings all four
    shares within 5 points; none leaves ten points of the tokens thrown away."""
    runs = {cap: [predicted(cap, seed, rules, alike=0.2) for seed in range(4)] for cap in (2048, 4096)}
    for cap, each in runs.items():
        assert fmean(run.waiting for run in each) == pytest.approx(WAITING[cap], abs=0.05)
        assert fmean(run.stale for run in each) == pytest.approx(STALE[cap], abs=0.05)
