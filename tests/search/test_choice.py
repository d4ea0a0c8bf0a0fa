"""The field `choice` of a plan: written by design, read again, and enough to ask the same question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.api import cluster_of, estimate
from rlhfsim.plan import Plan, read_plan, write_plan
from rlhfsim.search.planning import asked_again
from rlhfsim.search.request import Limit, Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import Design, design

LIMIT = Limit(role="actor", field="tp", relation="<=", value=2)


@pytest.fixture(scope="module")
def request_() -> Request:
    return Request(
        cluster=parse_cluster(gpus=4),
        workload=Workload(model="0.5b", algorithm="grpo", prompts=64, samples=2),
        forbid=frozenset({"split"}),
        fix={"rollout": {"tp": 1}},
        limits=(LIMIT,),
        max_oom=0.05,
        price=2.5,
    )


@pytest.fixture(scope="module")
def answer(request_: Request) -> Design:
    return design(request_)


@pytest.fixture
def written(answer: Design, tmp_path: Path) -> Plan:
    assert answer.told is not None
    write_plan(tmp_path / "plan.json", answer.told)
    return read_plan(tmp_path / "plan.json")


def test_a_searched_plan_tells_how_it_was_chosen(answer: Design, written: Plan) -> None:
    told = written.choice
    assert told is not None
    assert told.confidence == answer.confidence
    assert told.reasons == answer.reasons
    assert [r.step_s for r in told.runners_up] == [p.prediction.step_s for p in answer.runners_up]
    assert told.certificate.space == answer.certificate.space
    assert [f.change for f in told.break_evens] == [f.change for f in answer.break_evens]


def test_the_calls_of_a_runner_up_add_up_to_its_step(written: Plan) -> None:
    assert written.choice is not None
    assert written.choice.runners_up
    for rival in written.choice.runners_up:
        assert sum(rival.by_call_s.values()) == pytest.approx(rival.step_s)


def test_the_choice_asks_the_same_question_again(request_: Request, written: Plan) -> None:
    again = asked_again(written, cluster_of(written))
    assert replace(again, cluster=request_.cluster) == replace(request_, backend_by="option")


def test_the_choice_changes_no_hash_and_nothing_else(answer: Design, written: Plan) -> None:
    assert answer.chosen is not None
    assert written.input_hash == answer.chosen.input_hash
    assert replace(written, choice=None) == answer.chosen


def test_a_given_plan_has_no_choice_and_no_such_key(answer: Design) -> None:
    assert answer.chosen is not None
    given = estimate(answer.chosen.placement, answer.chosen.workload, cluster_of(answer.chosen))
    assert given.choice is None
    assert "choice" not in json.loads(json.dumps(given.to_dict()))
