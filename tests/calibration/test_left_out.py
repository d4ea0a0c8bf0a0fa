"""A calibration never worsens what it saw: coefficients that would are kept; what all runs share is a bias."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from planted_plans import GPU, plan, planted_runs

from lab.planted import Flaws
from rlhfsim.calibration.fit import WORSENS, Calibration, calibrate
from rlhfsim.calibration.left_out import WORSE
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import STEP, pricer_of
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.what_if.replan import calibrated


def ours(*plans: Plan) -> tuple[Plan, ...]:
    return tuple(replace(p, framework="rlhfsim") for p in plans)


def loss(found: Calibration) -> tuple[float, float]:
    """Mean |ln(predicted / measured)| of left-out steps, before and after."""
    steps = [e for e in found.errors if e.phase == STEP and e.after_s is not None]
    before = [abs(math.log(e.before_s / e.measured_s)) for e in steps]
    after = [abs(math.log((e.after_s or 1.0) / e.measured_s)) for e in steps]
    return sum(before) / len(before), sum(after) / len(after)


def two(
    first: dict[str, float], second: dict[str, float], framework: str | None = None
) -> tuple[Observation, ...]:
    plans = (plan(), plan(prompts=128, response=500))
    made = plans if framework is None else ours(*plans)
    flaws = {0: Flaws(noise=0.002, slowed=first), 1: Flaws(noise=0.002, slowed=second)}
    return planted_runs(made, load_profile(GPU), {}, np.random.default_rng(3), flaws)


def test_a_fit_that_predicts_left_out_steps_worse_keeps_the_old_coefficients_and_says_so() -> None:
    """Two runs whose training was off in opposite directions: each tells the wrong thing about the other."""
    found = calibrate(two({"actor.train": 2.0}, {"actor.train": 0.5}), load_profile(GPU))
    before, after = loss(found)
    assert after <= before + WORSE
    held = [u for u in found.unidentified if u.reason == WORSENS]
    assert held
    kept = {c.name for c in found.coefficients}
    assert not kept & {u.name for u in held}


def test_a_fit_that_predicts_left_out_steps_better_keeps_all_that_it_found() -> None:
    found = calibrate(two({"actor.train": 1.5}, {"actor.train": 1.5}), load_profile(GPU))
    before, after = loss(found)
    assert after < 0.8 * before
    assert not [u for u in found.unidentified if u.reason == WORSENS]


@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_a_phase_off_the_same_way_in_all_runs_is_a_bias_and_the_next_plan_has_it(factor: float) -> None:
    runs = two({"actor.generate": factor}, {"actor.generate": factor}, "rlhfsim")
    found = calibrate(runs, load_profile(GPU))
    assert not [text for text in found.outliers if "actor.generate" in text]
    after = calibrated(found)
    for run in runs:
        cold, now = (pricer_of(run, p).seconds() for p in (load_profile(GPU), after))
        measured = float(np.median(run.step_s))
        assert abs(math.log(now[STEP] / measured)) < 0.5 * abs(math.log(cold[STEP] / measured))
