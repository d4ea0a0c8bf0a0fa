"""The simplest plan close to the best against brute force: every plan of small random spaces is written out."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.search.complexity import complexity
from rlhfsim.what_if.engine import Prices, Question, answer
from rlhfsim.what_if.simplest import CLOSE, RISKS, simplest

BLOCKS, EACH = 4, 6
"""Random questions: tests, and questions of one test."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_close_plan_of_so_little_risk_is_simpler_or_as_simple_and_faster(
    questions: Any, block: int
) -> None:
    compared = 0
    for seed in range(block * EACH, (block + 1) * EACH):
        case = questions.drawn(seed)
        if case is None:
            continue
        found = answer(Question(request=case.request))
        if found.best is None:
            continue
        compared += 1
        plan, _ = simplest(found.best, Prices(request=case.request, pricer=found.pricer))
        least = questions.value(case, found.best)
        every = [questions.outcome(case, placement) for _, placement in case.written_out()]
        close = [p for p in every if p and questions.value(case, p) <= least * (1 + CLOSE)]
        for risk in sorted({min(risk, case.request.max_oom) for risk in (*RISKS, case.request.max_oom)}):
            if safe := [p for p in close if p.ledger.probability_out_of_memory <= risk]:
                break
        order = min((complexity(p.placement), p.seconds) for p in safe)
        assert complexity(plan.placement) == order[0], seed
        assert plan.seconds == pytest.approx(order[1], rel=1e-9), seed
    assert compared
