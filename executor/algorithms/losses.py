"""Losses of one micro-batch; `compute` is the only way in.

Every loss is a sum over this micro-batch divided by a normaliser of the whole optimizer step, so that the sum
over all micro-batches and ranks is the loss of the step, however its sequences are split. An engine that
averages gradients over n data-parallel ranks multiplies by n.

Legend: B sequences, T response tokens, as in batch.py. Log-probs are used in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from executor.algorithms.batch import Batch as Batch
from executor.algorithms.batch import collate as collate
from executor.algorithms.covariance import ControlSettings, controlled
from executor.algorithms.custom import PolicyBatch, make, named
from executor.algorithms.kl import LOG_RATIO_LIMIT, Estimator, kl
from executor.algorithms.metrics import Metrics, largest_of, mean_of
from executor.algorithms.preferences import dpo_loss, kto_loss, reward_model_loss
from executor.samples import LossSpec
from executor.settings import CustomPart
from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.workload import PolicyLoss

Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["none", "truncated", "masked"]
Level = Literal["token", "sequence"]


def compute(spec: LossSpec, batch: Batch) -> tuple[Tensor, Metrics]:
    """The loss, a scalar with gradient, and the metrics of one micro-batch (see metrics.py for their form).

    Settings are the fields of PolicySettings, or the keyword arguments of value_loss, sft_loss,
    distillation_loss (here), dpo_loss, kto_loss and reward_model_loss (preferences.py). Normaliser of it:
    policy, value, sft and distillation by `aggregation` (token: num_tokens; sequence: mean of each sequence,
    then num_sequences; constant: num_sequences x max_tokens); dpo and reward_model: pairs, num_sequences / 2;
    kto: num_sequences. Metrics are means over tokens, those of pairs over pairs and of kto over sequences;
    `tokens` and `sequences` are counts of this micro-batch.
    """
    losses: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
        "policy": lambda batch, **settings: policy_loss(batch, PolicySettings(**settings)),
        "value": value_loss,
        "dpo": dpo_loss,
        "kto": kto_loss,
        "sft": sft_loss,
        "distillation": distillation_loss,
        "reward_model": reward_model_loss,
    }
    loss, metrics = losses[spec.name](batch, **spec.settings)
    counts = {
        "tokens": batch.mask.sum().double(),
        "sequences": batch.mask.new_tensor(len(batch.mask), dtype=torch.float64),
    }
    return loss, metrics | counts


@frozen
class PolicySettings(ControlSettings):
    """Settings of the policy loss."""

    policy_loss: PolicyLoss | Mapping[str, Any] = "ppo"
    """A name, or the user's surrogate (custom.py)."""
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["reward", "loss"] = "loss"
    entropy_coefficient: float = 0.0
    correction: Correction = "none"
    correction_cap: float = 2.0
    correction_level: Level = "token"
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Against whose log-probs the ratio is taken; those of the rollout's engine leave nothing to correct."""
    aggregation: Aggregation = "token"
    max_tokens: int | None = None


