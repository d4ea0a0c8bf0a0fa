"""What rules, environments and own parts took in runs is what the next plan that states the same takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_plans import GPU, plan, planted_runs, run_folder

from lab.planted import Flaws, planted_trace
from rlhfsim.api import estimate
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import Observation, observe, read_run
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.calibration.profile_writer import workload_after, write_profile
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.workload.measurable import ANSWER, RULES, TURNS
from rlhfsim.specs.workload.workload import Environment, OwnParts, Rules, Workload
from rlhfsim.step import rule_rewards
from rlhfsim.step.framework_overhead import MEASURED_PARTS
from rlhfsim.step.rule_rewards import MEASURED
from rlhfsim.trace import write_trace

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
    [measured] = first.workload
    assert measured.stated == STATED_S
    assert measured.measured.value == pytest.approx(SLOW * STATED_S, rel=0.02)
    cluster = Cluster(node_groups=(node_group(first, 8),))
    after = estimate(before.placement, before.workload, cluster)
    seconds, high, rests_on = rules_phase(after)
    assert seconds == pytest.approx(SLOW * rules_phase(before)[0], rel=0.02)
    assert high > seconds
    assert rests_on == (MEASURED,)
    asked = Request(cluster=cluster, workload=before.workload).workload.reward.rules
    assert asked is not None
    assert asked.seconds_per_sample == measured.measured.value


def test_other_stated_seconds_are_kept_and_a_plan_of_the_measured_ones_is_the_same_plan(
    first: Profile,
) -> None:
    cluster, before = Cluster(node_groups=(node_group(first, 8),)), plan()
    after = estimate(before.placement, before.workload, cluster)
    assert estimate(after.placement, after.workload, cluster) == after
    other = estimate(before.placement, with_rules(before.workload, 0.02), cluster)
    seconds, _, rests_on = rules_phase(other)
    assert (seconds, rests_on) == (pytest.approx(0.02 * 512 / 64), (rule_rewards.STATED,))


def test_rules_that_are_measured_again_replace_the_earlier_measurement(
    fitted: Calibration, first: Profile
) -> None:
    value = first.workload[0].measured.value
    again = tuple(
        replace(
            r, plan=replace(r.plan, workload=with_rules(r.plan.workload, value)), workload={RULES: (0.3, 0.4)}
        )
        for r in fitted.observations
    )
    rules = workload_after(replace(fitted, profile=first, observations=again))
    assert [(of.stated, of.measured.value) for of in rules] == [(STATED_S, 0.35), (value, 0.35)]


def test_counts_of_the_rules_say_it_where_they_work_while_others_are_decoded() -> None:
    ours = replace(plan(), framework="rlhfsim")
    [run] = planted_runs((ours,), load_profile(GPU), {}, np.random.default_rng(1))
    assert RULES not in run.workload  # its phase holds what generation left of it
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
    assert counted.workload[RULES] == (0.5,) * (trace.steps - 1)
    assert pricer_of(counted).setting.workload.reward.rules == Rules(seconds_per_sample=0.5)


TURNED = replace(plan().workload, environment=Environment(turns=4, seconds_per_turn=0.5, workers=8))
"""What the runs below state of the environment; the filter is an own part of the algorithm."""
STATED = replace(TURNED, custom=OwnParts(filter=0.001))
FILTER_S, TURN_S, MEAN_TURNS = 0.03, 4.0, 2.5


def test_planted_seconds_of_an_environment_and_of_own_parts_reach_the_next_plan(tmp_path: Path) -> None:
    made, cluster = plan(), Cluster(node_groups=(node_group(load_profile(GPU), 8),))
    before = estimate(made.placement, STATED, cluster)
    true = replace(before, workload=replace(STATED, custom=OwnParts(filter=FILTER_S)))
    trace = planted_trace(true, load_profile(GPU), {}, np.random.default_rng(3), flaws=Flaws(noise=0.01))
    folder = run_folder(tmp_path / "run", before, {})
    write_trace(folder / "trace.json", replace(trace, source="measured", plan_hash=before.input_hash))
    answers = {"environment/turns_mean": MEAN_TURNS, "environment/seconds_mean": MEAN_TURNS * TURN_S}
    lines = [json.dumps({"step": step} | answers) + "\n" for step in range(trace.steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    run = read_run(folder)
    assert pricer_of(run).setting.workload.environment == replace(
        STATED.environment, mean_turns=MEAN_TURNS, seconds_per_turn=TURN_S
    )
    ours = write_profile(tmp_path / "ours.yaml", calibrate((run,), errors=False))
    after = estimate(made.placement, STATED, Cluster(node_groups=(node_group(ours, 8),)))
    assert after.workload.environment == pricer_of(run).setting.workload.environment
    assert after.workload.custom.filter == pytest.approx(FILTER_S, rel=0.02)
    assert after.prediction.step_s > before.prediction.step_s + 10
    [phase] = [p for p in after.prediction.phases if p.name == "custom.filter"]
    assert phase.rests_on == (MEASURED_PARTS,)
    assert phase.seconds == pytest.approx(512 * FILTER_S, rel=0.02)
    other = estimate(made.placement, TURNED, Cluster(node_groups=(node_group(ours, 8),)))
    assert other.workload.custom == OwnParts()


def test_what_a_loss_took_reaches_the_next_plan(tmp_path: Path) -> None:
    made, cluster = plan(), Cluster(node_groups=(node_group(load_profile(GPU), 8),))
    work = replace(made.workload, custom=OwnParts(loss=0.001))
    before = estimate(made.placement, work, cluster)
    ranks = before.placement.actor.layout.dp
    took_s = 0.02 * before.workload.num_sequences * before.workload.epochs / ranks
    trace = planted_trace(before, load_profile(GPU), {}, np.random.default_rng(3))
    spans = tuple(
        replace(s, attributes={"loss_s": took_s}) if s.name == "actor.train" else s for s in trace.spans
    )
    folder = run_folder(tmp_path / "run", before, {})
    told = replace(trace, spans=spans, source="measured", plan_hash=before.input_hash)
    write_trace(folder / "trace.json", told)
    run = read_run(folder)
    assert run.workload["custom.loss"] == pytest.approx([0.02] * (trace.steps - 1))
    ours = write_profile(tmp_path / "ours.yaml", calibrate((run,), errors=False))
    after = estimate(made.placement, work, Cluster(node_groups=(node_group(ours, 8),)))
    assert after.workload.custom.loss == pytest.approx(0.02)
    [phase] = [p for p in after.prediction.phases if p.name == "actor.train"]
    assert MEASURED_PARTS in phase.rests_on
    write_trace(folder / "trace.json", replace(told, spans=trace.spans))  # as on a GPU
    assert "custom.loss" not in read_run(folder).workload


def test_answers_that_cannot_be_are_not_counted() -> None:
    made = replace(plan(), workload=TURNED)
    trace = planted_trace(made, load_profile(GPU), {}, np.random.default_rng(3))
    pairs = [(None, 1.0), (2.0, 1.0), (-3.0, 1.0), (2.0, -1.0), (0.0, 1.0), (2.0, float("nan"))]
    rows = [
        {"step": step, "environment/turns_mean": turns, "environment/seconds_mean": seconds}
        for step, (turns, seconds) in zip(range(trace.steps), pairs * trace.steps, strict=False)
    ]
    run = observe(made, trace, name="spoiled", rows=rows)
    assert set(run.workload[ANSWER]) == {0.5}
    assert set(run.workload[TURNS]) == {2.0}


def test_a_profile_whose_measured_seconds_are_zero_prices_a_workload_that_states_zero(first: Profile) -> None:
    nothing = replace(first.workload[0].measured, value=0.0, low=0.0)
    free = replace(first, workload=(replace(first.workload[0], stated=0.0, measured=nothing),))
    made = plan()
    planned = estimate(
        made.placement, with_rules(made.workload, 0.0), Cluster(node_groups=(node_group(free, 8),))
    )
    assert planned.prediction.step_s > 0
