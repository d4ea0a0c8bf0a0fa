"""What a fit finds, what it leaves alone, and when it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_plans import GPU, beliefs, plan, planted_runs, six_plans, truth

from lab.planted import Flaws, planted_run
from rlhfsim.calibration.evidence import evidence
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.identify import NARROWER
from rlhfsim.calibration.left_out import groups, off
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import REST, STEP, pricer_of
from rlhfsim.calibration.priors import prior
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.cost import Z90
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Reward, Rules

QUIET = Flaws(noise=0.002)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(GPU)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    return six_plans()


def runs_of(
    plans: tuple[Plan, ...], profile: Profile, values: dict[str, float], seed: int = 1
) -> tuple[Observation, ...]:
    return planted_runs(
        plans, profile, values, np.random.default_rng(seed), dict.fromkeys(range(len(plans)), QUIET)
    )


@pytest.fixture(scope="module")
def found(plans: tuple[Plan, ...], profile: Profile) -> Calibration:
    """A quiet world in which three coefficients are others than believed."""
    return calibrate(runs_of(plans, profile, PLANTED), profile)


PLANTED = {"rl_layer_time": 3e-3, "controller_time": 2.0, "rollout_step_overhead": 4.5e-3}


def test_planted_values_are_found(found: Calibration) -> None:
    after = {c.name: c.after for c in found.coefficients}
    for name, value in PLANTED.items():
        assert after[name].low <= value <= after[name].high, name
    assert after["controller_time"].value == pytest.approx(2.0, rel=0.01)
    assert after["rollout_step_overhead"].value == pytest.approx(4.5e-3, rel=0.05)


def test_errors_fall_on_runs_that_the_fit_had_not_seen(found: Calibration) -> None:
    steps = [e for e in found.errors if e.phase == STEP]
    assert len(steps) == 6
    before = np.median([off(e.before_s, e.measured_s) for e in steps])
    after = np.median([off(e.after_s, e.measured_s) for e in steps])
    assert before > 0.1
    assert after < 0.02


def test_what_cannot_be_told_is_named_with_its_reason(found: Calibration) -> None:
    reasons = {u.name: u for u in found.unidentified}
    fitted = {c.name for c in found.coefficients}
    assert not fitted & set(reasons)
    assert "of its doubt" in reasons["training_kernel_efficiency"].reason
    assert reasons["overlap_dp"].collinear_with == "rl_layer_time"
    assert "moves the same phases as rl_layer_time" in reasons["overlap_dp"].reason
    assert "others that move the same phases hides it" in reasons["sync_unshard_latency"].reason
    assert all(u.reason for u in found.unidentified)


@pytest.mark.parametrize(("start_s", "sure"), [(1.05, True), (0.35, False)])
def test_of_two_latencies_that_are_added_the_likelier_is_told(
    plans: tuple[Plan, ...], profile: Profile, start_s: float, sure: bool
) -> None:
    """Tensors take 0.1 s of a sync (0.03 to 0.3), its start 0.05 s (0.02 to 0.5): it may be a second, they hardly."""
    fitted = calibrate(runs_of(plans[:3], profile, {START: start_s}), profile, errors=False)
    [found] = [c for c in fitted.coefficients if c.name in (START, TENSORS)]
    assert found.name == START
    assert found.after.low <= start_s <= found.after.high
    assert (found.after.low > 1.001 * found.before.value) == sure, (
        "tensors may have taken a third of a second"
    )
    twins = {u.name: u.collinear_with for u in fitted.unidentified}
    assert twins[TENSORS] == twins["sync_rpc_latency"] == START


START = "sync_start_latency"
TENSORS = "sync_unshard_latency"


def test_every_fitted_interval_is_narrower_than_before_or_it_is_not_fitted(found: Calibration) -> None:
    for c in found.coefficients:
        believed = prior(c.name, c.before)
        assert believed is not None
        width = np.log(c.after.high / max(c.after.low, 1e-300)) / (2 * Z90)
        assert width < 1.3 * max(believed.above, believed.below), c.name
    assert NARROWER < 1


@settings(max_examples=6)
@given(st.integers(0, 10**6))
def test_values_and_intervals_stay_within_their_bounds(seed: int) -> None:
    profile = load_profile(GPU)
    plans = (plan(gpus=4), plan(gpus=4, prompts=16, response=300))
    rng = np.random.default_rng(seed)
    world = truth(beliefs(plans, profile), rng)
    for c in calibrate(planted_runs(plans, profile, world, rng), profile, errors=False).coefficients:
        believed = prior(c.name, c.before)
        assert believed is not None
        tiny = 1e-9
        assert np.exp(believed.least) * (1 - tiny) <= c.after.low <= c.after.value <= c.after.high
        assert c.after.high <= np.exp(believed.most) * (1 + tiny)


def test_an_overlap_of_one_stays_at_most_one(profile: Profile) -> None:
    plans = (plan(), plan(gpus=16, prompt=800))
    found = calibrate(
        runs_of(plans, profile, {"overlap_dp": 1.0, "rl_layer_time": 0.8e-3}), profile, errors=False
    )
    for c in found.coefficients:
        if c.name == "overlap_dp":
            assert c.after.high <= 1.0


def test_runs_as_believed_move_nothing_much(plans: tuple[Plan, ...], profile: Profile) -> None:
    for c in calibrate(runs_of(plans, profile, {}), profile, errors=False).coefficients:
        assert c.after.low <= c.before.value <= c.after.high, c.name


def test_an_outlier_is_named_and_moves_little(plans: tuple[Plan, ...], profile: Profile) -> None:
    flaws = dict.fromkeys(range(6), QUIET) | {1: Flaws(noise=0.002, slowed={"actor.train": 5.0})}
    runs = planted_runs(plans, profile, PLANTED, np.random.default_rng(1), flaws)
    odd = calibrate(runs, profile, errors=False)
    assert any(text.startswith("r1, actor.train: ") for text in odd.outliers)
    value = {c.name: c.after.value for c in odd.coefficients}["rl_layer_time"]
    assert value == pytest.approx(3e-3, rel=0.35)


def test_a_phase_that_no_coefficient_moves_says_nothing_however_far_it_is_off(
    plans: tuple[Plan, ...], profile: Profile
) -> None:
    rules = Reward(model=None, rules=Rules(seconds_per_sample=1e-3, workers=8))
    scored = tuple(replace(p, workload=replace(p.workload, reward=rules)) for p in plans[:2])
    late = [
        replace(run, phases={**run.phases, "rules.score": tuple(20 * t for t in run.phases["rules.score"])})
        for run in runs_of(scored, profile, PLANTED)
    ]
    found = calibrate(late, profile, errors=False)
    assert "rules.score" not in found.mismatch
    assert any("rules.score: no coefficient moves it" in note for note in found.notes)
    assert found.coefficients


def test_missing_phases_are_no_data_and_no_error(plans: tuple[Plan, ...], profile: Profile) -> None:
    gone = Flaws(noise=0.002, missing=frozenset({"actor.train", "actor.sync"}))
    runs = planted_runs(plans, profile, PLANTED, np.random.default_rng(1), dict.fromkeys(range(6), gone))
    found = calibrate(runs, profile)
    assert {e.phase for e in found.errors} & {"actor.train", "actor.sync"} == set()
    after = {c.name: c.after for c in found.coefficients}["controller_time"]
    assert after.low <= 2.0 <= after.high


# --- too few --------------------------------------------------------------------------------------


def test_no_runs_are_refused() -> None:
    with pytest.raises(RlhfsimError) as caught:
        calibrate([])
    assert caught.value.code == "too-few-data"


def test_a_run_without_a_phase_that_can_be_fitted_is_refused(
    plans: tuple[Plan, ...], profile: Profile
) -> None:
    run = replace(runs_of(plans[:1], profile, {})[0], phases={"strange.phase": (1.0, 1.0)}, step_s=())
    with pytest.raises(RlhfsimError, match="no phase of these runs") as caught:
        calibrate([run], profile)
    assert "strange.phase: the cost model has no such phase" in (caught.value.help or "")


def test_one_run_says_that_it_is_one_and_has_no_error_after(
    plans: tuple[Plan, ...], profile: Profile
) -> None:
    found = calibrate(runs_of(plans[:1], profile, {"controller_time": 2.0}), profile)
    assert any("1 distinct run: intervals hold near them only" in note for note in found.notes)
    assert all(e.after_s is None for e in found.errors)


def test_fewer_runs_leave_wider_intervals(plans: tuple[Plan, ...], profile: Profile) -> None:
    def width(count: int) -> float:
        runs = planted_runs(plans[:count], profile, PLANTED, np.random.default_rng(5))
        after = {c.name: c.after for c in calibrate(runs, profile, errors=False).coefficients}
        return float(np.log(after["controller_time"].high / after["controller_time"].low))

    assert width(1) > 1.5 * width(6)


def test_runs_of_two_kinds_of_gpus_need_a_profile(plans: tuple[Plan, ...], profile: Profile) -> None:
    other = runs_of((plan(gpu="a100_sxm"),), load_profile("a100_sxm"), {})
    with pytest.raises(RlhfsimError, match="--profile") as caught:
        calibrate([*runs_of(plans[:1], profile, {}), *other])
    assert caught.value.code == "several-profiles"


def test_repeats_are_left_out_together(plans: tuple[Plan, ...], profile: Profile) -> None:
    twice = (*runs_of(plans[:1], profile, PLANTED, 1), *runs_of(plans[:1], profile, PLANTED, 2))
    assert len(set(groups(twice))) == 1
    assert all(e.after_s is None for e in calibrate(twice, profile).errors)


# --- evidence -------------------------------------------------------------------------------------


def test_a_datum_is_the_median_and_its_scatter_the_standard_error(
    plans: tuple[Plan, ...], profile: Profile
) -> None:
    run = replace(
        runs_of(plans[:1], profile, {})[0], phases={"actor.train": (10.0, 11.0, 12.1, 9.0)}, step_s=()
    )
    [datum], _ = evidence([pricer_of(run, profile)])
    assert datum.seconds == pytest.approx(10.5)
    spread = np.std(np.log([10.0, 11.0, 12.1, 9.0]), ddof=1)
    assert datum.scatter == pytest.approx(np.sqrt(np.pi / 2) * spread / 2)
    assert datum.steps == 4


def test_the_rest_of_the_step_is_what_no_phase_timed(plans: tuple[Plan, ...], profile: Profile) -> None:
    untimed = Flaws(noise=0.002, missing=frozenset({"controller"}))
    run = planted_run(
        plans[0], profile, {"controller_time": 2.0}, np.random.default_rng(1), name="r", flaws=untimed
    )
    data, _ = evidence([pricer_of(run, profile)])
    [rest] = [d for d in data if d.phase == REST]
    assert rest.seconds == pytest.approx(2.0, rel=0.05)
    after = {c.name: c.after for c in calibrate([run], profile).coefficients}["controller_time"]
    assert after.low <= 2.0 <= after.high


def test_a_coefficient_without_an_interval_or_of_zero_is_no_question() -> None:
    assert prior("controller_time", Coefficient(value=1, low=1, high=1, source="x")) is None
    assert prior("controller_time", Coefficient(value=0, low=0, high=1, source="x")) is None


def test_planted_runs_are_repeatable(profile: Profile) -> None:
    made = plan(gpus=4)
    one, two = (planted_run(made, profile, {}, np.random.default_rng(7), name="r") for _ in range(2))
    assert one.phases == two.phases
