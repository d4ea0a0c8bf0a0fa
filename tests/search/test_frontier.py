"""Roles that are priced only where a bound leaves room: the same plans as when all are priced first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search import branch_and_bound, branches
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.branches import Queue
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design

SEEDS = range(1400, 1404)


def test_pricing_roles_as_bounds_ask_finds_the_same_optimum_and_counts_every_plan(
    questions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0
    for seed in SEEDS:
        if (case := questions.drawn(seed, most=10**5)) is None:
            continue
        whole = Search(case.request, case.models).run()
        with monkeypatch.context() as patched:
            patched.setattr(branch_and_bound, "SMALL", 0)
            search = Search(case.request, case.models)
            asked = search.run()
        assert (asked.best is None) == (whole.best is None), seed
        if asked.best is not None:
            found, best = (questions.value(case, result.best) for result in (asked, whole))
            assert found == pytest.approx(best, rel=1e-9), seed
        proof = asked.certificate
        assert (proof.space, proof.unexplored, proof.gap) == (case.plans, 0, 0.0)
        lines = proof.infeasible, proof.dominated, proof.bounded, proof.simulated
        assert min(lines) >= 0
        assert sum(lines) == proof.space, seed
        assert proof.infeasible <= whole.certificate.infeasible + whole.certificate.bounded
        left += not all(branch.priced.all() for branch in search._branches())
    assert left > 0  # searches that never needed the price of some role


@pytest.mark.parametrize("together", [3, 10**6])
def test_skeletons_come_in_the_order_of_the_bounds_that_their_prices_give(
    questions: Any, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """However many of them are put in order at a time."""
    case = next(c for seed in SEEDS if (c := questions.drawn(seed, most=10**5)) is not None and c.plans > 500)
    whole = Search(case.request, case.models)
    sizes = {
        (branch.partition, tuple(row)): bound
        for branch in whole._branches()
        for row, bound in zip(branch.sizes.tolist(), branch.bound.tolist(), strict=True)
    }
    monkeypatch.setattr(branch_and_bound, "SMALL", 0)
    monkeypatch.setattr(branches, "SORTED", together)
    search = Search(case.request, case.models)
    entries = list(Queue(search.frontier, search._branches()).up_to(lambda: 1e9))
    assert [e.bound for e in entries] == sorted(x for x in sizes.values() if x < 1e9)
    assert all(e.bound == sizes[e.branch.partition, tuple(e.branch.sizes[e.row].tolist())] for e in entries)


def test_a_search_without_skeletons_has_no_plan_and_no_crash() -> None:
    work = Workload(model="qwen2.5-0.5b", algorithm="grpo")
    asked = Request(cluster=parse_cluster(4, "h100"), workload=work, framework="verl", backend="megatron")
    search = Search(replace(asked, architecture="naive"), models_of(work))
    assert list(Queue(search.frontier, []).up_to(lambda: 1e9)) == []
    assert design(asked).chosen is not None  # some of its rivals have no skeleton
