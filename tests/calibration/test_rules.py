"""What rules took in runs is what the next plan that states the same takes for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_plans import GPU, plan, planted_runs

from lab.planted import Flaws, planted_trace
from rlhfsim.api import estimate
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import Observation, observe
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.calibration.profile_writer import rules_after, write_profile
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.workload.workload import Rules, Workload
from rlhfsim.step.rule_rewards import MEASURED, STATED

SLOW = 40.0
"""Times as long as their workload states rules take in the planted runs."""
STATED_S = Rules().seconds_per_sample


def with_rules(work: Workload, seconds: float) -> Workload:
    return replace(work, reward=replace(work.reward, rules=Rules(seconds_per_sample=seconds)))


@pytest.fixture(scope="module")
def runs() -> tuple[Observation, ...]:
    stated = (plan(),)
    true = [replace(p, workload=with_rules(p.workload, SLOW * STATED_S)) for p in stated]
    made = planted_runs(tuple(true), load_profile(GPU), {}, np.random.default_rng(1), {0: Flaws(noise=0.01)})
    return tuple(replace(run, plan=p) for run, p in zip(made, stated, strict=True))


@pytest.fixture(scope="module")
def fitted(runs: tuple[Observation, ...]) -> Calibration:
    return calibrate(runs, errors=False)


@pytest.fixture(scope="module")
def first(fitted: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return write_profile(tmp_path_factory.mktemp("profiles") / "ours.yaml", fitted)


def rules_phase(planned: Plan) -> tuple[float, float, tuple[str, ...]]:
    [phase] = [phase for phase in planned.prediction.phases if phase.name == "rules.score"]
    return phase.seconds, phase.high_s, phase.rests_on


def test_a_planted_cost_of_rules_reaches_the_next_plan_by_the_calibrated_profile(first: Profile) -> None:
    before = plan()
    [measured] = first.rules
    assert measured.stated == STATED_S
    assert measured.seconds_per_sample.value == pytest.approx(SLOW * STATED_S, rel=0.02)
    cluster = Cluster(node_groups=(node_group(first, 8),))
    after = estimate(before.placement, before.workload, cluster)
    seconds, high, rests_on = rules_phase(after)
    assert seconds == pytest.approx(SLOW * rules_phase(before)[0], rel=0.02)
    assert high > seconds
    assert rests_on == (MEASURED,)
    asked = Request(cluster=cluster, workload=before.workload).workload.reward.rules
    assert asked is not None
    assert asked.seconds_per_sample == measured.seconds_per_sample.value


def test_other_stated_seconds_are_kept_and_a_plan_of_the_measured_ones_is_the_same_plan(
    first: Profile,
) -> None:
    cluster, before = Cluster(node_groups=(node_group(first, 8),)), plan()
    after = estimate(before.placement, before.workload, cluster)
    assert estimate(after.placement, after.workload, cluster) == after
    other = estimate(before.placement, with_rules(before.workload, 0.02), cluster)
    seconds, _, rests_on = rules_phase(other)
    assert (seconds, rests_on) == (pytest.approx(0.02 * 512 / 64), (STATED,))


def test_rules_that_are_measured_again_replace_the_earlier_measurement(
    fitted: Calibration, first: Profile
) -> None:
    value = first.rules[0].seconds_per_sample.value
    again = tuple(
        replace(r, plan=replace(r.plan, workload=with_rules(r.plan.workload, value)), rules_s=(0.3, 0.4))
        for r in fitted.observations
    )
    rules = rules_after(replace(fitted, profile=first, observations=again))
    assert [(of.stated, of.seconds_per_sample.value) for of in rules] == [(STATED_S, 0.35), (value, 0.35)]


def test_counts_of_the_rules_say_it_where_they_work_while_others_are_decoded() -> None:
    ours = replace(plan(), framework="rlhfsim")
    [run] = planted_runs((ours,), load_profile(GPU), {}, np.random.default_rng(1))
    assert run.rules_s == ()  # its phase holds what generation left of it
    trace = planted_trace(ours, load_profile(GPU), {}, np.random.default_rng(1))
    rows = [
        {
            "step": float(step),
            "latency/math/mean_s": 0.2,
            "latency/judge#2/mean_s": 0.3,
            "latency/math/p50_s": 9.0,
        }
        for step in range(trace.steps)
    ]
    counted = observe(ours, trace, name="counted", rows=rows)
    assert counted.rules_s == (0.5,) * (trace.steps - 1)
    assert pricer_of(counted).setting.workload.reward.rules == Rules(seconds_per_sample=0.5)
