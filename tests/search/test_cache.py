"""What searches share: by the cache that is passed to them, and never more than it may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.cache import MOST_TABLES, SearchCache
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload


@pytest.fixture
def case(questions: Any) -> Any:
    return next(c for c in map(questions.drawn, range(50)) if c is not None)


def test_an_answer_does_not_depend_on_what_the_cache_holds(case: Any) -> None:
    cache = SearchCache()
    one, two = (
        Search(case.request, case.models, Pricer(case.request, case.models, cache)).run() for _ in range(2)
    )
    alone = Search(case.request, case.models, Pricer(case.request, case.models, SearchCache())).run()
    assert one.certificate == two.certificate == alone.certificate
    assert one.best == two.best == alone.best


def test_searches_share_tables_through_the_cache_that_they_are_given_alone(case: Any) -> None:
    cache = SearchCache()
    search = Search(case.request, case.models, Pricer(case.request, case.models, cache))
    search.run()
    priced = cache.of(case.request, case.models).roles
    assert priced
    assert not SearchCache().of(case.request, case.models).roles
    dearer = replace(case.request, price=9.0)
    assert Pricer(dearer, case.models, cache).table(next(iter(priced))) is next(iter(priced.values()))


def test_what_was_asked_for_longest_ago_leaves_the_cache(case: Any) -> None:
    cache = SearchCache()
    first = cache.of(case.request, case.models)
    for seed in range(MOST_TABLES):
        work = replace(case.request.workload, seed=seed + 1000)
        cache.of(replace(case.request, workload=work), case.models)
    assert cache.of(case.request, case.models).roles is not first.roles


@pytest.mark.parametrize(("model", "shared"), [("qwen3-8b", True), ("qwen3-30b-a3b", False)])
def test_questions_about_several_networks_share_options_that_have_no_dispatcher(
    model: str, shared: bool
) -> None:
    """The fastest dispatcher depends on the network, so that layouts of experts are those of one network."""
    cache, work, cluster = SearchCache(), Workload(algorithm="grpo", model=model), parse_cluster(32, "h100")
    networks = (replace(cluster, oversubscription=factor) for factor in (1.0, 2.0))
    one, two = (cache.of(Request(cluster=network, workload=work), models_of(work)) for network in networks)
    assert (one.fitting is two.fitting) == (one.engines is two.engines) == shared
    assert one.roles is not two.roles
