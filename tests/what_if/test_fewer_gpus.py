"""A warning where a batch hardly feeds the GPUs: the knee."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design


def test_the_knee_is_where_twice_the_gpus_cost_a_quarter_more_a_sample() -> None:
    work = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=8, samples=2)
    asked = Request(cluster=rlhfsim.parse_cluster(16, "h100"), workload=work)
    answer = design(asked)
    assert answer.fewer is not None
    assert answer.best is not None
    knee = answer.fewer.gpus
    best = design(
        replace(asked, cluster=rlhfsim.parse_cluster(knee, "h100")),
        explain=False,
        rivals=False,
        simplest_s=None,
    ).best
    assert best is not None
    assert answer.fewer.step_s == pytest.approx(best.prediction.step_s, rel=0.05)
    twice = design(
        replace(asked, cluster=rlhfsim.parse_cluster(2 * knee, "h100")),
        explain=False,
        rivals=False,
        simplest_s=None,
    ).best
    assert twice is not None
    assert twice.prediction.step_s * 2 > 1.25 * answer.fewer.step_s
    assert design(replace(asked, workload=replace(work, prompts=512))).fewer is None
