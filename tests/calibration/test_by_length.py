"""One run whose lengths vary is a curve: what a step costs at any length is told from what a token costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from planted_plans import GPU, plan, planted_runs

from rlhfsim.calibration.evidence import growths, thirds
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import Observation, StepLengths
from rlhfsim.calibration.predict import BY_LENGTH, STEP, pricer_of
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.workload.measurable import ANSWER, TURNS
from rlhfsim.specs.workload.workload import Environment

RESPONSES = (300, 500, 800, 1200, 1700, 2300)
EACH = 5
"""Steps of each length."""
LAYER_S, SLOWER = 4e-3, 1.3


def varied(values: Mapping[str, float], factors: Mapping[str, float]) -> Observation:
    """A run of verl whose steps have six lengths, in a world with these coefficients and phase factors."""
    profile, rng = load_profile(GPU), np.random.default_rng(3)
    made = replace(plan(model="qwen2.5-7b"), framework="verl")
    [run] = planted_runs((made,), profile, {}, rng)
    phases: dict[str, list[float]] = {}
    lengths = [
        StepLengths(prompt=200.0, response=float(r), longest=float(r)) for r in RESPONSES for _ in range(EACH)
    ]
    for response in RESPONSES:
        seconds = pricer_of(replace(run, response_tokens=float(response)), profile).seconds(values)
        for name in (*run.phases, STEP):
            noise = rng.lognormal(0, 0.01, EACH)
            phases.setdefault(name, []).extend(seconds[name] * factors.get(name, 1.0) * noise)
    mean = float(np.mean([s.response for s in lengths]))
    steps = tuple(phases.pop(STEP))
    return replace(
        run,
        phases={name: tuple(times) for name, times in phases.items()},
        step_s=steps,
        counted=tuple(range(len(steps))),
        lengths=tuple(lengths),
        response_tokens=mean,
    )


def calibrated(run: Observation) -> tuple[Calibration, float, float]:
    """The fit, and how far host seconds of a layer and the factor of training are off, as logarithms."""
    found = calibrate((run,), load_profile(GPU), errors=False)
    [layer] = [c.after.value for c in found.coefficients if c.name == "rl_layer_time"]
    [factor] = [b.factor.value for b in found.biases if b.mode and b.phase == "actor.train"]
    return found, abs(math.log(layer / LAYER_S)), abs(math.log(factor / SLOWER))


def test_a_run_of_many_lengths_tells_fixed_seconds_from_those_of_tokens() -> None:
    run = varied({"rl_layer_time": LAYER_S}, {"actor.train": SLOWER, "actor.logprob": SLOWER})
    found, layer, factor = calibrated(run)
    without, layer_without, factor_without = calibrated(replace(run, lengths=()))
    assert layer < 0.8 * layer_without, (layer, layer_without)
    assert factor < 0.8 * factor_without, (factor, factor_without)
    assert found.data == without.data + 3
    wide, wide_without = ({b.phase: b.factor for b in f.biases if b.mode} for f in (found, without))
    train, train_without = (w["actor.train"].high / w["actor.train"].value for w in (wide, wide_without))
    assert train > 0.8 * train_without  # one run says nothing of how runs differ


def test_a_curve_needs_lengths_that_differ_and_steps_enough() -> None:
    run = varied({}, {})
    short, long = thirds(run) or ((), ())
    assert {run.lengths[i].response for i in short} == {300.0, 500.0}
    assert {run.lengths[i].response for i in long} == {1700.0, 2300.0}
    grown = {g.phase.removesuffix(BY_LENGTH): g.seconds for g in growths(0, run)}
    assert grown["actor.generate"] > 4 > grown["actor.train"] > 1.1
    alike = tuple(replace(s, response=1000.0) for s in run.lengths)
    assert thirds(replace(run, lengths=alike)) is None
    assert thirds(replace(run, lengths=run.lengths[::3])) is None
    assert not list(growths(0, replace(run, lengths=())))


def test_measured_turns_and_answers_stand_in_for_those_of_the_plan() -> None:
    made = plan(model="qwen2.5-7b")
    slow = replace(made.workload, environment=Environment(turns=4, seconds_per_turn=30.0))
    [run] = planted_runs((replace(made, workload=slow),), load_profile(GPU), {}, np.random.default_rng(3))
    assert TURNS not in run.workload
    planned, found = pricer_of(run), pricer_of(replace(run, workload={TURNS: (2.0,), ANSWER: (0.5,)}))
    assert found.setting.workload.environment == replace(
        slow.environment, mean_turns=2.0, seconds_per_turn=0.5
    )
    assert found.seconds()["actor.generate"] < planned.seconds()["actor.generate"] - 60
