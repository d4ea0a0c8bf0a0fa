"""One real plan, and a runner that plants step times instead of searching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.scenarios.designs import DesignResult, Runner
from rlhfsim.what_if.scenarios.workers import search


@pytest.fixture(scope="session")
def plan() -> Plan:
    workload = Workload(algorithm="grpo", model="0.5b", prompts=16, samples=2, reward=Reward(rules=Rules()))
    found = search(Request(cluster=parse_cluster(2, "h100"), workload=workload)).plan
    assert found is not None
    return found


Planted = Callable[[Request], float | None]


@pytest.fixture
def planted(plan: Plan) -> Callable[[Planted], Runner]:
    """A runner whose step takes as long as a function of the request says; None: nothing fits."""

    def with_times(seconds: Planted) -> Runner:
        def run(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
            for i, request in enumerate(requests):
                s = seconds(request)
                if s is None:
                    yield i, DesignResult(plan=None, shortage="too large")
                    continue
                p = replace(plan.prediction, step_s=s, low_s=0.9 * s, high_s=1.2 * s)
                yield i, DesignResult(plan=replace(plan, prediction=p, workload=request.workload))

        return run

    return with_times
