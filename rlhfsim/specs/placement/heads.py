"""How a framework goes from hidden states to a loss: the bytes of a logit, and how many stand at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlhfsim.specs.loading import checked


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Bytes around the logits where a framework holds those of all tokens of a micro-batch."""

    train_bytes: Annotated[float, Field(gt=0)]
    """Per logit at the peak of the loss and its backward pass."""
    score_bytes: Annotated[float, Field(gt=0)]
    """Per logit in a forward pass without gradients."""
    vocab: Annotated[int, Field(ge=1)] | None = None
    """Entries of the vocabulary that are worked on at a time; None: all."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a micro-batch that are worked on at a time; None: all."""
    whole: bool = False
    """Tensor parallelism leaves the head and its logits whole."""
    source: str


UNFUSED = Head(
    train_bytes=10,
    score_bytes=10,
    source="BF16 logits, their FP32 copy, and one FP32 of softmax, gradient or exponentials",
)
"""Where nothing better is known."""
