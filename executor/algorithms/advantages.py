"""Advantages and returns of the samples of one iteration, on the driver, in float64 until stored.

Legend: a sample has R response tokens; G samples of one prompt are a group. All functions take ragged data:
one array a sample, no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.algorithms.kl import kl
from executor.algorithms.recipes import kl_terms, recipe
from executor.algorithms.shaping import shaped
from executor.samples import Sample
from executor.settings import Algorithm
from rlhfsim.errors import RlhfsimError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
VARIANCE_EPSILON = 1e-8
"""Added to the variance when whitening."""


def advantages(
    algorithm: str, samples: Sequence[Sample], settings: Algorithm, max_tokens: int | None = None
) -> list[Sample]:
    """The samples with `advantages` (R,), and for ppo and reinforce++ `returns` (R,), in their order.

    The batch must hold all samples of a group and all samples of the iteration: groups are compared and
    whitening is done over all of them. `max_tokens`: most of a response, for penalties of its length.

    Raises:
        RlhfsimError: a reward is missing or not finite, a group is too small, ppo has no values.
    """
    match kind := recipe(algorithm).advantages:
        case None:
            raise AssertionError(f"{algorithm} learns without advantages")
        case "gae":
            return _ppo(samples, settings, max_tokens)
        case "returns":
            # whitened sums of the token rewards to come; source: Hu et al. 2025, arXiv 2501.03262
            returns = [
                discounted(token_rewards(algorithm, s, settings, max_tokens), settings.gamma, s.sampled)
                for s in samples
            ]
            return _stored(samples, _whitened(samples, returns), returns)
    scores = np.array([_score(algorithm, sample, settings, max_tokens) for sample in samples])
    baselines: dict[str, Callable[[Array], Array]] = {
        "group_normalised": lambda rewards: group_normalised(rewards, settings.deviation_epsilon),
        "group_centred": group_centred,
        "leave_one_out": leave_one_out,
    }
    return _grouped(algorithm, baselines[kind], samples, scores)


def estimated(
    estimate: Callable[[list[Sample]], tuple[list[Any], list[Any] | None]],
    algorithm: str,
    samples: Sequence[Sample],
    settings: Algorithm,
    max_tokens: int | None = None,
) -> list[Sample]:
    """As `advantages`, by the user's `estimate`: it sees rewards as they are learned from (scaled, with
    penalties and KL) and gives a number or an (R,) array a sample, and returns for a critic.

    Raises:
        RlhfsimError: another number of them, another length, or a value that is not finite.
    """
    scores = [_score(algorithm, s, settings, max_tokens) for s in samples]
    seen = [s if s.dropped else replace(s, reward=r) for s, r in zip(samples, scores, strict=True)]
    found, returns = estimate(seen)
    targets = None if returns is None else _rows("returns", samples, returns)
    return _stored(samples, _rows("advantages", samples, found), targets)


def _rows(name: str, samples: Sequence[Sample], found: Sequence[Any]) -> list[Array]:
    """(R,) of each sample, 0 at tokens that the policy did not sample."""
    if len(found) != len(samples):
        raise RlhfsimError(
            "custom-advantages",
            f"custom.advantages gave {len(found)} {name} for {len(samples)} samples",
            help="give a number or an array for each sample, in their order",
        )
    rows = []
    for sample, value in zip(samples, found, strict=True):
        try:
            value = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            value = np.full((0, 0), np.nan)
        if value.shape not in ((), (sample.num_tokens,)) or not np.isfinite(value).all():
            raise RlhfsimError(
                "custom-advantages",
                f"custom.advantages: {name} of sample {sample.id} have shape {value.shape} or are not finite",
                help=f"give a finite number, or an array of its {sample.num_tokens} tokens",
            )
        rows.append(np.where(sample.sampled, value, 0.0))
    return rows


def gae(
    rewards: Array, values: Array, gamma: float, lam: float, mask: Mask | None = None
) -> tuple[Array, Array]:
    """Generalised advantage estimates and returns of one response, each (R,).

        delta_t = r_t + gamma V_{t+1} - V_t      A_t = delta_t + gamma lam A_{t+1}      return_t = A_t + V_t

    V and A after the last token are 0. `mask` is 0 at tokens that the policy did not sample (a tool's
    answer): V and A are carried across them. Source: Schulman et al. 2016, arXiv 1506.02438.
    """
    advantage = np.zeros(len(rewards))
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        if mask is None or mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
        advantage[t] = next_advantage
    return advantage, advantage + values


def discounted(rewards: Array, gamma: float, mask: Mask | None = None) -> Array:
    """Discounted sums of the rewards from each token on, (R,); 0 at masked tokens, which do not discount."""
    sums = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        if mask is None or mask[t]:
            following = sums[t] = rewards[t] + gamma * following
    return sums


def whiten(rows: Sequence[Array]) -> list[Array]:
    """The rows with mean 0 and variance 1 over all their tokens together; zeros where nothing varies."""
    flat = np.concatenate([*rows, np.zeros(0)])
    if len(flat) < 2 or np.ptp(flat) == 0.0:
        return [np.zeros(len(row)) for row in rows]
    scale = math.sqrt(flat.var(ddof=1) + VARIANCE_EPSILON)
    return [(row - flat.mean()) / scale for row in rows]


def group_normalised(rewards: Array, epsilon: float = 1e-6) -> Array:
    """GRPO: (r - mean) / (std + epsilon) over the group, (G,), with the unbiased std; 0 where none differs.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2.
    """
    centred = group_centred(rewards)
    return centred / (float(rewards.std(ddof=1)) + epsilon) if centred.any() else centred


def group_centred(rewards: Array) -> Array:
    """Dr. GRPO: r - mean over the group, (G,); the std would favour too easy and too hard prompts.

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.1.
    """
    return np.zeros(len(rewards)) if np.ptp(rewards) == 0.0 else rewards - rewards.mean()


def leave_one_out(rewards: Array) -> Array:
    """RLOO: r - mean of the group's other rewards, (G,).

    Source: Ahmadian et al. 2024, arXiv 2402.14740, section 2.2.
    """
    count = len(rewards)
    return group_centred(rewards) * (count / (count - 1))


def token_rewards(
    algorithm: str, sample: Sample, settings: Algorithm, max_tokens: int | None = None
) -> Array:
    """(R,) the shaped reward at the last sampled token; KL in the reward: - coefficient x KL everywhere.

    The KL compares the policy that this step starts from with the reference; without reference log-probs
    (a plan without KL) there is none. Tokens of an environment have neither.
    """
    rewards = np.zeros(sample.num_tokens)
    place, estimator = kl_terms(algorithm, settings)
    if place == "reward" and sample.reference_logprobs is not None:
        policy = sample.rollout_logprobs if sample.old_logprobs is None else sample.old_logprobs
        assert policy is not None, "KL in the reward needs the policy's log-probs"
        log_ratio = policy - sample.reference_logprobs
        rewards -= settings.kl_coefficient * kl(log_ratio, estimator, np.exp) * sample.sampled
    if sample.num_sampled:
        rewards[np.flatnonzero(sample.sampled)[-1]] += shaped(sample, settings, max_tokens)
    return rewards


def _ppo(samples: Sequence[Sample], settings: Algorithm, max_tokens: int | None) -> list[Sample]:
    """Whitened GAE, and returns for the critic that are not whitened."""
    pairs = []
    for sample in samples:
        if sample.values is None:
            raise RlhfsimError("missing-values", f"sample {sample.id} has no values, ppo needs its critic")
        rewards = token_rewards("ppo", sample, settings, max_tokens)
        values = sample.values.astype(np.float64)
        pairs.append(gae(rewards, values, settings.gamma, settings.lam, sample.sampled))
    rows = _whitened(samples, [advantage for advantage, _ in pairs])
    return _stored(samples, rows, [target for _, target in pairs])


def _whitened(samples: Sequence[Sample], rows: Sequence[Array]) -> list[Array]:
    """`whiten` over the sampled tokens; 0 at those of an environment."""
    whitened = [np.zeros(len(row)) for row in rows]
    sampled = whiten([row[s.sampled] for row, s in zip(rows, samples, strict=True)])
    for row, sample, values in zip(whitened, samples, sampled, strict=True):
        row[sample.sampled] = values
    return whitened


def _score(algorithm: str, sample: Sample, settings: Algorithm, max_tokens: int | None) -> float:
    """What a sample's group compares; an empty response still has its reward, unless that failed."""
    if sample.dropped:
        return 0.0
    if not sample.num_sampled:
        return shaped(sample, settings, max_tokens)
    return float(token_rewards(algorithm, sample, settings, max_tokens).sum())


