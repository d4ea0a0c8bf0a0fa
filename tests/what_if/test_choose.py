"""Candidates of `rlhfsim choose`: whose software a row is priced with."""

from __future__ import annotations

from dataclasses import replace

import rlhfsim
from rlhfsim.frameworks.runs import ANY
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.what_if.choose import _by_framework, _runners


def test_a_row_is_priced_with_the_software_of_the_first_framework_that_it_names(plan: Plan) -> None:
    here = rlhfsim.parse_cluster(2, "h100")
    asked = Request(cluster=here, workload=plan.workload, framework=ANY, backend=plan.placement.backend)
    names = tuple(_runners(asked, plan))
    steps = {name: priced.prediction.step_s for name, priced in _by_framework(asked, plan, names).items()}
    assert len(steps) > 1
    assert list(steps.values()) == sorted(steps.values())
    for name, step in steps.items():
        own = rlhfsim.estimate(plan.placement, plan.workload, replace(here, framework=name))
        assert own.prediction.step_s == step
