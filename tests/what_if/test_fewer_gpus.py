"""A warning where a batch hardly feeds the GPUs: half of them, priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design


def test_half_the_gpus_are_named_where_a_batch_feeds_hardly_more() -> None:
    work = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=8, samples=2)
    asked = Request(cluster=rlhfsim.parse_cluster(16, "h100"), workload=work)
    answer = design(asked)
    assert answer.fewer is not None
    assert answer.best is not None
    assert answer.fewer.gpus == 8
    half = design(replace(asked, cluster=rlhfsim.parse_cluster(8, "h100")), explain=False).best
    assert half is not None
    assert answer.fewer.step_s == pytest.approx(half.prediction.step_s, rel=0.05)
    assert answer.fewer.step_s * 8 < 0.75 * answer.best.prediction.step_s * 16
    assert design(replace(asked, workload=replace(work, prompts=512))).fewer is None
