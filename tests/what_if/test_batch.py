"""A batch that divides over all GPUs, where the one that was asked for does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.present.verdict_lines import even
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.batch import EvenBatch, batches
from rlhfsim.what_if.design import design

WORK = Workload(algorithm="grpo", model="qwen2.5-7b", prompts=32, samples=4)
ASKED = Request(cluster=rlhfsim.parse_cluster(3, "h100"), workload=WORK, framework="openrlhf")
"""OpenRLHF deals a batch out evenly: 128 samples go to two of the three GPUs."""


def test_a_batch_that_divides_over_all_gpus_is_named_with_what_it_brings() -> None:
    answer = design(ASKED)
    assert answer.best is not None
    assert answer.best.idle_gpus == 1
    assert answer.even is not None
    assert answer.even.prompts in batches(ASKED)
    work = replace(WORK, prompts=answer.even.prompts)
    other = design(replace(ASKED, workload=work), explain=False, rivals=False, simplest_s=None).best
    assert other is not None
    assert other.idle_gpus == 0
    assert answer.even.step_s == pytest.approx(other.prediction.step_s, rel=0.05)
    faster = answer.even.prompts / answer.even.step_s * answer.best.prediction.step_s / WORK.prompts
    assert answer.even.gain == pytest.approx(faster)
    assert faster > 1.05


def test_where_the_batch_divides_over_all_gpus_no_other_is_named() -> None:
    assert design(replace(ASKED, workload=replace(WORK, prompts=33))).even is None


@pytest.mark.parametrize(
    ("gpus", "prompts", "samples", "updates", "close"),
    [
        (24, 256, 8, 1, [255, 264]),
        (24, 256, 8, 4, [252, 288]),
        (24, 240, 8, 1, []),
        (64, 256, 8, 1, []),
        (24, 8, 1, 1, []),
    ],
)
def test_close_batches_give_every_gpu_a_whole_share(
    gpus: int, prompts: int, samples: int, updates: int, close: list[int]
) -> None:
    work = replace(WORK, prompts=prompts, samples=samples, mini_batches=updates)
    asked = Request(cluster=rlhfsim.parse_cluster(gpus, "h100"), workload=work)
    assert batches(asked) == close
    assert all(n * samples % (gpus * updates) == 0 for n in close)


def test_the_line_says_what_to_type() -> None:
    text = even(EvenBatch(prompts=264, step_s=1558.0, gain=1.488))
    assert (
        text
        == "one that divides over all GPUs makes 49 % more samples a second: --prompts 264, 1,558 s a step"
    )
