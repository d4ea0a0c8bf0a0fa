"""What a published asynchronous run threw away and waited (docs/published_behaviour.md)."""

from __future__ import annotations

import pytest

from lab.peers.marin import STALE, WAITING, AsCompleted, predicted


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
