"""Searches that end after their share of work: the same on every machine, with a gap, unless a time is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search import branch_and_bound, clock
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.options import PriceKey
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.space import Skeleton
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload


def test_work_ends_a_search_with_a_gap_and_every_plan_counted_but_not_one_with_a_time_limit(
    questions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_and_bound, "WORK", 1)
    drawn = (questions.drawn(seed, most=10**5) for seed in range(1400, 1420))
    case = next(c for c in drawn if c is not None and Search(c.request, c.models).first() is not None)
    early, again = (Search(case.request, case.models).run() for _ in range(2))
    proof = early.certificate
    assert early.best is not None
    assert proof == again.certificate
    assert proof.unexplored > 0
    assert (
        proof.infeasible + proof.dominated + proof.bounded + proof.simulated + proof.unexplored == proof.space
    )
    whole = Search(replace(case.request, time_limit=3600.0), case.models).run()
    assert whole.certificate.proven
    assert whole.best is not None
    best, found = (questions.value(case, result.best) for result in (whole, early))
    assert found * (1 - proof.gap) <= best * (1 + 1e-9) <= found * (1 + 2e-9)


def test_a_search_for_any_plan_gives_up_after_its_work(
    questions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(1400, 1420):
        if (case := questions.drawn(seed, most=10**5)) is None:
            continue
        request = replace(case.request, max_memory=1.0)  # nothing fits
        search = Search(request, case.models)
        assert search.first() is None
        if search.counts.total() > 0:  # some skeleton was opened
            break
    assert search.counts.total() > 0
    monkeypatch.setattr(branch_and_bound, "FIRST_WORK", 1)
    search = Search(request, case.models)
    assert search.first() is None
    assert search.counts.total() == 0


def test_plans_that_may_not_run_are_work_too(questions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (questions.drawn(seed, most=10**5) for seed in range(1400, 1420))
    case = next(c for c in drawn if c is not None and Search(c.request, c.models).first() is not None)
    asked: list[object] = []
    monkeypatch.setattr(branch_and_bound, "judged", lambda *plan, **kept: asked.append(plan))
    assert Search(case.request, case.models).first() is None
    every = len(asked)
    asked.clear()
    monkeypatch.setattr(branch_and_bound, "REFUSED", branch_and_bound.FIRST_WORK / 2)
    assert Search(case.request, case.models).first() is None
    assert 0 < len(asked) <= 2 < every


def test_a_search_whose_time_is_up_before_it_begins_meets_a_plan_and_counts_every_other(
    questions: Any,
) -> None:
    met = 0
    for seed in range(1400, 1412):
        if (case := questions.drawn(seed, most=10**5)) is None:
            continue
        some = Search(case.request, case.models, Pricer(case.request, case.models, SearchCache())).first()
        with clock.within(1e-9):
            late = Search(case.request, case.models, Pricer(case.request, case.models, SearchCache())).run()
            pricer = Pricer(case.request, case.models, SearchCache())
            again = Search(case.request, case.models, pricer).first(insists=True)
            assert Search(case.request, case.models).first() is None
        proof = late.certificate
        counted = proof.infeasible + proof.dominated + proof.bounded + proof.simulated + proof.unexplored
        assert (late.best is None) == (again is None) == (some is None)
        assert counted == proof.space
        met += late.best is not None
    assert met > 2


def test_a_search_without_time_prices_the_roles_of_a_simple_plan_alone() -> None:
    workload = Workload(model="qwen3-235b", algorithm="grpo")
    request = Request(cluster=parse_cluster(1024), workload=workload, framework="nemo-rl", backend="megatron")
    priced = set[int]()

    class Told(Pricer):
        def prepare(self, keys: Sequence[PriceKey]) -> bool:
            priced.update(key.gpus for key in keys)
            return super().prepare(keys)

    models = models_of(workload)
    with clock.within(1e-9):
        found = Search(request, models, Told(request, models, SearchCache())).run()
    assert found.best is not None
    assert found.best.placement.architecture == "disaggregated"
    assert priced == {1024, 512}
    assert found.certificate.unexplored > 0


def test_simple_skeletons_have_most_gpus_and_round_sizes() -> None:
    workload = Workload(model="8b", algorithm="grpo")
    request = Request(cluster=parse_cluster(24), workload=workload, architecture="disaggregated")
    search = Search(request, models_of(workload))
    frontier = search.frontier
    pairs = [branch for branch in frontier.branches if len(branch.partition.groups) == 2]
    sizes = [e.branch.skeleton(e.row).sizes for e in frontier.simplest(pairs)]
    assert set(sizes[:2]) <= {(16, 8), (8, 16)}
    assert [sum(of) for of in sizes] == sorted(map(sum, sizes), reverse=True)


def test_the_warm_start_simulates_batches_before_rollouts_that_never_drain() -> None:
    workload = Workload(model="70b", algorithm="grpo")
    request = Request(cluster=parse_cluster(64), workload=workload, allow=frozenset({"async"}))
    paces = list[str]()

    class Told(Search):
        def _look(self, skeleton: Skeleton) -> None:
            paces.append(skeleton.partition.pace)
            super()._look(skeleton)

    search = Told(request, models_of(workload))
    search._warm_start(search.frontier.branches)
    assert {"batches", "continuous"} <= set(paces)
    assert paces == sorted(paces, key=lambda pace: pace == "continuous")


def test_work_is_counted_in_the_innermost_share_alone() -> None:
    with clock.worth(3):
        clock.spend(2)
        assert not clock.over()
        with clock.worth(None):
            clock.spend(10)
            assert not clock.over()
        clock.spend(1)
        assert clock.over()
    assert not clock.over()
