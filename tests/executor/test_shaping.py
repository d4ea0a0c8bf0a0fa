"""Rewards before groups are compared, and what is learned from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms.advantages import advantages
from executor.algorithms.batch import collate
from executor.algorithms.losses import compute
from executor.algorithms.shaping import filtered, shaped
from executor.engines.balance import optimizer_steps
from executor.samples import LossSpec, Sample
from executor.settings import Algorithm


def sample(number: int, reward: float, length: int = 4, **changes: Any) -> Sample:
    zeros = np.zeros(length, np.float32)
    fields: dict[str, Any] = {"old_logprobs": zeros, "rollout_logprobs": zeros, "advantages": zeros + reward}
    response = np.zeros(length, np.int64)
    return Sample(
        id=number, group=0, prompt=response[:1], response=response, reward=reward, **(fields | changes)
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Algorithm(), 3.0),
        (Algorithm(reward_scale=4.0), 10.0),  # clipped after it is scaled
        (Algorithm(reward_scale=4.0, reward_clip=None), 12.0),
        (Algorithm(length_penalty=0.5), 3.0 - 0.5 * 7 / 10),
        (Algorithm(overlong_tokens=4, overlong_penalty=2.0), 3.0 - 2.0 * 1 / 4),
        (Algorithm(overlong_tokens=3), 3.0),
    ],
)
def test_rewards_are_scaled_clipped_and_charged_for_length(settings: Algorithm, expected: float) -> None:
    assert shaped(sample(0, 3.0, length=7), settings, 10) == pytest.approx(expected)


def test_the_longer_of_two_right_answers_is_the_worse_one() -> None:
    pair = [sample(0, 1.0, length=2), sample(1, 1.0, length=9)]
    settings = Algorithm(overlong_tokens=4, kl_coefficient=0.0)
    short, long = advantages("dapo", pair, settings, 10)
    assert short.advantages is not None
    assert long.advantages is not None
    assert short.advantages[0] > 0.5 > -0.5 > long.advantages[0]


def test_nothing_is_learned_from_responses_that_were_cut_and_they_count_in_no_mean() -> None:
    batch = [sample(0, 1.0), sample(1, -1.0, length=6, finish="length"), sample(2, 2.0, length=2)]
    assert filtered(batch, Algorithm()) == batch
    kept = filtered(batch, Algorithm(overlong_filter=True))
    [[step]] = optimizer_steps(kept, ranks=1, mini_batches=1, epochs=1, seed=[0])
    assert step.global_tokens == 6
    logprobs = torch.zeros(3, 6, requires_grad=True)
    counts = {"num_tokens": step.global_tokens, "num_sequences": 3}
    loss, metrics = compute(LossSpec(name="policy", settings={}), collate(kept, logprobs=logprobs, **counts))
    loss.backward()
    assert loss.item() == pytest.approx(-(4 * 1.0 + 2 * 2.0) / 6)
    assert logprobs.grad is not None
    assert [float(row.abs().sum()) > 0 for row in logprobs.grad] == [True, False, True]
    assert metrics["tokens"] == 6
