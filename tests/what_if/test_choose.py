"""Candidates of `rlhfsim choose`: each is its framework's own best plan."""

from __future__ import annotations

from dataclasses import replace

import rlhfsim
from rlhfsim.cli.inputs import FRAMEWORKS
from rlhfsim.present.answers.choose import rows, table
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.choose import choose, not_run, questions
from rlhfsim.what_if.risk.odds import Targets
from rlhfsim.what_if.scenarios.workers import local


def test_a_candidate_is_searched_with_what_its_framework_runs_and_costs() -> None:
    here = rlhfsim.parse_cluster(2, "h100")
    workload = Workload(model="qwen2.5-0.5b", algorithm="grpo", prompts=32, samples=4)
    request = Request(cluster=here, workload=workload, framework="any")
    profile = here.node_group.profile
    asked = [q for q in questions(request, [profile], 2, 2) if q.framework in ("verl", "slime", "trl")]
    options = choose(asked, Targets(), local(1))
    assert len(options) == len(asked) == 5
    for option in options:
        assert option.plan is not None
        plan, runs = option.plan, framework(option.framework)
        assert plan.framework == option.framework
        assert not list(runs.lacks(plan.placement, plan.workload, plan.topology, one_node=True))
        own = rlhfsim.estimate(plan.placement, plan.workload, replace(here, framework=option.framework))
        assert own.prediction.step_s == plan.prediction.step_s
    (row,) = rows(options)
    assert row is options[0]
    others = table(options, [row], (), None).rows[0][-1]
    assert row.framework == "verl"
    assert others == "trl +12 %, within the error: slime"


def test_a_framework_that_does_not_run_the_work_is_left_out_and_said() -> None:
    workload = Workload(model="qwen2.5-0.5b", algorithm="dpo", prompts=32, samples=1)
    request = Request(cluster=rlhfsim.parse_cluster(1, "h100"), workload=workload, framework="any")
    profile = request.cluster.node_group.profile
    asked = {q.framework for q in questions(request, [profile], 1, 1)}
    lacking = list(not_run(request, [profile]))
    assert "slime does not run DPO" in lacking
    assert len(asked) + len(lacking) == len(FRAMEWORKS) - 1
