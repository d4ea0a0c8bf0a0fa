"""Trainers that lend their GPUs to the rollout: a timetable by hand, bounds, both states of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.ledger import ledger
from rlhfsim.simulation.asynchronous import priced_rollout
from rlhfsim.simulation.asynchronous import run as asynchronous
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine
from rlhfsim.simulation.asynchronous.priced_rollout import continuous_bound, lent_replicas
from rlhfsim.simulation.asynchronous.run import SteadyRun, simulate
from rlhfsim.simulation.result import Simulated
from rlhfsim.specs.placement.placement import Placement, Schedule
from rlhfsim.specs.scenario import check_placement
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import switch_seconds
from rlhfsim.step.timetable import ROLLOUT, SYNC
from tests.simulation.test_asynchronous import by_hand, engine, setting

LENT = Schedule(staleness=2, partial_rollout=True, lend=True)


def run(
    monkeypatch: pytest.MonkeyPatch,
    made: CallSetting,
    replica: ReplicaEngine,
    learn: float,
    sync: float,
    switches: tuple[float, float],
    **more: Any,
) -> Simulated:
    monkeypatch.setattr(priced_rollout, "rollout_engine", lambda *a: replica)
    monkeypatch.setattr(asynchronous, "switch_seconds", lambda *a: switches)
    return simulate(made, SteadyRun(1e5, priced=by_hand(1.0, learn, sync), **more))


# --- the clock ----------------------------------------------------------------------------------------


def test_the_trainers_gpus_generate_while_it_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # One replica of two slots, ten tokens at a second each, four samples a batch: one every 20 s. Batch 0 is
    # there at 20, trained until 22, sync until 23; batch 1 at 41 (pause of 1 s), sync until 44. Now 4 samples
    # took 24 s; 21 s are left, of which a second replica saves (21 - 1) / 2, more than the second back. From
    # 45 on it runs two samples, which with the two that end at 52 are a batch at 55: step 2 ends at 59.
    made = setting(LENT, rollout=1, train=1, prompts=4, lengths=Fixed(value=10))
    found = run(monkeypatch, made, engine(), 2.0, 1.0, (1.0, 1.0), steps=6, record="trace")
    assert found.trace is not None
    ends = [s.end_s for s in found.trace.spans if s.name == SYNC and s.pool == "t"]
    assert ends[:3] == pytest.approx([23, 44, 59])
    lent = [(s.start_s, s.end_s) for s in found.trace.spans if s.name == ROLLOUT and s.pool == "t"]
    assert lent[0] == pytest.approx((45, 55))
    assert found.staleness is not None
    assert 0 < found.staleness.lent < 1
    alone = setting(replace(LENT, lend=False), rollout=1, train=1, prompts=4, lengths=Fixed(value=10))
    assert found.seconds < run(monkeypatch, alone, engine(), 2.0, 1.0, (1.0, 1.0), steps=6).seconds


def test_a_conversation_that_leaves_lent_gpus_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of its environment stays behind, so its tokens are generated again; no slower than without."""
    talk = Environment(turns=1, seconds_per_turn=1e-9, workers=1000)
    steps = {}
    for environment in (None, talk):
        made = setting(LENT, rollout=1, train=1, prompts=4, lengths=Fixed(value=12))
        made = replace(made, workload=replace(made.workload, environment=environment))
        found = run(monkeypatch, made, engine(), 2.0, 1.0, (1.0, 1.0), steps=12)
        steps[environment] = found.seconds
    assert steps[None] < steps[talk]
    alone = setting(replace(LENT, lend=False), rollout=1, train=1, prompts=4, lengths=Fixed(value=12))
    alone = replace(alone, workload=replace(alone.workload, environment=talk))
    assert steps[talk] <= run(monkeypatch, alone, engine(), 2.0, 1.0, (1.0, 1.0), steps=12).seconds * (
        1 + 1e-9
    )


def test_nothing_is_lent_where_training_is_slower_or_switches_take_longer_than_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = setting(LENT, rollout=1, train=1, prompts=4, lengths=Fixed(value=10))
    for learn, switches in ((40.0, (1.0, 1.0)), (2.0, (1.0, 12.0))):
        found = run(monkeypatch, made, engine(), learn, 1.0, switches, steps=6)
        assert found.staleness is not None
        assert found.staleness.lent == 0


