"""Choices that do not compete: what they would bring, and when that need not be searched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.engine import Prices, Question, answer
from rlhfsim.what_if.gains import WORTH_A_LINE, elsewhere, gains

WORK = Workload(algorithm="ppo", model="qwen2.5-0.5b", prompts=64)


def _request(gpus: int = 2, work: Workload = WORK) -> Request:
    return Request(cluster=rlhfsim.parse_cluster(gpus, "h100"), workload=work)


def _search(request: Request) -> Search:
    models = models_of(request.workload)
    return Search(request, models, Pricer(request, models, SearchCache()))


def test_bounds_leave_room_for_the_best_plan_and_for_none_below_them() -> None:
    search = _search(_request())
    best = search.run().best
    assert best is not None
    assert _search(_request()).may_stay(math.nextafter(best.seconds, math.inf))
    assert not _search(_request()).may_stay(0.0)
    assert _search(_request()).may_stay(math.inf)


def test_where_the_actor_fits_nowhere_no_other_role_is_asked_and_none_is_priced() -> None:
    search = _search(_request(1, replace(WORK, model="llama-3.1-70b")))
    asked, fits = set(), search.pricer.fits
    search.pricer.fits = lambda key: asked.add(key.role) or fits(key)
    assert not search.may_stay(math.inf)
    assert asked == {"actor"}
    assert not any(search.pricer.tables(role) for role in ("actor", "rollout", "reference"))


@pytest.mark.parametrize("slower", [1.0, 1.05])
def test_the_fastest_backend_is_named_as_if_all_were_searched(slower: float) -> None:
    request = replace(_request(), backend="megatron", framework="any")
    found = answer(Question(request=request))
    assert found.best is not None
    prices = Prices(request=request, pricer=found.pricer)
    step_s = slower * found.best.seconds
    names = {"deepspeed", "fsdp2"}
    every = [g for g in gains(prices, found.best, step_s) if g.name in names]
    assert len(every) == len(names)
    faster = [g for g in every if g.saved is not None and g.saved > WORTH_A_LINE]
    expected = max(faster, key=lambda g: g.saved or 0.0, default=None)
    assert elsewhere(prices, found.best, step_s) == expected
