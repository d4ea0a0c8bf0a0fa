"""Memory at every instant: equal to the ledger's states, back where it began, loud when full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.resources import shipped
from rlhfsim.simulation.run import simulate
from rlhfsim.simulation.simulator import timeline_of
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.scenario import load_scenario, system_names
from rlhfsim.step.calls import CallSetting

SYNCHRONOUS = [n for n in system_names() if load_scenario(n).placement.schedule.staleness == 0]


def setting_of(name: str) -> CallSetting:
    s = load_scenario(name)
    return CallSetting(
        models=models_of(s.workload), placement=s.placement, workload=s.workload, cluster=s.cluster
    )


def ledger_of(setting: CallSetting) -> Ledger:
    return ledger(setting.models, setting.placement, setting.workload, setting.cluster)


def bytes_at(found: Ledger, pool: str, name: str) -> float:
    return next(p.bytes for p in found.phases if (p.pool, p.name) == (pool, name))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_fullest_instant_of_a_step_is_the_fullest_state_of_the_ledger(name: str) -> None:
    setting = setting_of(name)
    held = ledger_of(setting)
    found = simulate(setting, held.kv_tokens, record="strict")
    for peak in found.peaks:
        states = [p.bytes for p in held.phases if p.pool == peak.pool]
        assert peak.bytes == pytest.approx(max(states), rel=1e-9)
        assert peak.bytes <= peak.capacity


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_memory_returns_to_its_start_after_every_step(name: str) -> None:
    setting = setting_of(name)
    found = simulate(setting, ledger_of(setting).kv_tokens, steps=3, record="trace")
    assert found.trace is not None
    for counter in ("memory_bytes", "host_bytes"):
        for pool in setting.placement.pools:
            values = [c.value for c in found.trace.counters if (c.name, c.pool) == (counter, pool.name)]
            assert values[-1] == pytest.approx(values[0], rel=1e-12)
    memory_timeline = timeline_of(setting, strict=True)
    levels, host = memory_timeline.levels(), dict(memory_timeline._host)
    for step in found.iteration.phases:
        memory_timeline.begin(step.name, step.start)
        memory_timeline.end(step.name, step.end)
    assert memory_timeline.levels() == levels
    assert memory_timeline._host == pytest.approx(host, rel=1e-12)


def test_a_role_is_there_from_the_start_of_its_load_to_the_end_of_its_unload() -> None:
    setting = setting_of("verl")
    held, memory_timeline = ledger_of(setting), timeline_of(setting, strict=True)
    call = next(p for p in held.phases if p.name == "actor.train.load")
    rest = memory_timeline.level(call.pool)
    memory_timeline.begin("actor.generate.unload", 0.0)
    memory_timeline.end("actor.generate.unload", 1.0)  # the engine sleeps while others work
    asleep = memory_timeline.level(call.pool)
    memory_timeline.begin("actor.train.load", 1.0)
    assert memory_timeline.level(call.pool) == pytest.approx(call.bytes)
    memory_timeline.end("actor.train.load", 2.0)
    assert memory_timeline.level(call.pool) == pytest.approx(call.bytes)
    memory_timeline.begin("actor.train", 2.0)
    assert memory_timeline.level(call.pool) == pytest.approx(bytes_at(held, call.pool, "actor.train"))
    memory_timeline.end("actor.train", 3.0)
    memory_timeline.begin("actor.train.unload", 3.0)
    assert memory_timeline.level(call.pool) == pytest.approx(call.bytes)
    memory_timeline.end("actor.train.unload", 4.0)
    assert memory_timeline.level(call.pool) == pytest.approx(asleep)
    assert rest >= asleep


def test_two_calls_at_once_hold_what_both_add() -> None:
    setting = setting_of("openrlhf")
    memory_timeline = timeline_of(setting, strict=False)
    pool = setting.placement.actor.pool
    rest = memory_timeline.level(pool)
    memory_timeline.begin("actor.logprob", 0.0)
    one = memory_timeline.level(pool) - rest
    memory_timeline.begin("reference.logprob", 0.0)
    both = memory_timeline.level(pool) - rest
    memory_timeline.end("actor.logprob", 1.0)
    assert both == pytest.approx(one + memory_timeline.level(pool) - rest)
    memory_timeline.end("reference.logprob", 1.0)
    assert memory_timeline.level(pool) == rest


def full(name: str) -> CallSetting:
    """The system with micro-batches that no GPU holds."""
    setting = setting_of(name)
    role = setting.placement.actor
    layout = replace(role.layout, micro_batch=4096)
    placement = replace(setting.placement, actor=replace(role, layout=layout))
    return replace(setting, placement=placement)


def test_a_plan_that_does_not_fit_is_refused_at_the_instant_with_who_and_how_much() -> None:
    setting = full("openrlhf")
    kv_tokens = ledger_of(setting).kv_tokens
    relaxed = simulate(setting, kv_tokens, record="memory")
    first = next(p for p in relaxed.iteration.phases if p.name == "actor.logprob")
    with pytest.raises(RlhfsimError) as caught:
        simulate(setting, kv_tokens, record="strict")
    error = caught.value
    assert error.code == "out-of-memory"
    assert f"at {first.start:.3f} s, when actor.logprob begins" in error.message
    assert "pool actor needs" in error.message
    assert "of it actor" in error.message
    assert error.help


def test_a_watched_plan_that_does_not_fit_runs_and_says_when_it_was_fullest() -> None:
    setting = full("openrlhf")
    found = simulate(setting, ledger_of(setting).kv_tokens, record="memory")
    peak = next(p for p in found.peaks if p.pool == "actor")
    assert peak.bytes > peak.capacity
    assert peak.name in ("actor.logprob", "actor.train")
    assert peak.time == next(p.start for p in found.iteration.phases if p.name == peak.name)


def test_a_weight_sync_through_the_host_needs_host_memory_while_it_runs() -> None:
    setting = setting_of("trl")
    setting = replace(setting, placement=replace(setting.placement, weight_path="host"))
    found = simulate(setting, ledger_of(setting).kv_tokens, record="trace")
    assert found.trace is not None
    sync = next(s for s in found.trace.spans if s.name == "actor.sync")
    host = [c for c in found.trace.counters if c.name == "host_bytes"]
    assert [c.time_s for c in host] == [0.0, sync.start_s, sync.end_s]
    assert host[1].value > host[0].value == pytest.approx(host[2].value)


def test_host_memory_that_does_not_suffice_is_refused() -> None:
    setting = setting_of("trl")
    pool = setting.cluster.node_groups[0]
    node = replace(pool.profile.node, host_memory=replace(pool.profile.node.host_memory, value=1.0))
    small = replace(pool, profile=replace(pool.profile, node=node))
    poor = replace(setting, cluster=replace(setting.cluster, node_groups=(small,)))
    with pytest.raises(RlhfsimError, match="host memory"):
        timeline_of(poor, strict=True)


def test_the_weights_of_the_actor_lie_on_the_host_while_a_swapped_reference_runs() -> None:
    setting = setting_of(str(shipped("scenarios") / "recipes" / "nemo-rl-qwen2.5-7b-32.yaml"))
    placed = setting.placement
    assert placed.role("reference") is not None
    placed = replace(
        placed,
        actor=replace(placed.actor, residency="resident", offload_between=True),
        reference=replace(placed.role("reference"), residency="swapped"),
    )
    setting = replace(setting, placement=placed)
    found = simulate(setting, ledger_of(setting).kv_tokens, record="trace")
    assert found.trace is not None
    load, unload = (
        next(s for s in found.trace.spans if s.name == f"reference.logprob.{move}")
        for move in ("load", "unload")
    )
    host = [c for c in found.trace.counters if c.name == "host_bytes"]
    shard = setting.models.actor.num_params / 2 * 2  # TP2, BF16
    more = next(c for c in host if c.time_s == load.start_s).value - host[0].value
    assert more == pytest.approx(8 * shard, rel=2e-3)
    assert next(c for c in host if c.time_s == unload.end_s).value == pytest.approx(host[0].value)
    assert ledger_of(setting).host_bytes["all"] == pytest.approx(host[0].value + more)
