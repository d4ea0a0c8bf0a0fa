"""SAPO's loss (arXiv 2511.20347): a soft gate in place of PPO's clip. `custom: {loss: "sapo:loss"}`.

terms = -A sigmoid(t (r - 1)) 4 / t        t = positive where A > 0, else negative
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.algorithms.custom import PolicyBatch


def loss(
    batch: PolicyBatch, *, positive: float = 1.0, negative: float = 1.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """Terms (B, T) of the surrogate, and the gate's mean as a metric; use it with `aggregation: sequence`."""
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    sharpness = torch.where(batch.advantages > 0, positive, negative)
    gate = torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness
    return -gate * batch.advantages, {"policy/gate": gate}
