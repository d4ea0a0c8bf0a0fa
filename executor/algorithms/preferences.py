"""Losses of preference training: pairs (DPO, reward models) and single labels (KTO).

Legend: B sequences, T response tokens, N = B / 2 pairs. A sequence's log-ratio is the sum over its response
of log-prob minus reference log-prob.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from executor.algorithms.batch import Batch
from executor.algorithms.metrics import Metrics, mean_of


def dpo_loss(batch: Batch, *, beta: float = 0.1) -> tuple[Tensor, Metrics]:
    """-log sigmoid(beta (log-ratio chosen - log-ratio rejected)), over the pairs of the step.

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7.
    """
    chosen, rejected = _pairs(batch, beta * _log_ratios(batch))  # (N,) implicit rewards
    loss, metrics = _bradley_terry("dpo", chosen, rejected, batch)
    every = torch.ones_like(chosen)
    metrics |= {"dpo/chosen_reward": mean_of(chosen, every), "dpo/rejected_reward": mean_of(rejected, every)}
    return loss, metrics


def reward_model_loss(batch: Batch) -> tuple[Tensor, Metrics]:
    """-log sigmoid(score chosen - score rejected), over the pairs of the step.

    Source: Ouyang et al. 2022, arXiv 2203.02155, equation 1.
    """
    assert batch.scores is not None, "a reward model gives scores"
    chosen, rejected = _pairs(batch, batch.scores.float())  # (N,)
    return _bradley_terry("reward_model", chosen, rejected, batch)


def _bradley_terry(name: str, chosen: Tensor, rejected: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """-log P(the chosen of a pair wins), both (N,). Source: Bradley and Terry 1952, Biometrika 39, 324."""
    losses = -logsigmoid(chosen - rejected)
    every = torch.ones_like(losses)
    metrics = {
        f"{name}/loss": mean_of(losses, every),
        f"{name}/accuracy": mean_of((chosen > rejected).float(), every),
        f"{name}/margin": mean_of(chosen - rejected, every),
    }
    return 2.0 * losses.sum() / batch.num_sequences, metrics


def kto_loss(
    batch: Batch,
    *,
    kl_baseline: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """1 - sigmoid(+-beta (log-ratio - baseline)), + for desirable and - for undesirable responses.

    `kl_baseline` is the KL of policy to reference on the whole step's data, the same in all ranks and without
    gradient: see `mismatched` and `kl_baseline`. Source: Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8.
    """
    assert batch.labels is not None, "KTO needs labels"
    log_ratios, good = _log_ratios(batch), batch.labels > 0
    sign = torch.where(good, 1.0, -1.0)
    weight = torch.where(good, desirable_weight, undesirable_weight)
    losses = weight * (1.0 - torch.sigmoid(sign * beta * (log_ratios - kl_baseline)))
    metrics = {
        "kto/loss": mean_of(losses, torch.ones_like(losses)),
        "kto/desirable_reward": mean_of(beta * log_ratios, good),
        "kto/undesirable_reward": mean_of(beta * log_ratios, ~good),
    }
    return losses.sum() / batch.num_sequences, metrics


def _log_ratios(batch: Batch) -> Tensor:
    """(B,) in fp32."""
    assert batch.logprobs is not None, "this loss needs log-probs"
    assert batch.reference_logprobs is not None, "this loss needs reference log-probs"
    terms = batch.logprobs.float() - batch.reference_logprobs.float()
    return torch.where(batch.mask > 0, terms, 0.0).sum(-1)


def _pairs(batch: Batch, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) of the chosen and (N,) of the rejected sides."""
    assert batch.group is not None, "DPO needs groups"
    order = torch.argsort(batch.group, stable=True)
    groups, sides = batch.group[order].view(-1, 2), rewards[order].view(-1, 2)
    assert bool((groups[:, 0] == groups[:, 1]).all()), "both sides of a pair go in one micro-batch"
    if batch.labels is not None:
        labels = batch.labels[order].view(-1, 2)
        assert bool((labels[:, 0] > labels[:, 1]).all()), "the chosen side comes first"
    return sides[:, 0], sides[:, 1]
