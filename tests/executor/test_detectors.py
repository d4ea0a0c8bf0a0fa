from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from executor.coordination.detectors import Detectors, Expected, expected, findings
from executor.coordination.out_of_memory import is_out_of_memory, out_of_memory
from rlhfsim.api import estimate_file
from rlhfsim.plan import Plan, PredictedPhase

GENERATE = PredictedPhase(
    name="actor.generate",
    pool="all",
    start_s=0.0,
    seconds=10.0,
    low_s=8.0,
    high_s=14.0,
    bound_by="hbm",
    by_resource_s={},
    rests_on=(),
    critical=True,
)
PLAN = Expected(generate=GENERATE, staleness=2.0, kept=0.5)
Row = dict[str, float]


def healthy(seed: int, steps: int = 120) -> list[Row]:
    """A run that learns, with the noise of small batches: correlated rewards, heavy-tailed gradients,
    drifts."""
    rng = np.random.default_rng(seed)
    moved = np.random.default_rng([seed, 1])
    progress = np.linspace(0, rng.uniform(0, 1), steps)
    drift = np.zeros(steps)
    for i in range(1, steps):
        drift[i] = 0.9 * drift[i - 1] + 0.02 * rng.standard_normal()
    spread = rng.uniform(0.3, 0.6)
    reward = (
        0.2
        + 0.6 * progress
        + drift
        + spread / math.sqrt(rng.choice([8, 32, 128])) * rng.standard_normal(steps)
    )
    kl = 0.03 * progress * rng.lognormal(0, 0.5, steps)
    return [
        {
            "step": i,
            "reward/mean": reward[i],
            "reward/std": spread * rng.lognormal(0, 0.1),
            "policy/loss": 0.02 * rng.standard_t(4),
            "value/loss": 0.3 * rng.lognormal(0, 0.4),
            "policy/grad_norm": 0.6 * rng.lognormal(0, 0.5),
            "value/grad_norm": 3 * rng.lognormal(0, 0.5),
            "policy/entropy": 0.8 - 0.6 * progress[i] + 0.02 * rng.standard_normal(),
            "policy/clip_fraction": abs(0.05 * rng.standard_normal()),
            "kl/mean": kl[i],
            "response/truncated": rng.beta(1, 12),
            "mismatch/mean_abs_dlogp": 0.005 * rng.lognormal(0, 0.6),
            "staleness/mean": rng.uniform(0, 1.9),
            "staleness/mean_abs_dlogp": 0.3 * moved.lognormal(0, 0.3),
            "staleness/max": float(rng.integers(0, 3)),
            "time/actor.generate": 11 * rng.lognormal(0, 0.1) + (30 if i == 0 else 0),
            "time/step": 40.0,
        }
        for i in range(steps)
    ]


def with_last(history: list[Row], steps: int, **values: float) -> list[Row]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return history[:-steps] + [row | named for row in history[-steps:]]


def without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


def codes(history: list[Row], plan: Expected = PLAN) -> list[str]:
    return [finding.code for finding in findings(history, plan)]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_healthy_runs_raise_no_alarm_in_any_step(first: int) -> None:
    for seed in range(first, first + 10):
        history = healthy(seed)
        if seed % 2:  # all samples are of older weights
            history = [without(row, "mismatch/mean_abs_dlogp") for row in history]
        alarms = [str(f) for n in range(1, len(history) + 1) for f in findings(history[:n], PLAN)]
        assert not alarms, (seed, alarms)


def test_a_solved_task_with_a_rare_miss_is_no_falling_reward() -> None:
    rewards = [1.0] * 40 + [0.97] + [1.0] * 4 + [0.98]
    rows = [
        {"step": float(i), "reward/mean": r, "reward/std": 0.0 if r == 1 else 0.1}
        for i, r in enumerate(rewards)
    ]
    assert "reward-falling" not in {c for n in range(1, len(rows) + 1) for c in codes(rows[:n])}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("code", "plant"),
    [
        ("not-finite", lambda h: with_last(h, 1, policy__loss=math.nan)),
        ("not-finite", lambda h: with_last(h, 1, value__grad_norm=math.inf)),
        ("exploding", lambda h: with_last(h, 2, policy__loss=-3.0)),
        ("exploding", lambda h: with_last(h, 2, value__loss=40.0)),
        ("exploding", lambda h: h[:-8] + [r | {"policy/grad_norm": 2.0**i} for i, r in enumerate(h[-8:])]),
        ("kl-blow-up", lambda h: with_last(h, 2, kl__mean=0.9)),
        ("rewards-equal", lambda h: with_last(h, 3, reward__std=0.0)),
        (
            "reward-falling",
            lambda h: [
                r | {"reward/mean": r["reward/mean"] + (1.5 if i < 100 else 0)} for i, r in enumerate(h)
            ],
        ),
        ("entropy-collapsed", lambda h: with_last(h, 3, policy__entropy=0.01)),
        ("responses-truncated", lambda h: with_last(h, 3, response__truncated=0.6)),
        ("logprob-mismatch", lambda h: with_last(h, 1, mismatch__mean_abs_dlogp=0.2)),
        (
            "logprob-mismatch",
            lambda h: [
                without(r, "mismatch/mean_abs_dlogp") for r in with_last(h, 2, staleness__mean_abs_dlogp=1.5)
            ],
        ),
        ("rollouts-stale", lambda h: with_last(h, 1, staleness__max=5.0)),
        ("rollouts-stale", lambda h: with_last(h, 3, staleness__mean=1.8, policy__clip_fraction=0.5)),
        ("groups-kept", lambda h: with_last(h, 3, sampling__kept_share=0.2)),
        ("generation-slow", lambda h: with_last(h, 3, **{"time__actor.generate": 20.0})),
    ],
)
def test_what_was_planted_is_found_and_nothing_else(
    code: str, plant: Callable[[list[Row]], list[Row]], seed: int
) -> None:
    assert codes(plant(healthy(seed))) == [code]


