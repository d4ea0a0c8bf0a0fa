"""Targets: read with units, turned into limits of the search, checked on a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest

import rlhfsim
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import QUANTITIES, check_steps, most_seconds, narrowed, requirement, verdicts
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import design

GRPO = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=64, samples=4, reward=Reward(rules=Rules()))
SMALL = Request(cluster=rlhfsim.parse_cluster(4, "h100"), workload=GRPO)


@cache
def plan() -> Plan:
    found = design(SMALL, explain=False, rivals=False).chosen
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("step_time<90s", 90),
        ("step_time <= 1.5 min", 90),
        ("energy<2kWh", 7.2e6),
        ("memory<70GB", 7e10),
        ("memory<90%", 0.9),
        ("oom<1%", 0.01),
        ("tokens_per_s>20000", 20000),
        ("cost_per_step<5", 5),
        ("staleness<=1", 1),
        ("time_of_run<1d", 86400),
    ],
)
def test_values_are_read_with_their_units(text: str, value: float) -> None:
    assert requirement(text).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step_time", "is not QUANTITY<VALUE"),
        ("step_time=90", "is not QUANTITY<VALUE"),
        ("steptime<90", "unknown quantity 'steptime'"),
        ("step_time<90GB", "unknown unit 'GB'"),
        ("step_time<-3s", "-3s is negative"),
        ("memory<", "is not QUANTITY<VALUE"),
        ("<3", "is not QUANTITY<VALUE"),
        ("oom<x", "'x' is not a number"),
        ("step_time<nan", "'nan' is not a number"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(RlhfsimError, match=said):
        requirement(text)


def test_a_target_over_a_run_needs_its_steps() -> None:
    with pytest.raises(RlhfsimError, match="steps"):
        check_steps([requirement("cost_of_run<100")], None)
    check_steps([requirement("cost_of_run<100")], 10)


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_is_met_by_its_own_value_and_missed_beyond(name: str) -> None:
    at = verdicts([requirement(f"{name}<1")], plan(), 3)[0].actual
    assert at is not None
    one = requirement(f"{name}<=1")
    assert verdicts([replace(one, value=at)], plan(), 3)[0].met
    assert not verdicts([replace(one, relation="<", value=at)], plan(), 3)[0].met
    assert not verdicts([replace(one, relation=">", value=at)], plan(), 3)[0].met


@pytest.mark.parametrize("name", ["step_time", "time_of_run", "cost_per_step", "cost_of_run", "energy"])
def test_targets_on_money_and_energy_are_targets_on_the_step(name: str) -> None:
    at = verdicts([requirement(f"{name}<1")], plan(), 7)[0].actual
    assert at is not None
    one = replace(requirement(f"{name}<=1"), value=at)
    assert most_seconds(SMALL, [one], 1.0, 7) == pytest.approx(plan().prediction.step_s)


def test_targets_on_throughput_are_targets_on_the_step() -> None:
    p = plan().prediction
    tokens = p.tokens_per_s_per_gpu * 4 * p.step_s
    for text, value in (
        ("tokens_per_s>=1", p.tokens_per_s_per_gpu * 4),
        ("tokens_per_s_per_gpu>=1", p.tokens_per_s_per_gpu),
    ):
        one = replace(requirement(text), value=value)
        assert most_seconds(SMALL, [one], tokens, None) == pytest.approx(p.step_s)
    assert most_seconds(SMALL, [requirement("memory<1GB")], tokens, None) == inf


def test_a_target_on_memory_is_kept_by_the_search() -> None:
    bytes_ = 0.8 * plan().prediction.peak_memory_bytes
    tight = narrowed(SMALL, [replace(requirement("memory<1GB"), value=bytes_)])
    found = design(tight, explain=False, rivals=False).chosen
    assert found is not None
    assert found.prediction.peak_memory_bytes < bytes_
    assert found.prediction.step_s >= plan().prediction.step_s


def test_targets_on_risk_and_staleness_narrow_the_request() -> None:
    free = replace(SMALL, allow=frozenset({"async"}), max_staleness=4)
    assert narrowed(free, [requirement("oom<1%")]).max_oom == pytest.approx(0.01)
    assert narrowed(free, [requirement("staleness<=2")]).max_staleness == 2
    assert narrowed(free, [requirement("staleness<1")]).switches == frozenset()
