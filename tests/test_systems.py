"""The systems of scenarios/systems: each loads, is allowed, is priced and fits, and stays true to its original."""

from __future__ import annotations

import math

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.phases.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.specs.dataflow import dataflow
from rlhfsim.specs.models import models_of
from rlhfsim.specs.scenario import load_scenario, system_names

SYSTEMS = {  # name -> architecture, role placement, weight path
    "verl": ("hybrid", "colocated", "ipc"),
    "openrlhf": ("disaggregated", "split", "broadcast"),
    "slime": ("disaggregated", "colocated", "broadcast"),
    "deepspeed-chat": ("hybrid", "colocated", "reshard"),
    "trl": ("naive", "colocated", "host"),
    "vllm-example": ("disaggregated", "colocated", "broadcast"),
    "xtuner-rlhf": ("smart", "split", "host"),
    "sample-factory": ("async", "colocated", "broadcast"),
    "vram-managed-pipeline": ("smart", "colocated", "disk"),
}


def seconds(plan: Plan, name: str) -> float:
    return sum(p.seconds for p in plan.prediction.phases if p.name == name)


def test_every_system_of_the_table_is_shipped() -> None:
    assert set(system_names()) == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_its_labels_and_a_source(name: str) -> None:
    plan, scenario = estimate_file(name), load_scenario(name)
    found = (plan.architecture, plan.role_placement, plan.placement.weight_path)
    assert found == SYSTEMS[name]
    assert len(scenario.source) > 30
    assert plan.placement == scenario.placement


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_call_of_a_system_takes_time(name: str) -> None:
    plan, scenario = estimate_file(name), load_scenario(name)
    for call in dataflow(scenario.workload):
        assert seconds(plan, call.name) > 0, call.name
    assert all(math.isfinite(p.seconds) for p in plan.prediction.phases)
    assert plan.prediction.low_s < plan.prediction.step_s < plan.prediction.high_s


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_fits_where_the_real_one_runs(name: str) -> None:
    s = load_scenario(name)
    held = ledger(models_of(s.workload), s.placement, s.workload, s.cluster)
    assert held.rejected_by is None
    assert held.probability_out_of_memory < 0.2


def test_sample_factory_hides_its_sync_and_is_bound_by_its_slower_side() -> None:
    plan = estimate_file("sample-factory")
    sides = (
        seconds(plan, "actor.generate"),
        sum(seconds(plan, name) for name in ("rules.score", "controller", "actor.train")),
    )
    assert plan.prediction.step_s == pytest.approx(max(sides))


def test_the_vram_managed_pipeline_creates_its_workers_each_step_and_overlaps_its_rules() -> None:
    plan = estimate_file("vram-managed-pipeline")
    phases = {p.name: p for p in plan.prediction.phases}
    assert phases["actor.generate.load"].seconds > 10
    generated = phases["actor.generate"].start_s + phases["actor.generate"].seconds
    assert phases["rules.score"].start_s == pytest.approx(generated)
    assert not phases["rules.score"].critical


def test_critic_and_reward_work_beside_actor_and_reference_in_openrlhf() -> None:
    phases = {p.name: p for p in estimate_file("openrlhf").prediction.phases}
    assert phases["critic.train"].start_s == pytest.approx(phases["actor.train"].start_s, rel=0.05)
    assert phases["reward.score"].start_s == phases["reference.logprob"].start_s
