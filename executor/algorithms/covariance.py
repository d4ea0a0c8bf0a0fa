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
from executor.algorithms.metrics import Metrics, mean_of
from rlhfsim.frozen import frozen

EntropyControl = Literal["none", "clip_cov", "kl_cov"]


@frozen
class ControlSettings:
    """Settings of the control of entropy."""

    clip_low: float = 0.2
    """How far below 1 the ratio goes before it is clipped; such tokens are not chosen."""
    clip_high: float = 0.2
    """How far above 1."""
    entropy_control: EntropyControl = "none"
    covariance_share: float = 2e-4
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    covariance_kl: float = 1.0


def controlled(
    loss: Tensor, advantages: Tensor, new: Tensor, old: Tensor, mask: Tensor, settings: ControlSettings
) -> tuple[Tensor, Metrics]:
    """The loss (B, T) of the surrogate with its entropy controlled, and the share of chosen tokens."""
    if settings.entropy_control == "none":
        return loss, {}
    advantages = torch.where(mask > 0, advantages.float(), 0.0)
    log_ratio = new - old
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    tokens = mask.sum().clamp(min=1.0)
    gain, likely = (values - (values * mask).sum() / tokens for values in (advantages, new.detach()))
    cov, valid, free = gain * likely, mask > 0, -advantages * ratio
    most = max(1, int(settings.covariance_share * int(valid.sum())))
    if settings.entropy_control == "clip_cov":
        clipped = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) > free
        low, high = settings.covariance_bounds
        chosen = _drawn(valid & ~clipped & (cov > low) & (cov < high), most)
        return torch.where(chosen, 0.0, loss), {"policy/controlled_fraction": mean_of(chosen.float(), mask)}
    chosen = _largest(cov, valid, most)
    return torch.where(chosen, free + settings.covariance_kl * log_ratio.abs(), free), {
        "policy/controlled_fraction": mean_of(chosen.float(), mask),
        "policy/clip_fraction": mean_of(torch.zeros_like(mask), mask),
    }


def _largest(cov: Tensor, valid: Tensor, most: int) -> Tensor:
    """So many of the valid ones with the largest covariance; (B, T)."""
    none = torch.zeros_like(valid)
    if not valid.any():
        return none
    largest = cov.masked_fill(~valid, -torch.inf).flatten().topk(most).indices
    return none.flatten().index_fill(0, largest, True).view_as(valid)


def _drawn(able: Tensor, most: int) -> Tensor:
    """At most so many of the True ones; the same on ranks that share the sequences, whatever they drew."""
    places = able.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(len(places))
    order = torch.randperm(len(places), generator=generator)[:most].to(places.device)
    return torch.zeros_like(able).flatten().index_fill(0, places[order], True).view_as(able)
