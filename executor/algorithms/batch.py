"""What a loss sees: one micro-batch as padded tensors, aligned with the responses.

Legend: B sequences, T tokens of the longest response of the micro-batch; position t belongs to response
token t, whatever the prompt's length. Padding is on the right and may hold any finite number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.samples import Sample
from rlhfsim.frozen import frozen


@frozen
class Batch:
    """One micro-batch; a field that a loss does not read may be None."""

    mask: Tensor
    """(B, T) 1 at response tokens that are learned from, 0 elsewhere."""
    num_tokens: int
    """Response tokens of the whole optimizer step, over all ranks and micro-batches."""
    num_sequences: int
    """Sequences likewise (both sides of every pair count)."""
    logprobs: Tensor | None = None
    """(B, T) of the model in training, with gradient."""
    values: Tensor | None = None
    """(B, T) of the critic in training, with gradient."""
    scores: Tensor | None = None
    """(B,) of the reward model in training, with gradient."""
    entropy: Tensor | None = None
    """(B, T) of the full next-token distribution, with gradient; needed for an entropy bonus."""
    old_logprobs: Tensor | None = None
    """(B, T) before the first update on this data; None: equal to `logprobs` (one update per batch)."""
    reference_logprobs: Tensor | None = None
    """(B, T)"""
    rollout_logprobs: Tensor | None = None
    """(B, T) as the rollout engine reported them."""
    advantages: Tensor | None = None
    """(B, T)"""
    returns: Tensor | None = None
    """(B, T) targets of the critic."""
    old_values: Tensor | None = None
    """(B, T) of the critic before the first update on this data."""
    labels: Tensor | None = None
    """(B,) +1 desirable or chosen, -1 undesirable or rejected."""
    group: Tensor | None = None
    """(B,) Pairs: both sides share it and are in one micro-batch, chosen first."""


_TOKEN_FIELDS = {
    "old_logprobs": "old_logprobs",
    "reference_logprobs": "reference_logprobs",
    "rollout_logprobs": "rollout_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "old_values": "values",
}
"""Field of Batch: field of Sample."""


def collate(
    samples: Sequence[Sample],
    *,
    num_tokens: int,
    num_sequences: int,
    logprobs: Tensor | None = None,
    values: Tensor | None = None,
    scores: Tensor | None = None,
    entropy: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """The micro-batch of `samples`; model outputs come from the caller, the rest from the samples.

    A field becomes a tensor where every sample has it; T is the longest response.
    """
    labels = [sample.label for sample in samples]
    rows = {name: [getattr(s, field) for s in samples] for name, field in _TOKEN_FIELDS.items()}
    tokens = {name: None if any(r is None for r in of) else _pad(of, device) for name, of in rows.items()}
    return Batch(
        mask=_pad([sample.learned for sample in samples], device),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        logprobs=logprobs,
        values=values,
        scores=scores,
        entropy=entropy,
        labels=None if None in labels else torch.tensor(labels, device=device),
        group=torch.tensor([sample.group for sample in samples], device=device),
        **tokens,
    )


def _pad(rows: Sequence[Any], device: torch.device | str) -> Tensor:
    """(B, T) float32 with zeros on the right."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.float32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded).to(device)
