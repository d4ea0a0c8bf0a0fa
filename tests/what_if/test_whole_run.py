"""From a step to a run: curves, penalties for staleness, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_scenarios import based

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.what_if.scenarios.answer import asked
from rlhfsim.what_if.scenarios.designs import DesignResult, Designs
from rlhfsim.what_if.scenarios.result import PointResult
from rlhfsim.what_if.scenarios.whole_run import reached, result


def point(plan: Plan, run: dict[str, Any], folder: Path | None = None) -> PointResult:
    """The base with this run, its plan given."""
    import json

    scenario = {"title": "t", "base": based(**run), "grid": {"workload.seed": [1]}}
    if folder is None:
        return result(asked(scenario).cases.base, DesignResult(plan=plan))
    path = folder / "s.yaml"
    path.write_text(json.dumps(scenario))
    return result(asked(path).cases.base, DesignResult(plan=plan))


def stale(plan: Plan, lag: float) -> Plan:
    placement = replace(plan.placement, schedule=replace(plan.placement.schedule, staleness=lag))
    return replace(plan, placement=placement)


def csv(folder: Path, text: str) -> Path:
    path = folder / "curve.csv"
    path.write_text(text)
    return path


def test_a_run_is_its_steps_times_the_step(plan: Plan) -> None:
    found = point(plan, {"steps": 10})
    assert found.run_s == pytest.approx(10 * plan.prediction.step_s)
    assert plan.prediction.usd_per_step is not None
    assert found.run_usd == pytest.approx(10 * plan.prediction.usd_per_step)
    assert found.run_low_s == pytest.approx(10 * plan.prediction.low_s)
    assert (found.steps, found.goodput, found.notes) == (10, None, ())


def test_a_point_that_allows_what_its_plan_does_not_use_says_so(plan: Plan) -> None:
    allowed = {"name": "LoRA, async", "set": {"request.allow": ["lora", "async"]}}
    (case,) = asked({"title": "t", "base": based(steps=10), "points": [allowed]}).points
    (note,) = result(case, DesignResult(plan=plan)).notes
    assert note == "async and lora may compete, and the best plan does without"


def test_without_a_length_there_is_no_run(plan: Plan) -> None:
    found = point(plan, {})
    assert (found.steps, found.run_s, found.run_usd) == (None, None, None)
    assert found.seconds == plan.prediction.step_s


def test_staleness_takes_more_steps_where_the_scenario_says_so(plan: Plan) -> None:
    run = {"steps": 100, "staleness_penalty": {"per_version": "5 %", "source": "our own runs"}}
    found = point(stale(plan, 2), run)
    assert found.steps == pytest.approx(110)
    assert "our own runs" in found.notes[0]


def test_a_penalty_that_is_not_given_is_told(plan: Plan) -> None:
    found = point(stale(plan, 1), {"steps": 100})
    assert found.steps == 100
    assert "no penalty for that is assumed: 100 steps may not suffice" in found.notes[0]
    assert point(plan, {"steps": 100}).notes == ()


def test_a_curve_gives_the_steps_to_its_target_between_two_rows(plan: Plan, tmp_path: Path) -> None:
    csv(tmp_path, "step,reward\n0,0.1\n100,0.5\n200,0.7\n300,0.6\n400,0.9\n")
    found = point(plan, {"curve": "curve.csv", "target": 0.6}, tmp_path)
    assert found.steps == pytest.approx(150)


def test_a_loss_falls_to_its_target(tmp_path: Path) -> None:
    assert reached(csv(tmp_path, "0,4\n10,2\n20,1\n"), 1.5) == pytest.approx(15)


def test_a_target_beyond_the_curve_is_an_error_with_its_place(plan: Plan, tmp_path: Path) -> None:
    csv(tmp_path, "0,0.1\n800,0.63\n")
    with pytest.raises(RlhfsimError, match=r"ends at step 800 and comes to 0.63, not to 0.7") as caught:
        point(plan, {"curve": "curve.csv", "target": 0.7}, tmp_path)
    assert caught.value.place is not None
    assert caught.value.place.file.endswith("s.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,x\n", "not step,value"),
        ("1,2\n1,3\n", "ascend"),
        ("1,nan\n2,3", "not finite"),
        ("step,value\n", "no rows"),
        ("1,2\n2," + "3" * 140_000, "not valid CSV"),
    ],
)
def test_a_bad_curve_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError, match=message):
        reached(csv(tmp_path, text), 5)


FAULTS = {"mtbf": "5000 h", "restart": "10 min", "checkpoint": "1 min", "source": "assumed"}


def test_failures_make_the_run_longer_by_its_goodput(plan: Plan) -> None:
    calm, faulty = point(plan, {"steps": 10}), point(plan, {"steps": 10, "faults": FAULTS})
    assert calm.run_s is not None
    assert faulty.goodput is not None
    assert 0.9 < faulty.goodput < 1
    assert faulty.run_s == pytest.approx(calm.run_s / faulty.goodput)
    assert faulty.notes[0].startswith("goodput")
    assert "assumed" in faulty.notes[1]


def test_failures_that_nobody_gave_are_those_of_the_published_rate(plan: Plan) -> None:
    """2,110 days a GPU (419 interruptions in 54 days on 16,384 GPUs): 264 days a node of 8."""
    faults = {name: value for name, value in FAULTS.items() if name != "mtbf"}
    found = point(plan, {"steps": 10, "faults": faults})
    per_node = 54 * 16384 / 419 / plan.hardware[0].gpus_per_node
    assert f"a node fails every {per_node:,.0f}"[:24] in found.notes[1]
    assert "arXiv 2407.21783" in found.notes[1]
    assert "150 d to 425 d" in found.notes[1] or plan.hardware[0].gpus_per_node != 8


def test_a_job_that_gets_nowhere_has_no_end(plan: Plan) -> None:
    found = point(plan, {"steps": 10, "faults": {**FAULTS, "mtbf": "1 min"}})
    assert (found.run_s, found.run_usd) == (None, None)
    assert "the job fails every" in found.notes[0]


def test_switches_that_change_what_is_learnt_are_told(plan: Plan) -> None:
    from rlhfsim.specs.workload.workload import Lora

    other = replace(plan, workload=replace(plan.workload, lora=Lora()))
    assert "LoRA may change what is learnt" in point(other, {"steps": 10}).notes[0]


def test_the_hash_of_a_point_changes_with_price_and_run_and_with_nothing_else(
    plan: Plan, planted: Callable[..., Any]
) -> None:
    from rlhfsim.what_if.scenarios.answer import whatif

    scenario = {
        "title": "t",
        "base": based(steps=10),
        "points": [
            {"name": "same", "set": {"run.steps": 10}},
            {"name": "price", "set": {"cluster.node_groups.0.price": 1}},
            {"name": "longer", "set": {"run.steps": 11}},
        ],
    }
    base, same, *others = whatif(scenario, Designs(planted(lambda _: 1.0))).everything
    assert base.input_hash == same.input_hash
    assert len({base.input_hash, *(p.input_hash for p in others)}) == 3
