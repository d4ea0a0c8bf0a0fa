"""How a framework goes from hidden states to a loss: the bytes of a logit, and how many exist at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked

Traffic = tuple[float, float]
"""Bytes of HBM per logit, forward and backward."""


@checked
@frozen
class Head:
    """Bytes around the logits where a framework holds those of all tokens of a micro-batch."""

    train_bytes: Annotated[float, Field(gt=0)]
    """Per logit at the peak of the loss and its backward pass."""
    score_bytes: Annotated[float, Field(gt=0)]
    """Per logit in a forward pass without gradients."""
    reference_bytes: Annotated[float, Field(gt=0)] | None = None
    """The same where a reference scores, of which no entropy is asked; None: as others that score."""
    score_traffic: Annotated[float, Field(gt=0)] | None = None
    """Bytes of HBM that a forward pass without gradients reads and writes per logit; None: as counted for one
    eager loss (`training.layer_time.head`)."""
    forward_traffic: Annotated[float, Field(gt=0)] | None = None
    """The same of the loss in training."""
    backward_traffic: Annotated[float, Field(gt=0)] | None = None
    """The same of its gradients."""
    vocab: Annotated[int, Field(ge=1)] | None = None
    """Entries of the vocabulary that are worked on at a time; None: all."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a micro-batch that are worked on at a time; None: all."""
    whole: bool = False
    """Tensor parallelism leaves the head and its logits whole."""
    matrix_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Per entry of the output matrix, what its own gradient sums take in addition to the backend's in the
    backward pass; none where the matrix is frozen."""
    state_bytes: Annotated[float, Field(ge=0)] = 0.0
    """The same per element of the hidden states before it."""
    computed_again: bool = False
    """The backward pass multiplies by the output matrix once more for the logits."""
    source: str

    def of(self, role: str) -> Head:
        """The head as a role has it."""
        own = self.reference_bytes if role == "reference" else None
        return self if own is None else replace(self, score_bytes=own)

    def traffic(self, *, scoring: bool) -> Traffic | None:
        """Bytes per logit that a forward and a backward pass move; None: not known to differ."""
        ahead = self.score_traffic if scoring else self.forward_traffic
        return None if ahead is None else (ahead, 0.0 if scoring else self.backward_traffic or 0.0)


UNFUSED = Head(
    train_bytes=10,
    score_bytes=10,
    source="BF16 logits, their FP32 copy, and one FP32 of softmax, gradient or exponentials",
)
"""Where nothing better is known."""
