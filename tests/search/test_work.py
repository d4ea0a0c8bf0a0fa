"""Searches that end after their share of work: the same on every machine, with a gap, unless a time is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search import branch_and_bound, clock
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.pricer import Pricer


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
            again = Search(
                case.request, case.models, Pricer(case.request, case.models, SearchCache())
            ).first()
        proof = late.certificate
        counted = proof.infeasible + proof.dominated + proof.bounded + proof.simulated + proof.unexplored
        assert (late.best is None) == (again is None) == (some is None)
        assert counted == proof.space
        met += late.best is not None
    assert met > 2


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