def _grouped(
    algorithm: str, baseline: Callable[[Array], Array], samples: Sequence[Sample], scores: Array
) -> list[Sample]:
    """One number a sample, the same at each of its tokens."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    dropped = {index for index, sample in enumerate(samples) if sample.dropped}
    centred = np.zeros(len(samples))
    for group, members in groups.items():
        if len(members) < 2:
            raise RlhfsimError(
                "group-too-small",
                f"{algorithm} compares the samples of one prompt, but group {group} has {len(members)}",
                help="sample at least 2 responses a prompt (samples in the workload), "
                "or use ppo or reinforce++",
            )
        counted = [index for index in members if index not in dropped]
        if len(counted) > 1:  # one alone has nothing to be compared with
            centred[counted] = baseline(scores[counted])
    rows = [s.sampled * value for s, value in zip(samples, centred, strict=True)]
    return _stored(samples, rows, None)


def _stored(
    samples: Sequence[Sample], rows: Sequence[Array], returns: Sequence[Array] | None
) -> list[Sample]:
    """The samples with their results in float32."""
    targets = [None] * len(samples) if returns is None else [r.astype(np.float32) for r in returns]
    return [
        replace(sample, advantages=row.astype(np.float32), returns=target)
        for sample, row, target in zip(samples, rows, targets, strict=True)
    ]