def policy_loss(batch: Batch, settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with importance correction, KL and entropy terms.

        loss = sum(w surrogate + kl_coefficient KL - entropy_coefficient H) / normaliser

    The entropy is also held up by the covariance of single tokens (covariance.py). Source: Schulman et al.
    2017, arXiv 1707.06347.
    """
    new, mask = _logprobs(batch.logprobs, batch.mask), batch.mask
    old, rollout = _behaviour(batch, new, settings.old_logprobs)
    if not isinstance(settings.policy_loss, str):
        surrogate, metrics = _custom_surrogate(settings.policy_loss, _policy_batch(batch, new, old, rollout))
    else:
        surrogate, metrics = _surrogate(
            settings.policy_loss, batch, new, old, settings.clip_low, settings.clip_high, settings.dual_clip
        )
        assert batch.advantages is not None
        surrogate, more = controlled(surrogate, batch.advantages, new, old, mask, settings)
        metrics |= more
    if rollout is not None:
        trained = new.detach() if settings.old_logprobs == "rollout" else old
        metrics |= _mismatch(trained, rollout, mask)
    if rollout is not None and settings.correction != "none" and settings.old_logprobs == "recompute":
        gap = old - rollout
        weight = _correction(
            gap if settings.correction_level == "token" else _sums(gap),
            settings.correction,
            settings.correction_cap,
        )
        surrogate = weight * surrogate
        metrics["correction/weight_mean"] = mean_of(weight, mask)
    terms = surrogate
    if batch.reference_logprobs is not None:
        divergence = kl(new - _logprobs(batch.reference_logprobs, mask), settings.kl_estimator, torch.exp)
        metrics |= {"kl/mean": mean_of(divergence, mask), "max:kl/max": largest_of(divergence, mask)}
        terms = terms + settings.kl_coefficient * divergence if settings.kl_in == "loss" else terms
    if settings.entropy_coefficient:
        assert batch.entropy is not None, "an entropy bonus needs Batch.entropy with gradient"
        terms = terms - settings.entropy_coefficient * batch.entropy.float()
    # without the full distribution -log p of the sampled token estimates the entropy (unbiased on-policy)
    metrics["policy/entropy"] = mean_of(-new if batch.entropy is None else batch.entropy, mask)
    metrics["policy/loss"] = mean_of(surrogate, mask)
    return _aggregate(terms, batch, settings.aggregation, settings.max_tokens), metrics


def value_loss(
    batch: Batch,
    *,
    value_clip: float | None = 0.2,
    aggregation: Aggregation = "token",
    max_tokens: int | None = None,
) -> tuple[Tensor, Metrics]:
    """Half the squared error to the returns, (B, T); clipped: the larger of moving freely and by value_clip.

    Source: Schulman et al.'s PPO implementation, openai/baselines; described by Huang et al. 2022, "The 37
    Implementation Details of Proximal Policy Optimization", detail 9.
    """
    assert batch.values is not None, "the value loss needs values"
    assert batch.returns is not None, "the value loss needs returns"
    values, returns, mask = batch.values.float(), batch.returns.float(), batch.mask
    error = torch.where(mask > 0, values - returns, 0.0)
    squared = error.square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None and batch.old_values is not None:
        old = batch.old_values.float()
        near = old + (values - old).clamp(-value_clip, value_clip)
        bounded = (near - returns).square()
        clipped = (bounded > squared).float()
        squared = torch.maximum(squared, bounded)
    metrics = {
        "value/loss": mean_of(0.5 * squared, mask),
        "value/clip_fraction": mean_of(clipped, mask),
        "value/mean": mean_of(values, mask),
        "value/error": mean_of(error, mask),
        "value/error_squared": mean_of(error.square(), mask),
        "value/return": mean_of(returns, mask),
        "value/return_squared": mean_of(returns.square(), mask),
    }
    return _aggregate(0.5 * squared, batch, aggregation, max_tokens), metrics


def sft_loss(
    batch: Batch, *, aggregation: Aggregation = "token", max_tokens: int | None = None
) -> tuple[Tensor, Metrics]:
    """Cross-entropy of the response tokens."""
    terms = -_logprobs(batch.logprobs, batch.mask)
    metrics = {"sft/loss": mean_of(terms, batch.mask)}
    return _aggregate(terms, batch, aggregation, max_tokens), metrics


def distillation_loss(
    batch: Batch,
    *,
    estimator: Estimator = "k2",
    aggregation: Aggregation = "token",
    max_tokens: int | None = None,
) -> tuple[Tensor, Metrics]:
    """Divergence of the policy from the teacher at the tokens that the policy drew.

    On such tokens the mean gradient of k2 is that of KL(policy || teacher), that of k3 the gradient of
    KL(teacher || policy), up to the limits of `kl`. Both divergences on a student's own samples: Agarwal et
    al., arXiv 2306.13649.
    """
    new, mask = _logprobs(batch.logprobs, batch.mask), batch.mask
    gap = new - _logprobs(batch.reference_logprobs, mask)
    terms = kl(gap, estimator, torch.exp)
    metrics = {"distillation/loss": mean_of(terms, mask), "kl/mean": mean_of(gap, mask)}
    return _aggregate(terms, batch, aggregation, max_tokens), metrics


def _logprobs(logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """(B, T) fp32, 0 at padding; -inf (a token that a filter forbids) becomes finite, its gradient 0."""
    assert logprobs is not None, "this loss needs log-probs"
    return torch.where(mask > 0, logprobs.float(), 0.0).clamp(min=-1e4)


def _behaviour(
    batch: Batch, new: Tensor, source: Literal["recompute", "rollout"]
) -> tuple[Tensor, Tensor | None]:
    """Log-probs that the ratio is taken against, and those of the rollout engine if known, both (B, T)."""
    rollout = batch.rollout_logprobs
    rollout = None if rollout is None else _logprobs(rollout, batch.mask)
    if source == "rollout":
        assert rollout is not None, "old log-probs of the rollout engine are missing"
        return rollout, rollout
    old = new if batch.old_logprobs is None else _logprobs(batch.old_logprobs, batch.mask)
    return old.detach(), rollout


def _policy_batch(batch: Batch, new: Tensor, old: Tensor, rollout: Tensor | None) -> PolicyBatch:
    assert batch.advantages is not None, "the policy loss needs advantages"
    reference = batch.reference_logprobs
    return PolicyBatch(
        logprobs=new,
        old_logprobs=old,
        advantages=torch.where(batch.mask > 0, batch.advantages.float(), 0.0),
        mask=batch.mask,
        rollout_logprobs=rollout,
        reference_logprobs=None if reference is None else _logprobs(reference, batch.mask),
    )


def _custom_surrogate(loss: Mapping[str, Any], batch: PolicyBatch) -> tuple[Tensor, Metrics]:
    """Terms (B, T) of the user's loss, and means of what it reports.

    Raises:
        RlhfsimError: it failed, or its terms have another shape.
    """
    part = CustomPart(target=loss["target"], options=loss["options"])
    with named("loss", part):
        found = make(part, loss["folder"])(batch)
        terms, reported = found if isinstance(found, tuple) else (found, {})
        if terms.shape != batch.mask.shape:
            raise ValueError(f"terms have shape {tuple(terms.shape)}, the mask {tuple(batch.mask.shape)}")
        means = {name: mean_of(value.expand_as(terms), batch.mask) for name, value in reported.items()}
    return torch.where(batch.mask > 0, terms, 0.0), means


def _sums(terms: Tensor) -> Tensor:
    """(B, T) the sum over its sequence at each token; `terms` are 0 at padding."""
    return terms.sum(-1, keepdim=True).expand_as(terms)


def _surrogate(
    kind: PolicyLoss, batch: Batch, new: Tensor, old: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Metrics]:
    """Loss (B, T) of the surrogate, with a separate upper bound and the dual clip.

        ppo, gspo   max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A dual
        cispo       -A sg[clip(r, 1 - low, 1 + high)] log p

    r is the ratio of the token; of gspo the geometric mean over the response, with the gradient of the
    token: sg[r] p / sg[p]. sg: without gradient. Sources: PPO; DAPO arXiv 2503.14476 (low, high); Ye et al.
    2020, arXiv 1912.09729 (dual clip); GSPO arXiv 2507.18071 equation 14; CISPO arXiv 2506.13585.
    """
    assert batch.advantages is not None, "the policy loss needs advantages"
    advantages = torch.where(batch.mask > 0, batch.advantages.float(), 0.0)
    log_ratio = new - old
    if kind == "gspo":
        lengths = batch.mask.sum(-1, keepdim=True).clamp(min=1.0)
        log_ratio = new - new.detach() + _sums(log_ratio.detach()) / lengths
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    near = ratio.clamp(1.0 - low, 1.0 + high)
    if kind == "cispo":
        loss, clipped = -advantages * near.detach() * new, near != ratio
    else:
        free, bounded = -advantages * ratio, -advantages * near
        loss, clipped = torch.maximum(free, bounded), bounded > free
    metrics = {
        "policy/clip_fraction": mean_of(clipped.float(), batch.mask),
        "policy/ratio_mean": mean_of(ratio, batch.mask),
        "policy/approx_kl": mean_of(kl(old - new, "k3", torch.exp), batch.mask),
        "max:policy/ratio_max": largest_of(ratio, batch.mask),
    }
    if dual is not None:
        limit = -advantages * dual
        cut = (advantages < 0) & (loss > limit)
        metrics["policy/dual_clip_fraction"] = mean_of(cut.float(), batch.mask)
        loss = torch.where(advantages < 0, torch.minimum(loss, limit), loss)
    return loss, metrics


def _correction(log_ratio: Tensor, kind: Correction, cap: float) -> Tensor:
    """Weight (B, T) of each token, exp(old - rollout) of the token or of its response, without gradient.

    truncated: at most `cap`; masked: 0 outside [1 / cap, cap]. Sources: Espeholt et al. 2018, arXiv
    1802.01561 (truncation); IcePop, arXiv 2510.18855 (masking). Over a response the product is unbiased and
    varies the more the longer it is.
    """
    weight = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind == "truncated":
        return weight.clamp(max=cap)
    return torch.where((weight >= 1.0 / cap) & (weight <= cap), weight, 0.0)


def _mismatch(trained: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """How far the rollout engine's log-probs are from the training engine's on the same tokens."""
    gap = (trained - rollout).detach()
    return {
        "mismatch/kl": mean_of(kl(-gap, "k3", torch.exp), mask),
        "mismatch/abs_logprob_mean": mean_of(gap.abs(), mask),
        "max:mismatch/abs_logprob_max": largest_of(gap.abs(), mask),
    }


def _aggregate(terms: Tensor, batch: Batch, kind: Aggregation, max_tokens: int | None) -> Tensor:
    """Scalar: terms (B, T) under the mask, over the normaliser of the whole step."""
    terms = torch.where(batch.mask > 0, terms, 0.0)
    match kind:
        case "token":
            return terms.sum() / batch.num_tokens
        case "sequence":
            lengths = batch.mask.sum(-1).clamp(min=1.0)
            return (terms.sum(-1) / lengths).sum() / batch.num_sequences
        case "constant":
            assert max_tokens is not None, "aggregation `constant` needs max_tokens"
            return terms.sum() / (batch.num_sequences * max_tokens)
