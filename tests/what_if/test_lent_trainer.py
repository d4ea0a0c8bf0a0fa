"""When it is worth a try to lend the trainer's GPUs to the rollout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present.verdict_lines import lending
from rlhfsim.search.request import Request
from rlhfsim.simulation.asynchronous.run import SteadyRun, simulate
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.estimate import planned, priced_placement
from rlhfsim.what_if.unasked import WORTH, lent_trainer

WORK = Workload(
    algorithm="grpo",
    model="qwen3-0.6b",
    prompts=16,
    samples=8,
    reward=Reward(rules=Rules()),
    response_len=LogNormal(mean=1500, sigma=0.5, max=4000),
)
CLUSTER = Cluster(node_groups=(node_group("h100", 8),), framework="verl")


def waiting(rollout: int, train: int, framework: str = "verl") -> tuple[Plan, Request]:
    """A plan as a search leaves it, and its question."""
    role = RolePlacement(pool="t", layout=Layout(dp=train, zero=3, micro_batch=8))
    placement = Placement(
        pools=(
            ResourcePool(name="r", start=0, gpus=rollout),
            ResourcePool(name="t", start=rollout, gpus=train),
        ),
        rollout=RolloutPlacement(pool="r", layout=RolloutLayout(dp=rollout, max_num_seqs=8), sleep=0),
        actor=role,
        reference=role,
        schedule=Schedule(staleness=2, partial_rollout=True),
        weight_path="broadcast",
        backend="fsdp2",
    )
    priced = priced_placement(placement, WORK, CLUSTER)
    plan = planned(priced, simulate(priced.setting, SteadyRun(priced.kv_tokens)).iteration, None)
    return plan, Request(cluster=CLUSTER, workload=WORK, backend="fsdp2", framework=framework)


def test_a_trainer_that_waits_long_is_worth_lending() -> None:
    plan, question = waiting(1, 7)
    found = lent_trainer(plan, question)
    assert found is not None
    assert 1 - found.seconds / plan.prediction.step_s >= WORTH
    answer: Any = SimpleNamespace(request=question)
    line = lending(plan, answer)
    assert line is not None
    assert line.endswith("--allow lend")


def test_nothing_is_said_where_it_is_not_run_or_lent_already() -> None:
    plan, question = waiting(1, 7)
    assert lent_trainer(plan, replace(question, framework="skyrl")) is None
    placement = replace(plan.placement, schedule=replace(plan.placement.schedule, lend=True))
    assert lent_trainer(replace(plan, placement=placement), question) is None
    exposed = replace(plan.placement.schedule, overlapped_sync=True)
    assert lent_trainer(replace(plan, placement=replace(plan.placement, schedule=exposed)), question) is None


def test_nothing_is_said_where_the_trainer_hardly_waits() -> None:
    plan, question = waiting(1, 7)
    longer = replace(plan.prediction, step_s=plan.prediction.step_s * 20)
    assert lent_trainer(replace(plan, prediction=longer), question) is None


def test_nothing_is_said_where_a_search_was_asked_for_it_or_must_not_look() -> None:
    plan, question = waiting(1, 7)
    for named in ({"allow": frozenset({"lend"})}, {"forbid": frozenset({"lend"})}):
        assert lent_trainer(plan, replace(question, **named)) is None
