"""Where nothing fits, the plan that comes nearest is one of those that are allowed."""

from __future__ import annotations

import rlhfsim
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import _nearest
from rlhfsim.what_if.planned import best_of

ASKED = Request(
    cluster=rlhfsim.parse_cluster(1, "4090"),
    workload=Workload(algorithm="dpo", model="14b", prompts=16),
    allow=frozenset({"lora"}),
    forbid=frozenset({"offload"}),
)


def test_an_allowed_switch_that_saves_memory_is_part_of_the_nearest_plan() -> None:
    near = _nearest(ASKED)
    assert near is not None
    work, peak = near.setting.workload, near.memory.peak
    assert work.lora is not None
    assert near.setting.placement.actor is not None
    assert peak.bytes > peak.capacity
    planned = best_of(ASKED)
    assert planned.plan is not None
    assert planned.plan.workload == work
