"""What binds a step, and what an eighth more of it brings."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Environment, Reward, Rules, Workload
from rlhfsim.what_if.bottleneck import bottleneck
from rlhfsim.what_if.estimate import estimate

WORK = Workload(
    algorithm="grpo",
    model="qwen3-8b",
    prompts=128,
    samples=8,
    response_len=Fixed(value=1024),
    reward=Reward(rules=Rules()),
)


def planned(work: Workload) -> tuple[Plan, Cluster]:
    cluster = rlhfsim.parse_cluster(16, "h100")
    trained = RolePlacement(pool="all", layout=Layout(dp=16, zero=3), offload_between=True)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=16),),
        actor=trained,
        reference=RolePlacement(pool="all", layout=Layout(dp=16, zero=3)),
        rollout=RolloutPlacement(
            pool="all", layout=RolloutLayout(tp=1, dp=16, memory_utilization=0.6), sleep=2
        ),
        weight_path="ipc",
        backend="fsdp2",
    )
    return estimate(placement, work, cluster), cluster


def test_workers_of_an_environment_bind_and_64_more_of_512_take_an_eighth_less() -> None:
    plan, cluster = planned(
        replace(WORK, environment=Environment(turns=19, seconds_per_turn=10.0, workers=512))
    )
    found = bottleneck(plan, cluster)
    assert found is not None
    assert (found.resource, found.phase, found.more) == ("environment", "actor.generate", 64)
    assert found.seconds == pytest.approx(380, rel=1e-3)
    assert found.step_s is not None
    assert plan.prediction.step_s - found.step_s == pytest.approx(380 / 9, rel=0.01)


def test_workers_that_score_by_rules_bind_where_they_are_slow() -> None:
    slow = Reward(rules=Rules(seconds_per_sample=8.0, workers=16), overlapped=False)
    plan, cluster = planned(replace(WORK, reward=slow))
    found = bottleneck(plan, cluster)
    assert found is not None
    assert (found.resource, found.phase, found.more) == ("rewards", "rules.score", 2)
    assert found.step_s == pytest.approx(plan.prediction.step_s - 512 / 9, rel=0.01)


@pytest.mark.parametrize(("resource", "bought"), [("hbm", True), ("overhead", False)])
def test_bandwidth_can_be_bought_and_software_cannot(resource: str, bought: bool) -> None:
    plan, cluster = planned(WORK)
    phases = tuple(
        replace(p, by_resource_s={resource: p.by_resource_s.get(resource, 0.0)})
        for p in plan.prediction.phases
    )
    found = bottleneck(replace(plan, prediction=replace(plan.prediction, phases=phases)), cluster)
    assert found is not None
    assert found.resource == resource
    assert (found.step_s is not None) is bought
    assert (found.step_s or 0.0) < plan.prediction.step_s
