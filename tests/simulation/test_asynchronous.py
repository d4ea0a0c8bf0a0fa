"""Schedules with stale samples: timetables worked out by hand, the closed form, proven bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.rollout.continuous_batching import tabulate
from rlhfsim.rollout.engine_step import on
from rlhfsim.simulation.asynchronous import priced_rollout
from rlhfsim.simulation.asynchronous import run as stale
from rlhfsim.simulation.asynchronous.batch_means import interval_of
from rlhfsim.simulation.asynchronous.bounds import floor_of, lower_hull
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine, StepClock
from rlhfsim.simulation.asynchronous.run import SteadyRun, simulate
from rlhfsim.simulation.noise import Noise
from rlhfsim.simulation.result import Simulated
from rlhfsim.simulation.run import simulate as door
from rlhfsim.simulation.simulator import Record
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment, Reward, Rules, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Program, closed_form, program
from rlhfsim.step.timetable import ROLLOUT, SYNC, Step
from tests.oracles import asynchronous_bound

TAIL = LogNormal(mean=600, sigma=0.9, max=4000)
PARTIAL = Schedule(staleness=2, partial_rollout=True)


def seconds(value: float) -> Cost:
    return Cost(parts=(part("compute", value, "test"),)) if value else Cost()


def setting(
    schedule: Schedule,
    *,
    rollout: int = 2,
    train: int = 2,
    prompts: int = 4,
    samples: int = 1,
    lengths: AnyLengths | None = None,
    drawn: list[float] | None = None,
    slots: int = 256,
) -> CallSetting:
    workload = Workload(
        algorithm="grpo",
        model="qwen3-0.6b",
        prompts=prompts,
        samples=samples,
        reward=Reward(rules=Rules()),
        prompt_len=Fixed(value=200),
        response_len=lengths or Fixed(value=10),
    )
    placement = Placement(
        pools=(
            ResourcePool(name="r", start=0, gpus=rollout),
            ResourcePool(name="t", start=rollout, gpus=train),
        ),
        rollout=RolloutPlacement(pool="r", layout=RolloutLayout(dp=rollout, max_num_seqs=slots), sleep=0),
        actor=RolePlacement(pool="t", layout=Layout(dp=train)),
        reference=RolePlacement(pool="t", layout=Layout(dp=train)),
        schedule=schedule,
        weight_path="broadcast",
    )
    cluster = Cluster(node_groups=(node_group("h100", rollout + train),))
    return CallSetting(
        models=models_of(workload),
        placement=placement,
        workload=workload,
        cluster=cluster,
        drawn=tuple(drawn) if drawn else None,
    )


def by_hand(generate: float, learn: float, sync: float) -> Program:
    made: Any = SimpleNamespace(cost=seconds(generate), finish=(), kv_tokens=0.0)
    steps = (
        Step(name=ROLLOUT, pools=("r",), cost=seconds(generate)),
        Step(name="actor.logprob", pools=("t",), cost=seconds(learn / 4), needs=(ROLLOUT,)),
        Step(name="actor.train", pools=("t",), cost=seconds(learn * 3 / 4), needs=("actor.logprob",)),
        Step(name=SYNC, pools=("t", "r"), cost=seconds(sync), needs=("actor.train",)),
    )
    return Program(steps=steps, generation=made, continuous=seconds(generate), tokens=1.0, gpus=4)


def engine(
    slots: int = 2,
    capacity: float = 1e9,
    prefill: float = 0.0,
    again: float = 0.0,
    fixed: float = 1.0,
    each: float = 0.0,
    read: float = 0.0,
) -> ReplicaEngine:
    n, c = np.array([1.0, 2.0, 4.0, 1024.0]), np.array([1.0, 100.0, 1e6])
    tau = fixed + each * n[:, None] + read * n[:, None] * c
    return ReplicaEngine(
        clock=StepClock(tabulate(n, c, on("compute", tau))),
        slots=slots,
        capacity=capacity,
        prompt=10.0,
        own=10.0,
        prefill=prefill,
        again=lambda n, c: again * n * c,
    )


def run(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule,
    learn: float,
    sync: float,
    *,
    replica: ReplicaEngine | None = None,
    generate: float = 10.0,
    steps: int = 6,
    record: Record | None = None,
    **more: Any,
) -> Simulated:
    """Two replicas of two slots, one second a step, four samples of ten tokens a batch: 10 s a batch."""
    monkeypatch.setattr(priced_rollout, "rollout_engine", lambda *a: replica or engine())
    made = setting(schedule, **more)
    return simulate(made, SteadyRun(1e5, steps=steps, priced=by_hand(generate, learn, sync), record=record))


def chained(found: Simulated) -> None:
    """The critical chain has no gap and makes up the mean step."""
    phases = [found.iteration.phases[i] for i in found.iteration.critical]
    at = 0.0
    for phase in phases:
        assert phase.start == pytest.approx(at, abs=1e-9)
        at = phase.end
    assert at == pytest.approx(found.seconds)


# --- one-step-off -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("generate", "learn"), [(10, 6), (6, 10), (8, 8)])
def test_one_step_off_is_the_slower_side_and_the_sync(
    monkeypatch: pytest.MonkeyPatch, generate: float, learn: float
) -> None:
    found = run(monkeypatch, Schedule(staleness=1), learn, 2.0, generate=generate)
    assert found.step_seconds == pytest.approx([max(generate, learn) + 2] * 6)
    assert found.staleness is not None
    assert (found.staleness.mean, found.staleness.max) == (1, 1)
    made = setting(Schedule(staleness=1))
    assert found.seconds == pytest.approx(
        closed_form(by_hand(generate, learn, 2.0), made.placement.schedule).seconds
    )
    chained(found)


def test_one_step_off_runs_as_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # generation 10, trainer 2 + 6, sync 2: batch 0 until 10; then batch k+1 beside batch k, sync after both
    found = run(monkeypatch, Schedule(staleness=1), 8.0, 2.0, record="trace")
    assert found.trace is not None
    spans = [
        (s.name, s.start_s, s.end_s, s.version) for s in found.trace.spans if s.step < 3 and s.pool == "r"
    ]
    assert spans[:5] == [
        (ROLLOUT, 0, 10, 0),
        (ROLLOUT, 10, 20, 0),
        (SYNC, 20, 22, 1),
        (ROLLOUT, 22, 32, 1),
        (SYNC, 32, 34, 2),
    ]
    trained = [(s.start_s, s.end_s) for s in found.trace.spans if s.name == "actor.train"]
    assert trained[:3] == [(12, 18), (24, 30), (36, 42)]


@pytest.mark.parametrize(
    ("generate", "learn", "sync", "step"), [(10, 4, 3, 10), (4, 10, 3, 10), (10, 10, 3, 11.5), (2, 3, 20, 20)]
)
def test_an_overlapped_sync_hides_as_far_as_one_version_of_staleness_lets_it(
    monkeypatch: pytest.MonkeyPatch, generate: float, learn: float, sync: float, step: float
) -> None:
    # max(g, L, s, (g + L + s) / 2): the batch after next waits for these weights
    schedule = Schedule(staleness=1, overlapped_sync=True)
    for steps in (1, 8):
        found = run(monkeypatch, schedule, learn, sync, generate=generate, steps=steps)
        assert found.seconds == pytest.approx(step)
    assert found.staleness is not None
    assert found.staleness.max == 1
    assert asynchronous_bound(by_hand(generate, learn, sync), setting(schedule)) == pytest.approx(step)


# --- fully asynchronous, by hand --------------------------------------------------------------------


def test_interrupted_replicas_stop_only_for_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    # batch 0 is there at 10 and trained until 16; sync 16 to 17 stops the next four samples at 6 tokens;
    # they end at 21 instead of 20, batch 1 is trained until 27, sync until 28: a step every 11 s
    found = run(monkeypatch, PARTIAL, 6.0, 1.0, record="trace")
    assert found.step_seconds == pytest.approx([11.0] * 6)
    assert found.trace is not None
    ends = [s.end_s for s in found.trace.spans if s.name == SYNC and s.pool == "t"]
    assert ends[:4] == pytest.approx([17, 28, 39, 50])
    assert found.staleness is not None
    assert found.staleness.max == 0  # the last tokens are of the version that is trained
    chained(found)


def test_interrupted_sequences_prefill_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # sync from 16 to 17, then 2 sequences of 10 + 6 tokens on each replica at 0.01 s: 0.32 s; the next
    # samples start at 21.32, the trainer is done at 27.32 with 6 tokens again: 11.32 s every step
    found = run(monkeypatch, PARTIAL, 6.0, 1.0, replica=engine(again=0.01))
    assert found.seconds == pytest.approx(11.32)


def test_without_partial_rollouts_running_requests_drain_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # batch 0 until 10, trained until 16; four samples run since 10 and drain until 20; sync until 21;
    # batch 1 is trained from 21 to 27 while four run from 21 to 31; sync until 32: a step every 11 s
    found = run(monkeypatch, replace(PARTIAL, partial_rollout=False), 6.0, 1.0, record="trace")
    assert found.step_seconds == pytest.approx([11.0] * 6)
    assert found.trace is not None
    ends = [s.end_s for s in found.trace.spans if s.name == SYNC and s.pool == "t"]
    assert ends[:3] == pytest.approx([21, 32, 43])
    assert found.staleness is not None
    assert (found.staleness.mean, found.staleness.max) == (1, 1)


@pytest.mark.parametrize("partial", [True, False])
def test_an_overlapped_sync_leaves_generation_alone(monkeypatch: pytest.MonkeyPatch, partial: bool) -> None:
    schedule = Schedule(staleness=2, partial_rollout=partial, overlapped_sync=True)
    found = run(monkeypatch, schedule, 6.0, 1.0)
    assert found.step_seconds == pytest.approx([10.0] * 6)  # four samples every 10 s
    chained(found)


@pytest.mark.parametrize("eta", [2, 3, 5])
def test_a_slow_trainer_decides_and_samples_become_as_old_as_they_may(
    monkeypatch: pytest.MonkeyPatch, eta: int
) -> None:
    found = run(monkeypatch, replace(PARTIAL, staleness=eta), 30.0, 1.0)
    assert found.step_seconds == pytest.approx([31.0] * 6)
    assert found.staleness is not None
    assert (found.staleness.mean, found.staleness.max) == (eta, eta)
    assert found.interval is None


def test_a_queue_of_one_batch_stops_generation_and_keeps_samples_young(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = run(monkeypatch, replace(PARTIAL, staleness=5), 30.0, 1.0, record="trace")
    made = run(monkeypatch, replace(PARTIAL, staleness=5, queue=1), 30.0, 1.0, record="trace")
    assert made.seconds == pytest.approx(31.0)
    assert made.staleness is not None
    assert free.staleness is not None
    assert made.staleness.mean <= 2 < free.staleness.mean
    for found, least, most in ((free, 12, 20), (made, 0, 4)):
        assert found.trace is not None
        queued = [c.value for c in found.trace.counters if c.name == "queue_samples"]
        assert least <= max(queued) <= most


def test_a_sync_longer_than_a_step_decides_even_when_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(staleness=3, partial_rollout=True, overlapped_sync=True)
    assert run(monkeypatch, schedule, 6.0, 25.0).seconds == pytest.approx(25.0)


def test_a_slow_gpu_slows_one_replica_and_not_the_step_that_others_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(priced_rollout, "rollout_engine", lambda *a: engine())
    made = setting(replace(PARTIAL, staleness=4), rollout=2, train=6)
    noise = Noise(straggler_share=1 / 8, straggler_slowdown=2.0)
    priced = by_hand(10, 6, 1)
    monkeypatch.setattr(stale.Draws, "program", lambda *a: priced)
    monkeypatch.setattr(stale.Draws, "stragglers", frozenset({0}))
    found = simulate(made, SteadyRun(1e5, steps=24, noise=noise, priced=priced))
    # 2 slots at 10 s and 2 at 20 s: 0.3 samples a second, four take 13.3 s, and 1 s of sync
    assert found.seconds == pytest.approx(4 / 0.3 + 1, rel=0.05)


# --- against the synchronous step and the closed form --------------------------------------------------


def test_staleness_zero_is_the_synchronous_step() -> None:
    made = setting(Schedule(), prompts=64, samples=4, lengths=Fixed(value=500))
    priced = program(made, 5e5)
    found = simulate(made, SteadyRun(5e5, steps=3, priced=priced))
    assert found.seconds == pytest.approx(closed_form(priced, Schedule()).seconds, rel=1e-6)
    assert found.staleness is not None
    assert found.staleness.max == 0


def test_staleness_zero_with_a_tail_is_near_the_synchronous_step() -> None:
    made = setting(Schedule(), prompts=64, samples=4, lengths=TAIL)
    priced = program(made, 5e5)
    found = simulate(made, SteadyRun(5e5, steps=6, priced=priced))
    # another deal of the same lengths to the two replicas
    assert found.seconds == pytest.approx(closed_form(priced, Schedule()).seconds, rel=0.03)


@pytest.mark.parametrize("lengths", [TAIL, LogNormal(mean=600, sigma=0.4, max=2000)])
def test_the_steady_state_is_that_of_the_closed_form_where_slots_decide(lengths: AnyLengths) -> None:
    # 512 samples on 32 slots, four batches admitted: what admission and tails add is small
    made = setting(replace(PARTIAL, staleness=4), prompts=512, lengths=lengths, slots=16, train=8)
    priced = program(made, 5e5)
    expected = closed_form(priced, made.placement.schedule).seconds
    assert simulate(made, SteadyRun(5e5, steps=8, priced=priced)).seconds == pytest.approx(expected, rel=0.03)


def test_asynchronous_training_beats_synchronous_unless_its_trainer_is_starved() -> None:
    def seconds_of(schedule: Schedule, rollout: int) -> float:
        made = setting(
            schedule,
            rollout=rollout,
            train=16 - rollout,
            prompts=256,
            samples=4,
            lengths=LogNormal(mean=300, sigma=0.8, max=3000),
        )
        return simulate(made, SteadyRun(4e5, steps=4)).seconds

    sync, balanced, starved = (
        seconds_of(schedule, rollout) for schedule, rollout in ((Schedule(), 8), (PARTIAL, 8), (PARTIAL, 15))
    )
    assert balanced < sync < starved


def test_more_staleness_never_slows_a_run_with_a_long_tail() -> None:
    found = [
        simulate(
            setting(replace(PARTIAL, staleness=eta), prompts=64, lengths=TAIL, train=8),
            SteadyRun(5e5, steps=8),
        ).seconds
        for eta in (1, 2, 4)
    ]
    assert found[0] >= found[1] * (1 - 1e-3) >= found[2] * (1 - 2e-3)


def test_workers_of_an_environment_hold_the_pace_of_answers() -> None:
    made = setting(PARTIAL, prompts=64, samples=4, lengths=Fixed(value=100))
    slow = Environment(turns=4, seconds_per_turn=5.0, workers=64)
    asked = replace(made, workload=replace(made.workload, environment=slow))
    # 256 sequences x 4 turns x 5 s on 64 workers: 80 s a batch
    assert simulate(asked, SteadyRun(5e5, steps=4)).seconds == pytest.approx(80, rel=0.02)
    assert simulate(made, SteadyRun(5e5, steps=4)).seconds < 40


# --- results ----------------------------------------------------------------------------------------


def test_a_run_stops_at_the_cutoff(monkeypatch: pytest.MonkeyPatch) -> None:
    made = setting(PARTIAL, prompts=64, lengths=TAIL)
    whole = simulate(made, SteadyRun(5e5, steps=12))
    stopped = simulate(made, SteadyRun(5e5, steps=12, cutoff=whole.seconds / 2))
    assert stopped.stopped
    assert not whole.stopped
    assert len(stopped.step_seconds) < 12
    assert stopped.seconds > whole.seconds / 2
    assert not simulate(made, SteadyRun(5e5, steps=12, cutoff=whole.seconds * 1.5)).stopped


def test_one_seed_gives_one_result() -> None:
    made = setting(PARTIAL, prompts=32, samples=2, lengths=TAIL)
    noise = Noise(lengths=True, reward_spread=0.5)
    first, again, other = (simulate(made, SteadyRun(5e5, steps=3, seed=s, noise=noise)) for s in (1, 1, 2))
    assert first == again
    assert first.step_seconds != other.step_seconds


def test_batch_means_worked_by_hand() -> None:
    assert interval_of([3.0]) is None
    assert interval_of([3.0] * 5) is None
    # means 1 and 3: sd sqrt 2, t 3.078 at one degree of freedom: 2 -+ 3.078
    assert interval_of([1.0, 3.0]) == pytest.approx((2 - 3.078, 2 + 3.078))
    rng = np.random.default_rng(0)
    covered = [
        a < 5 < b for a, b in (interval_of(rng.exponential(5, 64).tolist()) or (0, 0) for _ in range(400))
    ]
    assert np.mean(covered) == pytest.approx(0.8, abs=0.06)


def test_a_trace_has_every_replica_busy_no_longer_than_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, PARTIAL, 6.0, 1.0, record="trace")
    assert found.trace is not None
    names = {(s.pool, s.group) for s in found.trace.spans if s.name == ROLLOUT}
    assert names == {("r", "replica 0"), ("r", "replica 1")}
    for group in ("replica 0", "replica 1"):
        spans = [s for s in found.trace.spans if s.group == group]
        for before, after in itertools.pairwise(spans):
            assert after.start_s >= before.end_s - 1e-9
    tokens = sum(float(s.attributes["tokens"]) for s in found.trace.spans if s.name == ROLLOUT)
    assert tokens >= (len(found.step_seconds) + 4) * 40  # every batch trained was generated
    versions = [c.value for c in found.trace.counters if c.name == "weight_version"]
    assert versions == list(range(1, len(versions) + 1))


@pytest.mark.parametrize("schedule", [Schedule(staleness=1), PARTIAL, Schedule(staleness=3)])
def test_memory_is_watched_and_the_door_leads_here(schedule: Schedule) -> None:
    made = setting(schedule, prompts=16, lengths=TAIL)
    found = door(made, 5e5, steps=2, record="trace", seed=3)
    assert found.trace is not None
    assert {p.pool for p in found.peaks} == {"r", "t"}
    assert all(0 < p.bytes < p.capacity for p in found.peaks)
    assert found.step_seconds == simulate(made, SteadyRun(5e5, steps=2, seed=3)).step_seconds


# --- bounds -----------------------------------------------------------------------------------------


def test_the_lower_hull_lies_below_its_points() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.random(200), rng.random(200)
    hull = lower_hull(x, y)
    assert (np.interp(x, hull[:, 0], hull[:, 1]) <= y + 1e-12).all()
    assert (np.diff(np.diff(hull[:, 1]) / np.diff(hull[:, 0])) > 0).all()


def test_the_floor_of_an_affine_step_time_worked_by_hand() -> None:
    # tau = 1 + 0.5 n + 0.01 n c on 4 slots: least per token 1/4 + 0.5 + 0.01 c, one batch of 10 + 30
    # tokens after a prompt of 10: 40 x 0.75 + 0.01 (10 x 40 + (100 + 900) / 2) + 2 prefills
    made = floor_of(engine(slots=4, prefill=0.3, each=0.5, read=0.01), np.array([10.0, 30.0]), 2)
    assert made.work == pytest.approx(30 + 9 + 0.6)
    assert made.alpha == pytest.approx(0.75)
    assert made.beta == pytest.approx(0.01)
    # tokens per second at context 10: n / (1 + 0.6 n)
    assert made.rate == pytest.approx([n / (1 + 0.6 * n) for n in range(5)])


def test_the_bound_is_tight_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for learn in (6.0, 30.0):
        found = run(monkeypatch, PARTIAL, learn, 1.0)
        bound = asynchronous_bound(by_hand(10.0, learn, 1.0), setting(PARTIAL))
        assert found.seconds == pytest.approx(bound)


@settings(max_examples=80)
@given(data=st.data())
def test_no_steady_state_is_faster_than_its_bound_nor_staler_than_allowed(data: st.DataObject) -> None:
    draw = data.draw
    schedule = Schedule(
        staleness=draw(st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3, 5])),
        partial_rollout=draw(st.booleans()),
        overlapped_sync=draw(st.booleans()),
        queue=draw(st.sampled_from([None, 0.5, 1, 2.5])),
    )
    prompts, samples = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 80), min_size=prompts * samples, max_size=prompts * samples))
    replica = engine(
        slots=draw(st.integers(1, 12)),
        capacity=draw(st.sampled_from([100.0, 300.0, 1e9])),
        prefill=draw(st.sampled_from([0.0, 2.0])),
        again=draw(st.sampled_from([0.0, 0.01])),
        fixed=draw(st.sampled_from([0.0, 1.0])) + 0.01,
        each=draw(st.sampled_from([0.0, 0.3])),
        read=draw(st.sampled_from([0.0, 0.01])),
    )
    made = setting(
        schedule,
        rollout=draw(st.integers(1, 4)),
        prompts=prompts,
        samples=samples,
        drawn=[float(x) for x in lengths],
    )
    priced = by_hand(draw(st.floats(1, 200)), draw(st.floats(1, 200)), draw(st.floats(0.1, 50)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priced_rollout, "rollout_engine", lambda *a: replica)
        bound = asynchronous_bound(priced, made)
        found = simulate(
            made, SteadyRun(1e5, steps=draw(st.integers(1, 8)), seed=draw(st.integers(0, 9)), priced=priced)
        )
    assert found.seconds >= bound * (1 - 1e-9)
    assert found.staleness is not None
    assert found.staleness.max <= math.ceil(schedule.staleness)
    chained(found)
    consistent(found)


def consistent(found: Simulated) -> None:
    """The mean step is that of the steps told, and lies in its own intervals."""
    assert np.mean(found.step_seconds) == pytest.approx(found.seconds)
    low, high = found.interval or (found.seconds, found.seconds)
    assert low <= found.seconds * (1 + 1e-9)
    assert found.seconds <= high * (1 + 1e-9)
    low, high = found.iteration.cost.interval
    assert low <= found.seconds * (1 + 1e-9)
    assert found.seconds <= high * (1 + 1e-9)


# --- statements about any asynchronous run ------------------------------------------------------------


SHARES = (0.3, 0.6, 0.9)
"""Of the usual response lengths."""


def drawn_run(seed: int, share: float = 1.0, *, noisy: bool = False) -> Simulated:
    """A run with stale samples drawn by its seed; every response `share` as long."""
    rng = np.random.default_rng(seed)
    schedule = Schedule(
        staleness=float(rng.choice([0.5, 1, 1.5, 2, 3, 4])),
        partial_rollout=bool(rng.integers(2)),
        overlapped_sync=bool(rng.integers(2)),
    )
    prompts, samples = int(rng.integers(4, 33)), int(rng.integers(1, 5))
    usual = np.clip(rng.lognormal(5, rng.uniform(0.1, 1.2), prompts * samples), 8, 4000)
    slots, fixed = int(rng.choice([4, 16, 64])), float(rng.uniform(0.2, 2))
    replicas, each, read = int(rng.integers(1, 5)), float(rng.uniform(0, 0.1)), float(rng.uniform(0, 1e-3))
    busy = float(usual.sum()) * (fixed / slots + each) / replicas
    learn, sync = float(rng.uniform(0.2, 2)) * busy, float(rng.uniform(0, 0.1)) * busy + 0.01
    replica = engine(slots=slots, fixed=fixed, each=each, read=read, again=float(rng.choice([0, 1e-4])))
    sigma = LogNormal(mean=share * 150, sigma=0.8, max=share * 2000)
    made = setting(
        schedule,
        rollout=replicas,
        prompts=prompts,
        samples=samples,
        lengths=sigma if noisy else None,
        drawn=None if noisy else (share * usual).tolist(),
    )
    priced = by_hand(busy, learn, sync)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priced_rollout, "rollout_engine", lambda *a: replica)
        patch.setattr(stale.Draws, "program", lambda *a: priced)
        noise = Noise(lengths=True) if noisy else None
        return simulate(made, SteadyRun(1e5, steps=20, seed=seed, priced=priced, noise=noise))


@pytest.mark.parametrize("seed", range(40))
def test_the_mean_of_an_asynchronous_run_is_not_above_its_p90(seed: int) -> None:
    for noisy in (False, True):
        found = drawn_run(seed, noisy=noisy)
        consistent(found)
        assert found.seconds <= np.percentile(found.step_seconds, 90) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_shorter_responses_never_make_an_asynchronous_run_slower(seed: int) -> None:
    times = [drawn_run(seed, share).seconds for share in (*SHARES, 1.0)]
    for shorter, longer in itertools.pairwise(times):
        assert shorter <= 1.005 * longer
