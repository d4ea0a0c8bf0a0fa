"""The systems of scenarios/systems: each loads, is allowed, is priced and fits, and stays true to its
original."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.scenario import load_scenario, system_names
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import iteration, program
from tests.oracles import asynchronous_bound

SYSTEMS = {  # name -> architecture, role placement, weight path
    "verl": ("hybrid", "colocated", "ipc"),
    "openrlhf": ("disaggregated", "split", "broadcast"),
    "slime": ("disaggregated", "colocated", "broadcast"),
    "deepspeed-chat": ("hybrid", "colocated", "reshard"),
    "trl": ("hybrid", "colocated", "ipc"),
    "slime-colocated": ("hybrid", "colocated", "ipc"),
    "slime-disk": ("smart", "colocated", "disk"),
    "vllm-example": ("disaggregated", "colocated", "broadcast-per-parameter"),
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
        sum(seconds(plan, name) for name in ("actor.generate", "actor.generate.wait")),
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


# --- simulated --------------------------------------------------------------------------------------


def priced(name: str) -> tuple[CallSetting, float | None]:
    s = load_scenario(name)
    models = models_of(s.workload)
    held = ledger(models, s.placement, s.workload, s.cluster)
    setting = CallSetting(models=models, placement=s.placement, workload=s.workload, cluster=s.cluster)
    return setting, held.kv_tokens if held.kv_tokens and held.kv_tokens > 0 else None


@pytest.mark.parametrize("name", sorted(set(SYSTEMS) - {"sample-factory"}))
def test_a_synchronous_system_simulates_to_its_priced_step_and_never_runs_out_of_memory(name: str) -> None:
    setting, kv_tokens = priced(name)
    alone = iteration(
        setting.models, setting.placement, setting.workload, setting.cluster, kv_tokens=kv_tokens
    ).seconds
    found = simulate(setting, kv_tokens, steps=2, record="strict")
    # calls that run side by side may wait for a link; without that the two are equal
    assert alone * (1 - 1e-9) <= found.seconds < 1.02 * alone
    assert found.step_seconds[0] == pytest.approx(found.step_seconds[1])
    if not any(found.lost.values()):
        assert found.seconds == pytest.approx(alone)


def test_sample_factory_simulates_within_its_staleness_bound_above_its_limit() -> None:
    setting, kv_tokens = priced("sample-factory")
    found = simulate(setting, kv_tokens, steps=12, warmup=4, seed=0, record="strict")
    assert found.staleness is not None
    assert found.staleness.max <= setting.placement.schedule.staleness
    assert found.seconds >= asynchronous_bound(program(setting, kv_tokens), setting, kv_tokens) * (1 - 1e-9)
    assert found.seconds < 1.25 * found_without_staleness(setting, kv_tokens)


def found_without_staleness(setting: CallSetting, kv_tokens: float | None) -> float:
    """The same pools, one batch after the other."""
    waits = replace(setting.placement, schedule=Schedule())
    return simulate(replace(setting, placement=waits), kv_tokens).seconds
