"""The policy's surrogate that a user brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.algorithms.custom import PolicyBatch, make, named
from executor.algorithms.metrics import Metrics, mean_of
from executor.settings import CustomPart


def surrogate(loss: Mapping[str, Any], batch: PolicyBatch) -> tuple[Tensor, Metrics]:
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
