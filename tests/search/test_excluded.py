"""What excludes one plan, against the ledger, the bound and the simulation of that plan."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.memory.ledger import ledger
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import risk
from rlhfsim.search.excluded import Exclusion, why_excluded
from rlhfsim.specs.placement.placement import Placement

REL = 1e-9
PLANS = 25
"""Of a question."""


def check(questions: Any, case: Any, placement: Placement, best: Any, given: Exclusion) -> None:
    """One plan: the kind is what the plan itself says when it is judged by hand."""
    memory = ledger(case.models, placement, case.request.workload, case.request.cluster)
    assert (given.kind == "does_not_fit") == (
        risk(case.request, memory) is not None and given.kind != "refused"
    )
    judged = questions.outcome(case, placement)
    assert (judged is None) == (given.kind in ("refused", "does_not_fit"))
    if judged is None:
        return
    mine, least = questions.value(case, judged), questions.value(case, best)
    assert least <= mine * (1 + REL)
    if given.kind == "dominated":
        other = questions.outcome(case, given.instead)
        assert other is not None
        assert given.instead != placement
        assert questions.value(case, other) <= mine * (1 + REL)
        assert given.value is not None
        assert given.value <= mine * (1 + REL)
    elif given.kind == "bounded":
        assert given.value is not None
        assert least < given.value <= mine * (1 + REL)
    elif given.kind == "slower":
        assert given.value == pytest.approx(mine, rel=REL)
    else:
        assert placement == best.placement


@pytest.mark.parametrize("block", range(4))
def test_what_excludes_a_plan_agrees_with_the_plan_itself(questions: Any, block: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(block * 6, block * 6 + 6):
        case = questions.drawn(seed, most=4000)
        if case is None:
            continue
        found = Search(case.request, case.models).run()
        for placement in questions.sample(case, random.Random(seed), PLANS):
            asked: list[Placement] = []
            while placement is not None and placement not in asked:  # equals dominate each other
                asked.append(placement)
                given = why_excluded(case.request, case.models, placement, found.best, found.pricer)
                check(questions, case, placement, found.best, given)
                kinds[given.kind] += 1
                placement = given.instead
    assert {"does_not_fit", "dominated", "bounded", "chosen"} <= set(kinds), kinds


@pytest.fixture(scope="module")
def solved(questions: Any) -> Any:
    """A question of many plans with its answer, on some of the GPUs in pools of their own."""
    cases = (questions.drawn(seed, most=4000) for seed in range(7, 40))
    return next(
        (case, found)
        for case in filter(None, cases)
        if (found := Search(case.request, case.models).run()).best is not None
        and found.best.placement.rollout is not None
    )


def told(solved: Any, **changes: Any) -> Exclusion:
    case, found = solved
    placement = replace(found.best.placement, **changes)
    return why_excluded(case.request, case.models, placement, found.best, found.pricer)


def test_the_answer_is_chosen_whatever_its_pools_are_called(solved: Any) -> None:
    best = solved[1].best.placement
    renamed = {role: replace(placed, pool=f"{placed.pool}!") for role, placed in best.roles.items()}
    pools = tuple(replace(pool, name=f"{pool.name}!") for pool in reversed(best.pools))
    assert told(solved).kind == "chosen"
    assert told(solved, pools=pools, **renamed).kind == "chosen"


def test_what_the_backend_refuses_is_told_with_its_reason(solved: Any) -> None:
    actor = solved[1].best.placement.actor
    wrong = replace(actor, layout=replace(actor.layout, zero=3, etp=2, vp=1, recompute="selective"))
    given = told(solved, actor=wrong)
    assert given.kind == "refused"
    assert "actor" in given.text


def test_a_plan_of_another_backend_is_refused(solved: Any) -> None:
    other = next(b for b in ("deepspeed", "megatron") if b != solved[0].request.backend)
    assert other in told(solved, backend=other).text
