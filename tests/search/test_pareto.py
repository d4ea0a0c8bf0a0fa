"""The front: nothing on it is beaten by anything else on it, and its ends are answers of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhfsim
from rlhfsim.search.pareto import FrontPoint, front, undominated
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import design

GRPO = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=64, samples=4, reward=Reward(rules=Rules()))
SMALL = Request(cluster=rlhfsim.parse_cluster(2, "h100"), workload=GRPO, allow=frozenset({"async"}))


@cache
def points() -> tuple[FrontPoint, ...]:
    return front(SMALL)


def test_no_point_beats_another_in_everything() -> None:
    values = [p.values for p in points()]
    assert len(undominated(values)) == len(values) >= 3


def test_the_fastest_point_is_the_answer_of_the_design() -> None:
    sync = design(replace(SMALL, allow=frozenset()), explain=False, rivals=False).chosen
    assert sync is not None
    fastest = min(p.seconds for p in points() if p.staleness == 0)
    assert fastest == pytest.approx(sync.prediction.step_s)


def test_less_memory_costs_time_along_the_front() -> None:
    walk = [p for p in points() if p.staleness == 0]
    assert walk[-1].seconds > walk[0].seconds
    assert min(p.bytes for p in walk) < walk[0].bytes


def test_every_point_is_a_complete_plan_that_fits() -> None:
    for point in points():
        p = point.plan.prediction
        assert p.step_s == pytest.approx(point.seconds)
        assert p.peak_memory_bytes <= p.capacity_bytes
        assert point.plan.gpu_map


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_a_row_is_left_out_exactly_when_another_is_as_good_everywhere(rows: list[tuple[float, ...]]) -> None:
    kept = [rows[i] for i in undominated(rows)]
    assert len(set(kept)) == len(kept)
    for row in rows:
        assert any(all(a <= b for a, b in zip(k, row, strict=True)) for k in kept)
    for one in kept:
        assert not any(k != one and all(a <= b for a, b in zip(k, one, strict=True)) for k in kept)
