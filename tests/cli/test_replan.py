"""A run that is watched: what it says every few iterations, and the profile that it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_plans import GPU, plan

from lab.planted import planted_trace
from rlhfsim.api import design, estimate
from rlhfsim.cli.replan import Replan, profile_line
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.trace import Trace


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(gpus=4, prompts=256)


def trace_of(made: Plan, values: dict[str, float], steps: int = 4) -> Trace:
    return planted_trace(made, load_profile(GPU), values, np.random.default_rng(0), steps=steps)


def test_a_run_is_calibrated_on_what_it_has_done(made: Plan, tmp_path: Path) -> None:
    watch = Replan(made, "live")
    line = watch.look(trace_of(made, {"controller_time": 5.0}), [{"reward/mean": 0.0}] * 4)
    assert line.startswith("recalibrated on 3 iterations: ")
    assert "; a step takes " in line
    assert watch.write(tmp_path) == tmp_path / "calibrated.yaml"
    written = load_profile(tmp_path / "calibrated.yaml")
    assert str(tmp_path / "calibrated.yaml") in profile_line(tmp_path / "calibrated.yaml")
    assert written.coefficients["controller_time"].value == pytest.approx(5.0, rel=0.1)
    assert written.calibration is not None
    assert written.calibration.runs == ("live",)


def test_a_profile_that_is_there_is_kept(made: Plan, tmp_path: Path) -> None:
    (tmp_path / "calibrated.yaml").write_text("precious")
    watch = Replan(made, "live")
    watch.look(trace_of(made, {"controller_time": 5.0}), [])
    watch.write(tmp_path)
    assert (tmp_path / "calibrated.yaml").read_text() == "precious"
    assert load_profile(tmp_path / "calibrated_2.yaml").calibration is not None


def test_a_plan_that_uses_one_of_four_gpus_is_told_of_a_better_one() -> None:
    small = plan(gpus=1, prompts=16)
    poor = estimate(small.placement, small.workload, parse_cluster(4, GPU))
    line = Replan(poor, "live").look(trace_of(poor, {}), [])
    assert "ANOTHER PLAN WOULD NOW BE BETTER: " in line
    assert "(P10-P90 " in line


def test_the_best_plan_and_one_that_is_hardly_slower_are_not_replaced(made: Plan) -> None:
    request = Request(cluster=parse_cluster(4, GPU), workload=made.workload)
    best = design(request, explain=False, rivals=False, simplest_s=None).best
    assert best is not None
    actor = replace(best.placement.actor, layout=replace(best.placement.actor.layout, zero=3))
    slower = estimate(replace(best.placement, actor=actor), best.workload, request.cluster)
    assert 1 < slower.prediction.step_s / best.prediction.step_s < 1.025
    for plan_ in (best, slower):
        line = Replan(plan_, "live").look(trace_of(plan_, {}), [])
        assert line.endswith("no other plan is 3 % faster")


def test_a_watched_run_is_never_forked(made: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(method: str) -> None:
        raise AssertionError(method)

    monkeypatch.setattr("multiprocessing.get_context", forked)
    assert "; a step takes " in Replan(made, "live").look(trace_of(made, {}), [])


def test_too_short_a_run_is_said_and_ends_nothing(made: Plan, tmp_path: Path) -> None:
    watch = Replan(made, "live")
    short = replace(trace_of(made, {}), spans=())
    assert watch.look(short, []).startswith("not recalibrated: ")
    assert watch.write(tmp_path) is None
    assert profile_line(None).startswith("no calibrated profile")
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_plan_is_said(made: Plan) -> None:
    line = Replan(made, "live").look(replace(trace_of(made, {}), plan_hash="other"), [])
    assert "the trace is of plan other" in line