@pytest.mark.parametrize(
    "values",
    [
        {"policy__grad_norm": 50.0},
        {"policy__loss": 9.0},
        {"kl__mean": 0.9},
        {"reward__std": 0.0},
        {"response__truncated": 0.9},
        {"time__actor.generate": 99.0},
    ],
)
def test_one_odd_step_is_no_alarm(values: Row) -> None:
    assert codes(with_last(healthy(0), 1, **values)) == []


def test_a_kl_that_jumps_far_above_its_usual_is_found_below_the_absolute_limit() -> None:
    history = [row | {"kl/mean": 0.01} for row in healthy(0)]
    assert codes(with_last(history, 2, kl__mean=0.2)) == ["kl-blow-up"]


def test_only_numbers_that_are_none_stop_the_run() -> None:
    history = with_last(healthy(0), 3, reward__std=0.0, response__truncated=0.9)
    assert {f.severity for f in findings(history, PLAN)} == {"warn"}
    (stop,) = findings(with_last(history, 1, kl__mean=math.nan), PLAN)
    assert stop.severity == "stop"
    assert "kl/mean is nan in iteration 120" in stop.what


def test_fields_that_a_run_lacks_raise_nothing() -> None:
    assert findings([], PLAN) == ()
    assert codes([{"step": float(i)} for i in range(50)]) == []


def test_slow_generation_is_said_against_the_prediction() -> None:
    history = with_last(healthy(0), 3, **{"time__actor.generate": 20.0})
    (finding,) = findings(history, PLAN)
    assert "takes 20 s (50% of the step), predicted 10 s (8 s to 14 s)" in finding.what
    assert codes(history, replace(PLAN, generate=None)) == []


def test_equal_rewards_say_which_and_what_to_try() -> None:
    (finding,) = findings(with_last(healthy(0), 3, reward__std=0.0, reward__mean=1.0), PLAN)
    assert "has reward 1" in finding.what
    assert "check the reward" in finding.advice


def test_a_finding_is_said_once_and_again_when_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    detectors = Detectors(PLAN)
    history = healthy(0)
    bad = {"mismatch/mean_abs_dlogp": 0.3}
    said = []
    with caplog.at_level(logging.WARNING):
        for i, row in enumerate(history[:6]):
            history[i] = row | (bad if i in (1, 2, 5) else {})
            said.append(len(detectors.look(history[: i + 1])))
    assert said == [0, 1, 0, 0, 0, 1]
    assert caplog.text.count("logprob-mismatch") == 2


# --- memory -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate_file("xtuner-rlhf")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        ValueError("No available memory for the cache blocks."),
        OSError(12, "Cannot allocate memory"),
        type("OutOfMemoryError", (RuntimeError,), {})("task was killed"),
    ],
)
def test_every_library_s_words_for_out_of_memory_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    outer = RuntimeError("actor rank 0 raised")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


def test_other_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_out_of_memory_shows_the_ledger_of_its_phase_and_the_planner_s_remedy(plan: Plan) -> None:
    finding = out_of_memory(plan, "actor.train", "actor rank 3", lambda: "micro_batch: 2")
    assert finding.severity == "stop"
    assert "actor rank 3 ran out of memory in actor.train; the plan has there" in finding.what
    assert "actor optimizer" in finding.what
    assert finding.advice == "micro_batch: 2"


def test_out_of_memory_in_an_unpriced_phase_falls_back_to_the_peak(plan: Plan) -> None:
    finding = out_of_memory(plan, "self-check", "actor rank 0", lambda: None)
    assert f"peaks in {plan.prediction.peak_phase}" in finding.what
    assert "smaller micro-batch" in finding.advice


def test_the_ledger_that_is_shown_adds_up_to_the_predicted_peak(plan: Plan) -> None:
    from rlhfsim.units import format as shown

    finding = out_of_memory(plan, plan.prediction.peak_phase, "x")
    assert shown(plan.prediction.peak_memory_bytes, "byte") in finding.what


def test_expectations_come_from_the_plan(plan: Plan) -> None:
    found = expected(plan)
    assert found.generate is not None
    assert found.generate.name == "actor.generate"
    assert expected(plan, priced_here=False).generate is None


def test_seconds_of_other_hardware_are_not_compared(plan: Plan) -> None:
    slow = [{"time/actor.generate": 1e6} for _ in range(9)]
    assert Detectors(plan).look(slow) == ()
    assert [f.code for f in Detectors(plan, priced_here=True).look(slow)] == ["generation-slow"]
