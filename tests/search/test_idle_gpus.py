"""More GPUs are never slower: what layouts do not divide may stay idle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from rlhfsim.api import design
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.request import Request
from rlhfsim.search.scope import ALONE
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Algorithm, Reward, Rules, Workload


def question(gpus: int, each: int, model: str, algorithm: Algorithm = "grpo", **changes: Any) -> Request:
    """A step of little work on nodes of so many GPUs."""
    work = Workload(
        algorithm=algorithm,
        model=model,
        prompts=16,
        samples=4 if algorithm == "grpo" else 1,
        reward=Reward(rules=Rules()),
        response_len=LogNormal(mean=200, max=1024),
        **changes,
    )
    group = NodeGroup(profile=load_profile("h100"), gpus=gpus, gpus_per_node=each)
    return Request(cluster=Cluster(node_groups=(group,)), workload=work)


def seconds(request: Request) -> float:
    """Of the fastest plan."""
    found = Search(request, models_of(request.workload), scope=ALONE).run()
    return found.best.seconds if found.best is not None else float("inf")


@pytest.mark.parametrize(
    ("model", "each", "most", "algorithm"),
    [("qwen2.5-0.5b", 4, 18, "grpo"), ("8b", 8, 12, "grpo"), ("qwen2.5-0.5b", 2, 9, "ppo")],
)
def test_one_gpu_more_is_never_slower(model: str, each: int, most: int, algorithm: Algorithm) -> None:
    taken = [seconds(question(n, each, model, algorithm)) for n in range(1, most + 1)]
    slower = [n + 2 for n, (a, b) in enumerate(pairwise(taken)) if b > a * (1 + 1e-9)]
    assert not slower, taken


def test_a_design_that_leaves_gpus_idle_counts_their_rent() -> None:
    even, odd = (design(question(n, 8, "8b"), explain=False, rivals=False, simplest_s=None) for n in (64, 65))
    assert even.chosen is not None
    assert odd.chosen is not None
    assert (even.chosen.idle_gpus, odd.chosen.idle_gpus) == (0, 1)
    assert odd.chosen.prediction.step_s == pytest.approx(even.chosen.prediction.step_s)
    rent = [d.chosen.prediction.usd_per_step for d in (even, odd) if d.chosen is not None]
    assert rent[1] == pytest.approx(rent[0] * 65 / 64)
    assert odd.chosen.prediction.tokens_per_s_per_gpu == pytest.approx(
        even.chosen.prediction.tokens_per_s_per_gpu * 64 / 65
    )
