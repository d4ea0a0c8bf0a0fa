"""Dynamic sampling: how many batches a step generates, and which workloads it goes with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Environment, Reward, Rules, Workload

GRPO = Workload(algorithm="grpo", model="qwen3-0.6b", prompts=2, samples=4, reward=Reward(rules=Rules()))


def test_batches_are_counted_by_hand() -> None:
    # 2 prompts, half kept: P(1 batch does) = 1/4, else Binomial(2 m, 1/2) < 2 has 1 + 2m of 4^m cases
    by_hand = 1 + sum((1 + 2 * m) / 4**m for m in range(1, 40))
    assert DynamicSampling(kept=0.5).expected_batches(2) == pytest.approx(by_hand)
    assert DynamicSampling(kept=1).expected_batches(512) == 1
    assert DynamicSampling(kept=1, gen_prompts=100).expected_batches(512) == 6
    assert DynamicSampling(kept=0.5, gen_prompts=1536).expected_batches(512) == pytest.approx(1, abs=1e-6)


def test_drawn_batches_have_the_expected_mean_and_repeat() -> None:
    sampling = DynamicSampling(kept=0.4, gen_prompts=96)
    drawn = [sampling.drawn_batches(64, np.random.default_rng([3, i])) for i in range(2000)]
    assert np.mean(drawn) == pytest.approx(sampling.expected_batches(64), rel=0.02)
    assert drawn[:5] == [sampling.drawn_batches(64, np.random.default_rng([3, i])) for i in range(5)]


def test_fewer_kept_groups_need_more_batches() -> None:
    batches = [DynamicSampling(kept=k).expected_batches(256) for k in (1.0, 0.9, 0.5, 0.2, 0.05)]
    assert batches == sorted(batches)
    assert batches[-1] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "ppo"}, "groups of samples"),
        ({"samples": 1}, "groups of samples"),
        ({"reward": Reward(model="same", rules=Rules())}, "rewards by rules alone"),
        ({"environment": Environment()}, "without environment"),
        ({"dynamic_sampling": DynamicSampling(kept=0.1, max_gen_batches=5)}, "do not fill"),
    ],
)
def test_dynamic_sampling_says_what_it_needs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RlhfsimError, match=message):
        replace(GRPO, **{"dynamic_sampling": DynamicSampling(kept=0.5), **changes})
