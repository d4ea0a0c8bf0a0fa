"""Bytes around the logits: all of them at once (M4), or in the chunks of the executor's head."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.engine_numbers import LOGIT_CHUNK_BYTES, LOGIT_CHUNK_ROWS
from rlhfsim.specs.placement.heads import UNFUSED, Head
from rlhfsim.specs.placement.layout_columns import AnyLayout

BF16, FP32 = 2.0, 4.0
Size: TypeAlias = Any
"""A float, or an array of floats, one a layout."""


def head_peak(
    model: ModelSpec,
    layout: AnyLayout,
    backend: Backend,
    tokens: Size,
    head: Head | None,
    *,
    norm: float | None = None,
    gradients: bool = False,
    frozen: bool = False,
) -> Size:
    """Bytes between the last layer and the gradient of its output.

    `head`: of a framework that holds the logits of all tokens; without it the executor's chunks, and all of
    them under Megatron.
    `norm`: what the last norm keeps, per hidden element; None in a forward pass without gradients.
    `frozen`: the output matrix gets no gradient.
    """
    if head is not None or backend == "megatron":
        taken = head or UNFUSED
        logits = logits_bytes(model, layout, tokens, taken, training=norm is not None)
        return logits + (own_sums(model, layout, tokens, taken, frozen=frozen) if norm is not None else 0.0)
    if norm is None:
        states, logits = 2 * BF16, 2 * _chunk(model, tokens)
    else:
        states = norm + 2 * BF16
        logits = _chunk_backward(model, layout, tokens, gradients)
    return tokens * model.hidden * states + logits


def _chunk(model: ModelSpec, tokens: Size) -> Size:
    """FP32 logits of the executor's largest chunk of tokens; tensor parallelism leaves the head whole.

    In a scoring call twice: their exponentials.
    """
    if model.value_head:
        return FP32 * tokens
    most = max(LOGIT_CHUNK_ROWS, LOGIT_CHUNK_BYTES / (FP32 * model.vocab))
    return FP32 * model.vocab * np.minimum(tokens, most)


def _chunk_backward(model: ModelSpec, layout: AnyLayout, tokens: Size, gradients: bool) -> Size:
    """The head's backward pass, chunk after chunk.

        one chunk: max(5 C, C + G)      more: max(5 C + G, C + 2 G)

    C are the FP32 logits of a chunk: they, the gradient of the target's, and three of the log-sum-exp's
    gradient are held at once. G is the gradient of the output matrix, which all chunks add up before it
    leaves. Source: executor/engines/transformers/heads.py; torch's derivatives of logsumexp and gather.
    """
    chunk = _chunk(model, tokens)
    gradient = head_gradient(model, layout) if gradients and not model.value_head else 0.0
    others = np.where(FP32 * model.vocab * tokens > chunk, gradient, 0.0)
    return np.maximum(5 * chunk + others, chunk + gradient + others)


def head_gradient(model: ModelSpec, layout: AnyLayout) -> Size:
    """BF16 gradient of the output matrix."""
    return BF16 * model.vocab * model.embedding_width / layout.tp


def own_sums(model: ModelSpec, layout: AnyLayout, tokens: Size, head: Head, *, frozen: bool) -> Size:
    """Bytes of the gradients that a head sums by itself, of its matrix and of the states before it."""
    if model.value_head:
        return 0.0
    matrix = head_gradient(model, layout) / BF16 * head.matrix_bytes
    return tokens * model.hidden * head.state_bytes + (0.0 if frozen else matrix)


def logits_bytes(model: ModelSpec, layout: AnyLayout, tokens: Size, head: Head, *, training: bool) -> Size:
    """Bytes around the logits of `tokens` local tokens (M4); a value head has one per token."""
    cut = 1 if head.whole else layout.tp
    width = 1.0 if model.value_head else min(model.vocab, head.vocab or model.vocab) / cut
    at_once = np.minimum(tokens, head.tokens or tokens)
    return at_once * width * (head.train_bytes if training else head.score_bytes)
