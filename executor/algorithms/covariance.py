"""Entropy control: the few tokens whose probability rises most with their advantage are held back.

    cov = (A - mean A)(log p - mean log p)      means over the tokens of the micro-batch

Clip-Cov: `share` of the tokens, drawn among those with cov within `bounds`, give no gradient. KL-Cov: the
`share` with the largest cov pay `coefficient` |log r|, and no ratio is clipped. Source: Cui et al. 2025,
arXiv 2505.22617, section 4; as verl 0.9.1 has it, where means and choice are those of a micro-batch: unlike
the other losses, these depend on how a step is cut. Legend: B sequences, T response tokens; r = p / p_old.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from executor.algorithms.kl import LOG_RATIO_LIMIT

EntropyControl = Literal["none", "clip_cov", "kl_cov"]


def controlled(
    kind: EntropyControl,
    loss: Tensor,
    advantages: Tensor,
    new: Tensor,
    old: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    share: float,
    bounds: tuple[float, float],
    coefficient: float,
) -> tuple[Tensor, Tensor]:
    """The loss (B, T) of the surrogate with its entropy controlled, and which tokens were chosen (B, T).

    `clip`: how far below and above 1 the ratio goes before it is clipped; such tokens are not chosen.
    """
    log_ratio = new - old
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    cov, valid = _covariance(advantages, new.detach(), mask), mask > 0
    count = int(valid.sum())
    if kind == "clip_cov":
        clipped = -advantages * ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) > -advantages * ratio
        able = valid & ~clipped & (cov > bounds[0]) & (cov < bounds[1])
        chosen = _drawn(able, max(1, int(share * count)))
        return torch.where(chosen, 0.0, loss), chosen
    free = -advantages * ratio
    if not count:
        return free, torch.zeros_like(valid)
    largest = cov.masked_fill(~valid, -torch.inf).flatten().topk(max(1, int(share * count))).indices
    chosen = torch.zeros_like(valid).flatten().index_fill(0, largest, True).view_as(valid)
    return torch.where(chosen, free + coefficient * log_ratio.abs(), free), chosen


def _covariance(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, T) of each token."""
    tokens = mask.sum().clamp(min=1.0)
    far = [values - (values * mask).sum() / tokens for values in (advantages, logprobs)]
    return far[0] * far[1]


def _drawn(able: Tensor, most: int) -> Tensor:
    """At most so many of the True ones; the same on ranks that share the sequences, whatever they drew."""
    places = able.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(len(places))
    order = torch.randperm(len(places), generator=generator)[:most].to(places.device)
    return torch.zeros_like(able).flatten().index_fill(0, places[order], True).view_as(able)
