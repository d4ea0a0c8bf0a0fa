"""VESPO's loss (arXiv 2602.10693): a gamma weight of the whole response. `custom: {loss: "vespo:loss"}`.

    terms = -phi(w) A log p        phi(w) = exp(l) w^k exp(-l w), without gradient

Legend: w ratio of policy to rollout of a whole response; k, l by the sign of A. As in TRL 1.16; set
`algorithm.correction: none`: w holds the correction already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from executor.algorithms.custom import PolicyBatch

LOWEST, HIGHEST = math.log(1e-8), 20.0


def loss(
    batch: PolicyBatch,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    cap: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Terms (B, T) of the surrogate, and the mean weight as a metric; `cap`: of a token's mismatch."""
    with torch.no_grad():
        log_ratio = (batch.logprobs - batch.old_logprobs).clamp(-HIGHEST, HIGHEST)
        log_w = (log_ratio * batch.mask).sum(-1, keepdim=True)
        if batch.rollout_logprobs is not None:
            mismatch = (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=cap).log()
            log_w += (mismatch.clamp(LOWEST, HIGHEST) * batch.mask).sum(-1, keepdim=True)
        log_w = log_w.clamp(LOWEST, HIGHEST)
        right = batch.advantages >= 0
        k = torch.where(right, k_positive, k_negative)
        sharpness = torch.where(right, lambda_positive, lambda_negative).clamp(min=1e-4)
        phi = (sharpness + k * log_w - sharpness * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    return -phi * batch.advantages * batch.logprobs, {"policy/phi": phi}