@pytest.mark.parametrize("seed", range(12))
def test_lending_lies_between_the_same_plan_without_it_and_what_all_gpus_could_do(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    replica = engine(
        slots=int(rng.choice([2, 4, 16])),
        fixed=float(rng.choice([0.01, 0.1])),
        each=float(rng.choice([0, 1e-3, 1e-2])),
        again=float(rng.choice([0, 1e-5])),
    )
    learn, sync = float(rng.choice([1, 10, 50])), float(rng.choice([0.1, 2]))
    switches = float(rng.choice([0.2, 3])), float(rng.choice([0.2, 3]))
    shape: dict[str, Any] = {
        "rollout": int(rng.choice([1, 2, 4])),
        "train": int(rng.choice([2, 4, 8])),
        "prompts": int(rng.choice([8, 16])),
        "lengths": LogNormal(mean=100, sigma=0.7, max=800),
    }
    schedule = replace(LENT, staleness=float(rng.choice([0.5, 1, 2, 4])))
    lent, alone = (setting(replace(schedule, lend=lend), **shape) for lend in (True, False))
    found, without = (
        run(monkeypatch, made, replica, learn, sync, switches, steps=10) for made in (lent, alone)
    )
    assert found.seconds <= without.seconds
    there = lent_replicas(lent.placement)
    share = there / (there + shape["rollout"])  # which works while the trainer's calls do not
    least = max(learn, continuous_bound(lent, 1e5) + share * learn) + sync
    assert found.seconds >= least * (1 - 1e-9)
    assert continuous_bound(lent, 1e5) < continuous_bound(alone, 1e5)
    assert found.staleness is not None
    assert found.staleness.max <= np.ceil(schedule.staleness) + 1


def test_verl_omnis_gain_comes_out_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    # verl-omni #575, one standalone and two hybrid GPUs: 377.9 s a step without switching, of it 130.4 s
    # waiting for samples; 9.1 s to the rollout, 3.3 s back; 307.8 s with it (its samples start anew, ours go on)
    made = setting(LENT, rollout=1, train=2, prompts=32, lengths=Fixed(value=100))
    alone = replace(made, placement=replace(made.placement, schedule=replace(LENT, lend=False)))
    replica = engine(slots=4, fixed=377.9 * 4 / 32 / 100)
    off, on = (
        run(monkeypatch, each, replica, 247.5, 0.01, (9.1, 3.3), steps=8).seconds for each in (alone, made)
    )
    assert off == pytest.approx(377.9, rel=0.02)
    assert on == pytest.approx(307.8, rel=0.1)
    assert on / off == pytest.approx(307.8 / 377.9, rel=0.1)


# --- memory and prices --------------------------------------------------------------------------------


def test_the_trainers_pool_holds_the_engine_asleep_and_awake() -> None:
    made = setting(LENT)
    alone = replace(made, placement=replace(made.placement, schedule=replace(LENT, lend=False)))
    lent, own = (
        {p.name: p for p in ledger(s.models, s.placement, s.workload, s.cluster).phases if p.pool == "t"}
        for s in (made, alone)
    )
    assert ROLLOUT not in own
    awake = {e.component for e in lent[ROLLOUT].entries if e.role == "rollout"}
    asleep = {e.component for e in lent["actor.train"].entries if e.role == "rollout"}
    assert "kv_cache" in awake
    assert asleep
    assert "kv_cache" not in asleep
    assert lent["actor.train"].bytes > own["actor.train"].bytes


def test_a_switch_takes_wake_weights_and_sleep() -> None:
    into, back = switch_seconds(setting(LENT), 1e5)
    assert into > back > 0


def test_memory_is_on_the_clock_in_both_states() -> None:
    found = simulate(setting(LENT), SteadyRun(1e5, steps=2, record="memory"))
    alone = simulate(setting(replace(LENT, lend=False)), SteadyRun(1e5, steps=2, record="memory"))
    lent, own = ({p.pool: p.bytes for p in run.peaks} for run in (found, alone))
    assert lent["t"] > own["t"]
    assert lent["r"] == own["r"]


# --- what cannot be lent ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [replace(LENT, partial_rollout=False), replace(LENT, overlapped_sync=True)]
)
def test_requests_must_be_able_to_go_on_elsewhere(schedule: Schedule) -> None:
    made = setting(schedule)
    with pytest.raises(RlhfsimError, match="go on elsewhere"):
        check_placement(made.placement, made.workload, made.models, made.cluster)


def test_a_replica_must_fit_on_the_trainers_gpus() -> None:
    made = setting(LENT, rollout=4, train=2)
    assert made.placement.rollout is not None
    layout = replace(made.placement.rollout.layout, tp=4, dp=1)
    wide: Placement = replace(made.placement, rollout=replace(made.placement.rollout, layout=layout))
    with pytest.raises(RlhfsimError, match="no replica fits"):
        check_placement(wide, made.workload, made.models, made.cluster)
