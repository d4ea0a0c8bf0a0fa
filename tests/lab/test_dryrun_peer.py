"""Our asynchronous schedules beside what DryRun-RL answered (docs/asynchronous_peer.md)."""

from __future__ import annotations

import pytest

from lab.peers.dryrun import CLOSE, PAGE, POLICIES, facts, ours, table
from lab.peers.workloads import WORKLOADS, Workload

DROPS = 0.03
"""Where the peer follows ROLL, which throws late samples away."""
ORDER = {"uniform-2", "lognormal-1", "on-policy", "few-slots"}
"""The peer hands weights over as their training step begins."""
NO_DRAIN = {"drained"}
"""Without partial rollouts the peer lets samples go on under new weights."""


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_our_steps_are_those_of_the_peer_in_order(workload: Workload) -> None:
    known = [fact for fact in facts() if fact.workload == workload.name]
    assert {fact.policy for fact in known} == set(POLICIES)
    for fact in known:
        gap = ours(workload, fact.policy) / fact.in_order - 1
        assert abs(gap) <= (DROPS if fact.policy == "roll" else CLOSE), fact


def test_what_differs_from_the_peer_as_it_is_has_a_reason_on_the_page() -> None:
    named = {w.name: w for w in WORKLOADS}
    far = {f.workload for f in facts() if abs(ours(named[f.workload], f.policy) / f.as_it_is - 1) > CLOSE}
    assert far == ORDER | NO_DRAIN


def test_the_page_shows_the_facts() -> None:
    assert table(facts()) in PAGE.read_text()
    assert {fact.commit in PAGE.read_text() for fact in facts()} == {True}
