"""Nothing is recommended that was only written, where a plan within a tenth is made of parts that CPUs have run."""

from __future__ import annotations

from functools import cache

import pytest

import rlhfsim
from rlhfsim.present.verdict_lines import choice
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if import rivals
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.rivals import WORTH, only_written

WRITTEN = frozenset({"fp8", "fp8-kv", "adam8bit"})
"""Switches whose parts need a GPU in our own executor."""


@cache
def designed(gpus: int, model: str, algorithm: str = "grpo", allow: frozenset[str] = frozenset()) -> Design:
    work = Workload(algorithm=algorithm, model=model, prompts=128)  # type: ignore[arg-type]
    request = Request(
        cluster=rlhfsim.parse_cluster(gpus, "h100"), workload=work, framework="rlhfsim", allow=allow
    )
    return rlhfsim.design(request, explain=False, rivals=False)


@pytest.mark.parametrize(
    ("gpus", "model", "algorithm"),
    [
        (8, "qwen3-8b", "grpo"),
        (8, "llama-3.2-1b", "ppo"),
        (64, "70b", "grpo"),
        (64, "70b", "ppo"),
        (64, "qwen3-30b-a3b", "grpo"),
    ],
)
@pytest.mark.parametrize("allow", [frozenset(), WRITTEN], ids=["plain", "written"])
def test_parts_that_nobody_has_run_save_a_tenth_or_are_not_recommended(
    gpus: int, model: str, algorithm: str, allow: frozenset[str]
) -> None:
    answer = designed(gpus, model, algorithm, allow)
    assert answer.chosen is not None
    if only_written(answer.request, answer.chosen):
        plain = designed(gpus, model, algorithm).chosen
        assert plain is not None
        assert plain.prediction.step_s > (1 + WORTH) * answer.chosen.prediction.step_s


def test_what_the_faster_plan_asks_for_is_said() -> None:
    answer = designed(8, "qwen3-8b", "grpo", frozenset({"fp8", "fp8-kv"}))
    assert answer.best is not None
    assert set(only_written(answer.request, answer.best)) == {"FP8 rollout", "FP8 KV cache"}
    line = choice(answer)
    assert line is not None
    assert line.startswith("nobody has run FP8 rollout, FP8 KV cache with it yet; --fastest: ")


def test_a_part_that_saves_more_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "WORTH", 0.05)
    answer = designed.__wrapped__(8, "qwen3-8b", "grpo", frozenset({"fp8", "fp8-kv"}))
    assert answer.chosen is not None
    assert only_written(answer.request, answer.chosen)
