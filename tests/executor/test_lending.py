"""When the trainer's GPUs are lent, and real runs in which they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import survival

from executor import refusals
from executor.coordination import checkpoints, router
from executor.coordination.replica import Returned
from executor.coordination.router import Lending
from executor.launch import FinishedRun, LaunchOptions, launch
from executor.resolve import Job
from rlhfsim.plan import Plan
from rlhfsim.trace import read_trace


class _Clock:
    """What others do takes the seconds that a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def takes(self, seconds: float, value: Any = None) -> Any:
        """A method that does."""

        def method(*_: Any) -> Any:
            self.now += seconds
            return value

        return method


class _Part:
    def __init__(self, **methods: Any) -> None:
        self.__dict__ |= methods


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(router, "time", clock)
    return clock


def _lending(clock: _Clock) -> Lending:
    """Two lent replicas beside two: 3 s until they generate, 1 s until they sleep."""
    request: Any = None
    parts: dict[str, Any] = {
        "memory": _Part(for_generation=clock.takes(2.0), rest=clock.takes(0.75)),
        "requests": _Part(join=clock.takes(1.0), leave=clock.takes(0.25, Returned([request] * 5, 70))),
        "pool": _Part(actors=[None, None]),
    }
    unused: Any = None
    return Lending(job=unused, route=unused, own=2, **parts)


def test_a_trainer_lends_while_what_is_saved_takes_longer_than_the_way_back(clock: _Clock) -> None:
    lent = _lending(clock)
    waits = []
    for wait_s in (7.0, 10.0, 5.0, 8.0):
        lent.lend(0, 1.0)
        clock.now += wait_s - 3.0 * lent.awake
        done = lent.reclaim(0, 1.0)
        waits.append((done["lend/seconds"], lent.alone_s))
    # alone: 3 + 4 x 2, 3 + 7 x 2, 3 + 2 x 2 s; half of what is beyond 3 s is saved, and 1 s is lost
    assert waits == [(4.0, 11.0), (7.0, 17.0), (2.0, 7.0), (5.0, 13.0)]
    assert (done["lend/tokens"], done["lend/moved"]) == (70, 5)


def test_a_trainer_whose_waits_are_short_keeps_its_gpus_until_they_are_long(clock: _Clock) -> None:
    lent = _lending(clock)
    awake = []
    for wait_s in (3.5, 4.9, 5.1, 9.0):
        lent.lend(0, 1.0)
        awake.append(lent.awake)
        clock.now += wait_s - 3.0 * lent.awake
        done = lent.reclaim(0, 1.0)
        assert bool(done["lend/moved"]) == awake[-1]
    assert awake == [True, False, False, True], "5 s: (5 - 3) / 2 s are saved, as many as are lost"


def test_a_trainer_that_did_not_wait_learns_nothing(clock: _Clock) -> None:
    lent = _lending(clock)
    assert set(lent.reclaim(0, 1.0).values()) == {0.0}
    assert lent.alone_s is None


@pytest.mark.parametrize(("gpus", "refused"), [(2, []), (3, ["lend-idle-gpus"])])
def test_gpus_that_do_not_train_have_no_weights_to_wake_an_engine_with(
    tiny_model: Path, gpus: int, refused: list[str]
) -> None:
    made = _plan(tiny_model)
    train, *others = made.placement.pools
    pools = (replace(train, gpus=gpus), *(replace(pool, start=gpus) for pool in others))
    hardware = tuple(replace(h, gpus=h.gpus + 1, gpus_per_node=h.gpus + 1) for h in made.hardware)
    wide = replace(made, hardware=hardware, placement=replace(made.placement, pools=pools))
    job = Job(plan=wide, settings=runs.settings(tiny_model), model=str(tiny_model), gpu=False, max_prompt=8)
    found = {code: (text, remedy) for code, text, remedy in refusals._reasons(job) if code.startswith("lend")}
    assert list(found) == refused
    if refused:
        text, remedy = found["lend-idle-gpus"]
        assert "lends 3 GPUs and trains on 2 of them" in text
        assert remedy == "give pool 'train' 2 GPUs, or leave lend out"


# --- real runs ----------------------------------------------------------------------------------------


def _plan(model: Path) -> Plan:
    """Two trainers that lend their slots to one replica, whose responses are long enough to wait for."""
    work = {"response_len": {"kind": "fixed", "value": 200}, "mini_batches": 1}
    return runs.plan("lend", "grpo", model, layout={"dp": 2, "zero": 2}, workload=work)


def _check(outcome: FinishedRun, rows: list[dict[str, float]], made: Plan, iterations: int) -> None:
    """Each prompt is trained on once, on tokens that are young enough, some of them from the trainer's slots."""
    assert [row["step"] for row in rows] == list(range(iterations))
    assert sum(row["lend/tokens"] for row in rows) > 0
    assert all(row["staleness/max"] <= made.placement.schedule.staleness for row in rows)
    assert all((row["lend/tokens"] > 0) <= (row["lend/seconds"] > 0) for row in rows)
    found = checkpoints.newest(outcome.files.checkpoints)
    assert found is not None
    position = found.progress.data_position
    assert position["prompts"] + len(position["ahead"]) == iterations * made.workload.prompts


@pytest.mark.slow
def test_lent_slots_generate_for_the_trainer(tiny_model: Path, tmp_path: Path, ray_address: str) -> None:
    made = _plan(tiny_model)
    outcome, heard = runs.run(made, runs.settings(tiny_model, iterations=3), tmp_path / "run", ray_address)
    _check(outcome, heard.rows, made, 3)
    [first, *_] = [row for row in heard.rows if row["staleness/max"] == 0]
    assert first["lend/tokens"] > 0, "nothing is known of the first wait"
    assert first["mismatch/max_abs_dlogp"] < 1e-4
    spans = read_trace(outcome.files.trace).spans
    lent = {s.pool for s in spans if s.name == "actor.generate" and s.group.startswith("lent replica")}
    assert lent == {"train"}
    training = [s for s in spans if s.name == "actor.train"]
    generating = [s for s in spans if s.name == "actor.generate" and s.pool == "train"]
    assert not [(g, t) for g in generating for t in training if g.start_s < t.end_s and t.start_s < g.end_s]


@pytest.mark.long
@pytest.mark.slow
def test_a_lent_replica_dies_and_a_run_that_goes_on_trains_every_prompt_once(
    tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    folder, made = tmp_path / "run", _plan(tiny_model)
    heard = survival.Assassin(folder, {1: "lent replica 1"})
    wanted = survival.settings(tiny_model, every=1, retries=1)
    outcome = launch(made, wanted, LaunchOptions(out=folder, address=ray_address), heard)
    assert [text.startswith("lent replica 1 died") for text in outcome.restarts] == [True]
    _check(outcome, heard.rows[-survival.ITERATIONS :], made, survival.ITERATIONS)
