"""The door to the simulation: systems, repetition, seeds, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.cost import Cost
from rlhfsim.memory.ledger import ledger
from rlhfsim.simulation.noise import Noise
from rlhfsim.simulation.run import Simulated, simulate
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.scenario import load_scenario, system_names
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Environment, Workload
from rlhfsim.step.calls import CallSetting, generation_of
from rlhfsim.step.iteration import closed_form, iteration, program

SYNCHRONOUS = [n for n in system_names() if load_scenario(n).placement.schedule.staleness == 0]


def setting_of(name: str) -> CallSetting:
    s = load_scenario(name)
    return CallSetting(
        models=models_of(s.workload), placement=s.placement, workload=s.workload, cluster=s.cluster
    )


def kv_of(setting: CallSetting) -> float | None:
    held = ledger(setting.models, setting.placement, setting.workload, setting.cluster)
    return held.kv_tokens


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_synchronous_system_simulates_to_its_closed_form(name: str) -> None:
    setting = setting_of(name)
    kv_tokens = kv_of(setting)
    found = simulate(setting, kv_tokens, steps=2)
    expected = iteration(
        setting.models, setting.placement, setting.workload, setting.cluster, kv_tokens=kv_tokens
    )
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.step_seconds == pytest.approx([expected.seconds] * 2, rel=1e-9)
    assert found.iteration.critical == expected.critical
    for a, b in zip(expected.phases, found.iteration.phases, strict=True):
        assert (b.name, b.after) == (a.name, a.after)
        assert (b.start, b.end) == (pytest.approx(a.start), pytest.approx(a.end))
    assert found.lost == {}


@pytest.mark.parametrize("name", ["openrlhf", "slime"])
def test_streamed_systems_simulate_to_their_closed_form(name: str) -> None:
    setting = setting_of(name)
    schedule = replace(setting.placement.schedule, streaming=True)
    streamed = replace(setting, placement=replace(setting.placement, schedule=schedule))
    expected = closed_form(program(streamed, kv_of(setting)), schedule)
    assert simulate(streamed, kv_of(setting)).seconds == pytest.approx(expected.seconds, rel=1e-9)


@pytest.mark.parametrize(("double_buffered", "lockstep"), [(False, False), (False, True), (True, False)])
def test_an_environment_simulates_to_its_closed_form(double_buffered: bool, lockstep: bool) -> None:
    setting = setting_of("openrlhf")
    schedule = replace(setting.placement.schedule, double_buffered=double_buffered)
    turned = replace(
        setting,
        placement=replace(setting.placement, schedule=schedule),
        workload=replace(
            setting.workload,
            environment=Environment(turns=4, seconds_per_turn=1.0, lockstep=lockstep, sigma=0.5),
        ),
    )
    expected = closed_form(program(turned, kv_of(setting)), schedule)
    found = simulate(turned, kv_of(setting), record="trace")
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.seconds > simulate(setting, kv_of(setting)).seconds
    assert found.trace is not None
    assert "environment.answer" in {s.name for s in found.trace.spans}


def test_in_lockstep_the_slowest_answer_of_each_turn_counts() -> None:
    setting = setting_of("openrlhf")

    def rollout(**environment: Any) -> Cost:
        workload = replace(setting.workload, environment=Environment(**environment) if environment else None)
        priced = generation_of(replace(setting, workload=workload), kv_of(setting))
        assert priced is not None
        return priced.cost

    each = {"turns": 4, "seconds_per_turn": 2.0, "workers": 4096}
    alone, together, none = rollout(**each), rollout(**each, lockstep=True), rollout()
    assert none.seconds < alone.seconds < together.seconds
    assert alone.seconds < none.seconds + 4 * 2.0
    assert together.seconds == pytest.approx(none.seconds + 4 * 2.0)
    assert rollout(**{**each, "seconds_per_turn": 1e-9}).seconds == pytest.approx(none.seconds, rel=1e-6)
    fewer = rollout(**each, mean_turns=2.0)
    assert fewer.seconds < 1.02 * alone.seconds, "the longest response of the drawn ones"
    assert 0.4 < fewer.by_resource()["environment"] / alone.by_resource()["environment"] < 0.6
    short = rollout(**{**each, "workers": 16})
    work = setting.workload.num_sequences * 8.0 / 16
    assert short.seconds == pytest.approx(work, rel=0.1), "as fast as the workers answer"


def test_turns_and_answers_are_drawn_anew_for_every_step() -> None:
    setting = setting_of("openrlhf")

    def steps(**changes: Any) -> tuple[float, ...]:
        environment = Environment(turns=8, seconds_per_turn=2.0, workers=4096, **changes)
        fixed = replace(setting.workload, response_len=Fixed(value=512), environment=environment)
        turned = replace(setting, workload=fixed)
        return simulate(turned, kv_of(setting), steps=3, noise=Noise(lengths=True)).step_seconds

    assert len(set(steps(mean_turns=3.0, sigma=0.5))) == 3
    assert steps(mean_turns=3.0, sigma=0.5) == steps(mean_turns=3.0, sigma=0.5)
    assert steps() == pytest.approx([steps()[0]] * 3)


def environment_waits(setting: CallSetting, double_buffered: bool, each: float) -> float:
    """Seconds of the rollout beyond its generation."""
    schedule = replace(setting.placement.schedule, double_buffered=double_buffered)
    turned = replace(
        setting,
        placement=replace(setting.placement, schedule=schedule),
        workload=replace(
            setting.workload, environment=Environment(turns=8, seconds_per_turn=each, workers=4096)
        ),
    )
    made = program(turned, kv_of(setting)).generation
    assert made is not None
    return made.cost.by_resource().get("environment", 0.0)


def test_double_buffering_hides_the_environment_behind_the_other_half() -> None:
    setting = setting_of("openrlhf")
    plain, hidden = (environment_waits(setting, double, 2.0) for double in (False, True))
    assert plain >= 8 * 2.0
    assert hidden < 0.5 * plain


def test_steps_are_alike_and_their_mean_is_the_step() -> None:
    setting = setting_of("verl")
    one, many = (simulate(setting, kv_of(setting), steps=n, warmup=n - 1) for n in (1, 4))
    assert len(many.step_seconds) == 4
    assert many.seconds == pytest.approx(one.seconds, rel=1e-12)


def trace_text(found: Simulated) -> str:
    assert found.trace is not None
    return json.dumps(found.trace.to_dict())


def test_the_same_seed_gives_the_same_bytes() -> None:
    setting = setting_of("openrlhf")
    first, second = (simulate(setting, kv_of(setting), steps=2, seed=7, record="trace") for _ in range(2))
    assert first == second
    assert trace_text(first) == trace_text(second)


def test_recording_changes_no_figure() -> None:
    setting = setting_of("openrlhf")
    plain, recorded = (simulate(setting, kv_of(setting), record=on) for on in (None, "trace"))
    assert plain.iteration == recorded.iteration
    assert plain.trace is None
    assert plain.peaks == ()


def test_a_trace_holds_every_call_of_every_step_and_of_every_pool() -> None:
    setting = setting_of("openrlhf")
    found = simulate(setting, kv_of(setting), steps=2, warmup=1, record="trace")
    assert found.trace is not None
    assert (found.trace.steps, found.trace.plan_hash, found.trace.source) == (3, "", "predicted")
    for step in range(3):
        spans = {(s.name, s.pool) for s in found.trace.spans if s.step == step}
        wanted = {(p.name, pool) for p in found.iteration.phases for pool in p.pools if p.cost.seconds}
        assert spans == wanted
    assert found.trace.end_s == pytest.approx(3 * found.seconds)
    busy = sum(s.seconds for s in found.trace.spans if s.pool == "critic" and s.step == 1)
    assert busy == pytest.approx(sum(p.cost.seconds for p in found.iteration.phases if "critic" in p.pools))


@pytest.mark.parametrize("name", ["openrlhf", "slime", "vllm-example"])
def test_a_faster_network_never_makes_a_synchronous_plan_slower(name: str) -> None:
    setting = setting_of(name)
    pool = setting.cluster.node_groups[0]

    def seconds(factor: float) -> float:
        nic = pool.profile.nic.value * factor
        fast = node_group(pool.profile.name, pool.gpus, gpus_per_node=pool.gpus_per_node, nic=nic)
        return simulate(replace(setting, cluster=replace(setting.cluster, node_groups=(fast,)))).seconds

    found = [seconds(factor) for factor in (0.25, 0.5, 1.0, 2.0)]
    assert found == sorted(found, reverse=True)


def test_seeds_without_noise_are_alike() -> None:
    setting = setting_of("verl")
    runs = [simulate(setting, kv_of(setting), steps=2, seed=seed) for seed in range(3)]
    assert len({run.step_seconds for run in runs}) == 1
    assert runs[0].step_seconds[0] == pytest.approx(runs[0].step_seconds[1]) == pytest.approx(runs[0].seconds)


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (1, -1)])
def test_no_step_is_no_simulation(steps: int, warmup: int) -> None:
    with pytest.raises(RlhfsimError, match="cannot be simulated"):
        simulate(setting_of("verl"), steps=steps, warmup=warmup)


def test_preference_training_simulates_without_a_rollout() -> None:
    base = setting_of("deepspeed-chat")
    workload = Workload(algorithm="dpo", model="qwen3-0.6b", prompts=64)
    role = RolePlacement(pool="all", layout=Layout(dp=8))
    placement = Placement(pools=base.placement.pools, actor=role, reference=role)
    setting = CallSetting(
        models=models_of(workload), placement=placement, workload=workload, cluster=base.cluster
    )
    found = simulate(setting, steps=2, record="strict")
    assert simulate(setting, steps=2, record="trace").step_seconds == found.step_seconds
    expected = closed_form(program(setting), placement.schedule)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert [p.name for p in found.iteration.phases] == ["reference.logprob", "actor.train"]


def test_the_environment_stands_in_the_trace_beside_the_turns_of_the_rollout() -> None:
    setting = setting_of("verl")
    schedule = replace(setting.placement.schedule, double_buffered=True)
    turned = replace(
        setting,
        placement=replace(setting.placement, schedule=schedule),
        workload=replace(setting.workload, environment=Environment(turns=3)),
    )
    found = simulate(turned, kv_of(turned), record="trace")
    assert found.trace is not None
    spans = [s for s in found.trace.spans if s.name in ("actor.generate", "environment.answer")]
    assert [s.name for s in spans].count("actor.generate") == 2 * 3
    answers = [s for s in spans if s.name == "environment.answer"]
    assert {(s.pool, s.role, s.group) for s in answers} == {
        ("cpu", "environment", "buffer 0"),
        ("cpu", "environment", "buffer 1"),
    }
