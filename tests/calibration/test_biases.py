"""What a framework's runs have in common carries to its other runs, and plans are priced with it as validated."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from planted_plans import GPU, plan, planted_runs, six_plans

from rlhfsim.api import estimate
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.predict import cluster_with, nodes_of, pricer_of
from rlhfsim.calibration.profile_writer import write_profile
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.calibrated import FrameworkBiases, NearRun, PhaseBias, Point, beyond, bias_of
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text, profile_hash, profile_yaml
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.step.engine_mode import bias, mode_of
from rlhfsim.step.region import apart, point
from rlhfsim.what_if.replan import calibrated

TRUE = {"actor.generate": 1.8, "actor.train": 1.5, "actor.logprob": 1.4, "reference.logprob": 1.4}


def factor(value: float, phase: str = "", mode: str = "") -> PhaseBias:
    known = Coefficient(value=value, low=value / 1.2, high=value * 1.2, source="planted")
    return PhaseBias(phase=phase, mode=mode, factor=known)


def slower(profile: Profile, factors: dict[str, float]) -> Profile:
    entries = tuple(factor(value, phase) for phase, value in factors.items())
    return replace(profile, biases={"verl": FrameworkBiases(runs=1, phases=entries)})


def of_verl(*plans: Plan) -> tuple[Plan, ...]:
    return tuple(replace(p, framework="verl") for p in plans)


def planted(plans: tuple[Plan, ...], framework: str = "verl") -> Calibration:
    profile, rng = load_profile(GPU), np.random.default_rng(7)
    runs = planted_runs(plans, slower(profile, TRUE), {}, rng)
    runs = tuple(replace(run, plan=replace(run.plan, framework=framework)) for run in runs)
    return calibrate(runs, profile)


@pytest.fixture(scope="module")
def three() -> Calibration:
    return planted(of_verl(*six_plans()[1:4]))


def test_one_run_already_helps_another() -> None:
    one, other = of_verl(plan(), plan(model="qwen2.5-7b", tp=2))
    found = planted((one,))
    known = slower(load_profile(GPU), {b.phase: b.factor.value for b in found.biases if b.mode})
    [run] = planted_runs((other,), slower(load_profile(GPU), TRUE), {}, np.random.default_rng(8))
    measured = float(np.median(run.step_s))
    before = pricer_of(run, load_profile(GPU)).seconds()["step"]
    after = pricer_of(run, known).seconds()["step"]
    assert abs(after / measured - 1) < 0.15 < abs(before / measured - 1)


def test_planted_calls_lie_in_their_intervals(three: Calibration) -> None:
    """Factor and coefficients share what only their product tells, so calls are compared."""
    known, true = calibrated(three), slower(load_profile(GPU), TRUE)
    for made in of_verl(*six_plans()[1:6]):
        found, right = (
            {
                p.name: p
                for p in estimate(made.placement, made.workload, cluster_with(made, on)).prediction.phases
            }
            for on in (known, true)
        )
        for phase in TRUE:
            assert found[phase].low_s < right[phase].seconds < found[phase].high_s, phase
            assert found[phase].seconds == pytest.approx(right[phase].seconds, rel=0.05)


def test_what_runs_have_in_common_is_no_worse_than_one_factor_a_phase(three: Calibration) -> None:
    steps = [e for e in three.errors if e.phase == "step"]
    after = np.median([abs(e.after_s / e.measured_s - 1) for e in steps if e.after_s])
    by_factor = np.median([abs(e.factor_s / e.measured_s - 1) for e in steps if e.factor_s])
    assert after < 0.1
    assert after < by_factor + 0.02


def test_the_interval_of_one_run_is_that_of_runs_and_not_of_its_few_times() -> None:
    found = {b.phase: b.factor for b in planted(of_verl(plan())).biases if b.mode}
    for phase, true in TRUE.items():
        assert found[phase].low < true < found[phase].high, phase
        assert np.log(found[phase].high / found[phase].value) < 0.5, phase  # 0.64 by t of two


def test_a_mode_that_fitted_the_costs_is_moved_by_its_own_runs_alone() -> None:
    assert len(nodes_of("verl", "actor.train", "packed")) == 3
    assert len(nodes_of("verl", "actor.train", "packed lora")) == 1
    known = FrameworkBiases(runs=1, phases=(factor(2.0), factor(1.5, "actor.train")))
    assert bias_of(known, "actor.train", "packed lora", own_mode=True) is None
    assert bias_of(known, "actor.train", "packed lora") == known.phases[1]
    slow = replace(load_profile(GPU), biases={"verl": known})
    [made] = of_verl(plan())
    adapters = replace(made.workload, lora=Lora(rank=16))
    cluster = cluster_with(made, slow)
    own = bias("actor.train", 1e9, made.placement, made.workload, cluster)
    assert own is not None
    assert own.factor == known.phases[1].factor
    assert bias("actor.train", 1e9, made.placement, replace(adapters, packing=True), cluster) is None


def test_calls_share_a_part_of_what_they_are_off_by_and_moves_none() -> None:
    phases = estimate(
        plan().placement, plan().workload, cluster_with(plan(), load_profile(GPU))
    ).prediction.phases
    three = [
        replace(phases[0], name=name, seconds=10.0, low_s=10 - d, high_s=10 + d)
        for name, d in zip("abc", (1, 2, 4), strict=True)
    ]
    assert apart(three, {"a": 1.0, "b": 1.0}) == pytest.approx((5.0, 5.0))  # hypot(1 + 2, 4)
    assert apart(three, {"a": 0.0, "b": 0.0}) == pytest.approx((math.sqrt(21),) * 2)
    both = math.sqrt((0.5 + 2 * math.sqrt(0.75)) ** 2 + 0.75 + 1 + 16)
    assert apart(three, {"a": 0.25, "b": 0.75}) == pytest.approx((both, both))


def at(made: Plan) -> Point:
    return point("actor.generate", made.models, made.workload, made.placement)


def test_what_a_run_took_beyond_the_factor_holds_for_a_plan_like_it_alone() -> None:
    """One phase of one of two runs takes 1.6 times as long: its own plan again does, one far away does not."""
    one, other, far = of_verl(
        plan(), plan(prompts=512), plan(gpus=64, prompts=4096, model="qwen2.5-32b", tp=8)
    )
    runs = planted_runs((one, other), load_profile(GPU), {}, np.random.default_rng(7))
    slow = {**runs[0].phases, "actor.train": tuple(1.6 * t for t in runs[0].phases["actor.train"])}
    fitted = calibrate((replace(runs[0], phases=slow), runs[1]), load_profile(GPU), errors=False)
    known = calibrated(fitted)
    again, beside, away = (
        seconds(p, known) / seconds(p, replace(known, biases={})) for p in (one, other, far)
    )
    assert again > 1.1 * away
    assert beside < away < again
    measured = float(np.median(slow["actor.train"])) / seconds(one, replace(known, biases={}))
    assert again == pytest.approx(measured, rel=0.1)


def seconds(made: Plan, profile: Profile) -> float:
    priced = estimate(made.placement, made.workload, cluster_with(made, profile))
    return next(p.seconds for p in priced.prediction.phases if p.name == "actor.train")


def test_near_runs_fade_with_the_distance_and_share_by_it() -> None:
    zero, one = (0.0,) * 5, (1.0, 0.0, 0.0, 0.0, 0.0)
    runs = [NearRun(at=zero, log=0.4, reach=1.0), NearRun(at=one, log=0.2, reach=1.0)]
    rho = math.exp(-0.5)
    assert beyond((), zero) == 0
    assert beyond(runs[:1], one) == pytest.approx(0.4 * rho)
    assert beyond(runs, zero) == pytest.approx((0.4 + 0.2 * rho) / (1 + rho))
    assert beyond(runs, (200.0, 0.0, 0.0, 0.0, 0.0)) == 0


def test_our_own_executor_has_no_bias() -> None:
    assert planted(of_verl(plan()), framework="rlhfsim").biases == ()


def test_a_plan_is_priced_with_the_profile_as_the_fit_did(three: Calibration, tmp_path: Path) -> None:
    written = write_profile(tmp_path / "verl-h100.yaml", three)
    run = three.observations[0]
    before, after = (pricer_of(run, p).seconds() for p in (three.profile, written))
    whole = {b.phase: b.factor.value for b in three.biases if b.mode}
    generated = after["actor.generate"] / before["actor.generate"]
    [near] = [b.near for b in three.biases if b.phase == "actor.generate" and b.mode]
    more = math.exp(beyond(near, at(run.plan)))
    assert generated == pytest.approx(whole["actor.generate"] * more, rel=1e-3)
    cluster = cluster_with(run.plan, written)
    priced = estimate(run.plan.placement, run.plan.workload, cluster)
    seconds = {phase.name: phase.seconds for phase in priced.prediction.phases}
    assert seconds["actor.generate"] == pytest.approx(after["actor.generate"])


def test_intervals_of_a_plan_are_those_of_the_factors(three: Calibration, tmp_path: Path) -> None:
    written = write_profile(tmp_path / "verl-h100.yaml", three)
    run = three.observations[0].plan
    priced = estimate(run.placement, run.workload, cluster_with(run, written))
    [phase] = [p for p in priced.prediction.phases if p.name == "actor.train"]
    [known] = [b.factor for b in three.biases if b.phase == "actor.train" and b.mode]
    assert phase.high_s / phase.seconds == pytest.approx(known.high / known.value, rel=0.05)
    assert priced.prediction.low_s < priced.prediction.step_s < priced.prediction.high_s


def test_the_file_holds_facts_and_no_path(three: Calibration, tmp_path: Path) -> None:
    write_profile(tmp_path / "verl-h100.yaml", three)
    text = (tmp_path / "verl-h100.yaml").read_text()
    assert str(tmp_path) not in text
    section = yaml.safe_load(text)["biases"]["verl"]
    assert section["version"] == 1
    assert section["runs"] == 3
    assert {"factor", "common"} <= set(section["phases"][0]) <= {"phase", "mode", "factor", "common", "near"}


def test_a_profile_without_biases_keeps_its_hash_and_text() -> None:
    profile = load_profile(GPU)
    assert "biases" not in profile_yaml(profile)
    assert profile_hash(profile) != profile_hash(slower(profile, TRUE))


def test_the_closest_entry_holds() -> None:
    known = FrameworkBiases(
        runs=1, phases=(factor(1.1), factor(1.5, "actor.train"), factor(2.0, "actor.train", "padded"))
    )
    values = [
        (found.factor.value if (found := bias_of(known, *name)) else None)
        for name in (("actor.train", "padded"), ("actor.train", "packed"), ("critic.value", "packed"))
    ]
    assert values == [2.0, 1.5, 1.1]


def test_modes_are_named_by_what_the_plan_says() -> None:
    made = plan()
    assert mode_of("actor.train", made.placement, made.workload) in ("packed", "padded")
    layout = replace(made.placement.rollout.layout, cuda_graphs=False)  # type: ignore[union-attr]
    eager = replace(made.placement, rollout=replace(made.placement.rollout, layout=layout))  # type: ignore[type-var]
    assert mode_of("actor.generate", eager, made.workload) == "eager"
    assert mode_of("actor.sync", made.placement, made.workload) == "ipc"


def test_a_factor_that_is_none_is_refused_with_its_place() -> None:
    text = (
        "name: mine\ntitle: mine\nextends: h100_sxm\nbiases:\n  verl:\n    runs: 1\n    phases:\n"
        "    - factor: {value: 1.0, low: 0.0, high: 2.0, source: test}\n"
    )
    with pytest.raises(RlhfsimError, match="factor"):
        profile_from_text(text)
