"""The table of plans where a search ended early and left kinds of plans unproven."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import rlhfsim
from rlhfsim.present.answers.design import page
from rlhfsim.present.answers.design_details import Extras
from rlhfsim.present.answers.ranking import UNPROVEN, ranking
from rlhfsim.search import branch_and_bound
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import Design


@cache
def unfinished() -> Design:
    request = Request(cluster=rlhfsim.parse_cluster(16, "h100"), workload=Workload(model="8b", prompts=256))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(branch_and_bound, "WORK", 1)
        return rlhfsim.design(request)


@pytest.mark.parametrize("gap", [None, 0.5])
def test_a_kind_that_is_not_proven_is_marked(gap: float | None) -> None:
    answer = unfinished()
    answer = replace(answer, gaps=(gap,) * len(answer.runners_up))
    rows = ranking(answer).rows
    assert len(rows) > 1
    assert sum(UNPROVEN in str(cell) for row in rows for cell in row) == len(answer.runners_up)


def test_gaps_are_numbers_that_json_can_say() -> None:
    answer = unfinished()
    assert not answer.certificate.proven
    assert {type(gap) for gap in (answer.certificate.gap, *answer.gaps)} <= {float, type(None)}
    assert page(answer, Extras()).as_data
