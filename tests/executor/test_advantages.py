"""Advantages against worked examples, and what must not change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executor.algorithms.advantages import (
    advantages,
    discounted,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
    token_rewards,
    whiten,
)
from executor.samples import Sample, emptied
from executor.settings import Algorithm
from rlhfsim.errors import RlhfsimError

PLAIN = Algorithm(kl_coefficient=0.0, reward_clip=None)
GROUPED = ["grpo", "dr-grpo", "rloo"]


def sample(number: int, reward: float | None, *, group: int = 0, length: int = 3, **fields: Any) -> Sample:
    tokens = np.zeros(length, np.int64)
    return Sample(id=number, group=group, prompt=tokens[:1], response=tokens, reward=reward, **fields)


def group_of(*rewards: float, group: int = 0) -> list[Sample]:
    return [sample(i, reward, group=group, length=i + 1) for i, reward in enumerate(rewards)]


def found(algorithm: str, samples: list[Sample], settings: Algorithm = PLAIN) -> list[float]:
    """The one number of each sample, checked to be the same at all its tokens."""
    rows = [s.advantages for s in advantages(algorithm, samples, settings)]
    assert all(row is not None and (row == row[0]).all() for row in rows)
    return [float(row[0]) for row in rows if row is not None]


def test_gae_worked_by_hand() -> None:
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.8])
    # deltas from the end: 1 - 0.8 = 0.2; 0.9 x 0.8 - 0.6 = 0.12; 0.9 x 0.6 - 0.5 = 0.04; decay 0.9 x 0.5
    expected = [0.04 + 0.45 * (0.12 + 0.45 * 0.2), 0.12 + 0.45 * 0.2, 0.2]
    result, returns = gae(rewards, values, 0.9, 0.5)
    np.testing.assert_allclose(result, expected)
    np.testing.assert_allclose(returns, result + values)


def test_gae_with_lambda_one_is_the_discounted_sum_less_the_value_and_with_zero_the_td_error() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 9))
    np.testing.assert_allclose(gae(rewards, values, 0.9, 1.0)[0], discounted(rewards, 0.9) - values)
    following = np.append(values[1:], 0.0)
    np.testing.assert_allclose(gae(rewards, values, 0.9, 0.0)[0], rewards + 0.9 * following - values)


def test_gae_across_a_tools_tokens_is_as_if_they_were_not_there() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 9))
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1.0])
    kept = mask > 0
    with_tools = gae(rewards, values, 0.9, 0.8, mask)[0]
    np.testing.assert_allclose(with_tools[kept], gae(rewards[kept], values[kept], 0.9, 0.8)[0])
    np.testing.assert_allclose(discounted(rewards, 0.9, mask)[kept], discounted(rewards[kept], 0.9))


def test_group_baselines_worked_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    std = (4 * 0.25 / 3) ** 0.5
    np.testing.assert_allclose(group_normalised(rewards), np.array([0.5, -0.5, -0.5, 0.5]) / std, rtol=1e-5)
    np.testing.assert_allclose(group_centred(rewards), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(leave_one_out(rewards), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("algorithm", GROUPED)
def test_a_shift_of_all_rewards_of_a_group_changes_nothing(algorithm: str) -> None:
    here, there = (found(algorithm, group_of(1.0, 2.0, 4.0)), found(algorithm, group_of(6.0, 7.0, 9.0)))
    np.testing.assert_allclose(here, there, rtol=1e-5)


def test_only_grpo_forgets_the_scale_of_rewards() -> None:
    small, large = group_of(1.0, 2.0, 4.0), group_of(10.0, 20.0, 40.0)
    np.testing.assert_allclose(found("grpo", small), found("grpo", large), rtol=1e-5)
    for algorithm in ("dr-grpo", "rloo"):
        np.testing.assert_allclose(
            10.0 * np.array(found(algorithm, small)), found(algorithm, large), rtol=1e-5
        )


@pytest.mark.parametrize("algorithm", GROUPED)
def test_groups_do_not_see_each_other_whatever_the_order(algorithm: str) -> None:
    first, second = group_of(1.0, 2.0, 4.0), group_of(9.0, 7.0, 7.5, group=1)
    alone = found(algorithm, first) + found(algorithm, second)
    order = [3, 0, 4, 1, 2, 5]
    mixed = found(algorithm, [(first + second)[i] for i in order])
    np.testing.assert_allclose(mixed, [alone[i] for i in order])


@pytest.mark.parametrize("algorithm", GROUPED)
def test_a_group_of_equal_rewards_learns_nothing(algorithm: str) -> None:
    assert found(algorithm, group_of(0.1, 0.1, 0.1)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("algorithm", GROUPED)
def test_a_group_of_one_is_refused(algorithm: str) -> None:
    with pytest.raises(RlhfsimError, match="group 7 has 1") as caught:
        advantages(algorithm, [*group_of(1.0, 2.0), sample(9, 1.0, group=7)], PLAIN)
    assert caught.value.code == "group-too-small"


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float | None) -> None:
    with pytest.raises(RlhfsimError, match="reward of sample 1") as caught:
        advantages("grpo", [sample(0, 1.0), sample(1, reward)], PLAIN)
    assert caught.value.code == "reward-not-finite"


def test_ppo_without_values_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="no values"):
        advantages("ppo", [sample(0, 1.0)], PLAIN)


def test_rewards_are_clipped_before_they_are_compared() -> None:
    settings = Algorithm(kl_coefficient=0.0, reward_clip=2.0)
    assert found("dr-grpo", group_of(100.0, -100.0), settings) == [2.0, -2.0]


def test_an_empty_response_still_counts_in_its_group() -> None:
    results = advantages("dr-grpo", [sample(0, 0.0, length=0), sample(1, 1.0)], PLAIN)
    assert [s.advantages.tolist() for s in results if s.advantages is not None] == [[], [0.5] * 3]


def test_token_rewards_put_kl_on_every_token_and_the_reward_on_the_last() -> None:
    logprobs = {
        "old_logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
        "reference_logprobs": np.array([-1.5, -2.0, -2.0], np.float32),
    }
    settings = Algorithm(kl_coefficient=0.1)
    rewarded = token_rewards("ppo", sample(0, 5.0, **logprobs), settings)
    np.testing.assert_allclose(rewarded, [-0.05, 0.0, 5.1], rtol=1e-6)
    np.testing.assert_allclose(token_rewards("grpo", sample(0, 5.0, **logprobs), settings), [0.0, 0.0, 5.0])


def test_kl_in_the_reward_uses_the_samplers_log_probs_where_none_were_recomputed() -> None:
    logprobs = {
        "rollout_logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
        "reference_logprobs": np.array([-1.5, -2.0, -2.0], np.float32),
    }
    rewarded = token_rewards("rloo", sample(0, 0.0, **logprobs), Algorithm(kl_coefficient=0.1))
    np.testing.assert_allclose(rewarded, [-0.05, 0.0, 0.1], rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_all_tokens(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    samples = [
        sample(i, float(rng.normal()), length=n, values=rng.normal(size=n).astype(np.float32))
        for i, n in enumerate((3, 5, 2))
    ]
    results = advantages(algorithm, samples, PLAIN)
    flat = np.concatenate([s.advantages for s in results if s.advantages is not None])
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert all(s.returns is not None and s.returns.dtype == np.float32 for s in results)


def test_reinforce_returns_are_the_discounted_reward() -> None:
    (result,) = advantages("reinforce++", [sample(0, 1.0)], Algorithm(kl_coefficient=0.0, gamma=0.5))
    assert result.returns is not None
    assert result.returns.tolist() == [0.25, 0.5, 1.0]


def test_whitening_of_what_does_not_vary_is_zero() -> None:
    assert [row.tolist() for row in whiten([np.full(2, 0.1), np.full(1, 0.1)])] == [[0.0, 0.0], [0.0]]
    assert whiten([np.array([3.0])])[0].tolist() == [0.0]
    assert whiten([]) == []


@pytest.mark.parametrize("algorithm", [*GROUPED, "ppo", "reinforce++"])
def test_a_dropped_sample_teaches_nothing_and_the_others_as_if_it_had_never_been(algorithm: str) -> None:
    def rewarded(numbers: list[int]) -> list[Sample]:
        logprobs = {"rollout_logprobs": np.zeros(3, np.float32), "values": np.full(3, 0.5, np.float32)}
        return [sample(i, float(i), **logprobs) for i in numbers]

    whole = rewarded([0, 1, 2, 5])
    whole[2] = emptied(whole[2], with_reference=False)
    assert whole[2].dropped
    learnt, without = advantages(algorithm, whole, PLAIN), advantages(algorithm, rewarded([0, 1, 5]), PLAIN)
    assert learnt[2].advantages is not None
    assert len(learnt[2].advantages) == 0
    for mine, other in zip([learnt[0], learnt[1], learnt[3]], without, strict=True):
        assert mine.advantages is not None
        np.testing.assert_array_equal(mine.advantages, other.advantages)


def test_the_epsilon_of_the_deviation_is_a_setting() -> None:
    rewards = np.array([0.0, 1e-4])
    small, large = group_normalised(rewards), group_normalised(rewards, 1e-4)
    deviation = rewards.std(ddof=1)
    np.testing.assert_allclose(large, small * (deviation + 1e-6) / (deviation + 1e-4))
    none = group_normalised(np.array([0.3, 0.3]), 0.0)
    np.testing.assert_array_equal(none, [0.0, 0.0])
