"""One training step of a preset's model on fake tensors: saved bytes and peaks, as the executor runs it.

The model is transformers' own, inside the executor's `HeadedModel` with its chunked head; gradients of
weights leave as soon as they are complete, as DeepSpeed's buckets and FSDP's reduce-scatter take them.
Bytes are those of tensors on one GPU without the weights: a caching allocator reserves more.

Legend: B sequences, L tokens of a row, N = B L tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from executor.engines.transformers.heads import HeadedModel, TokenHead
from executor.engines.transformers.stored import StoredForm
from lab.oracle import attention
from lab.oracle.live_bytes import LiveBytes
from rlhfsim.specs.model import presets


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes beside the weights."""

    saved: int
    """Alive between forward and backward: what backward needs."""
    forward: int
    """Peak of the forward pass."""
    head: int
    """Peak from the loss to the gradient of the hidden states."""
    layers: int
    """Peak of the layers' backward pass."""
    contents: dict[str, int]
    """Live bytes by operation at the highest of the peaks."""

    @property
    def peak(self) -> int:
        """Peak of the step."""
        return max(self.forward, self.head, self.layers)


def training_step(
    preset: str, *, rows: int, length: int, recompute: bool, layers: int | None = None
) -> Measured:
    """Forward and backward of (B = rows, L = length) tokens, every one of them with a loss.

    `layers` replaces the number of the preset. Packed sequences are one row; what attention keeps depends on
    N alone, so `rows` and `length` need no separate form for them.
    """
    with FakeTensorMode(), _unpacked_masks():
        model = build(preset, layers)
        if recompute:
            cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
        with LiveBytes() as bytes_:
            return _measure(model, bytes_, rows, length)


def scoring_pass(preset: str, *, rows: int, length: int, layers: int | None = None) -> int:
    """Peak bytes beside the weights of a forward pass without gradients, log-probs of every token."""
    with FakeTensorMode(), _unpacked_masks():
        model = build(preset, layers).eval()
        with LiveBytes() as live, torch.no_grad():
            live.follow([*model.parameters(), *model.buffers()], "weights")
            weights = live.reset()
            _forward(model, rows, length)
            return live.peak - weights


def build(preset: str, layers: int | None = None, *, attention_name: str = attention.NAME) -> HeadedModel:
    """The executor's trained model, weights in BF16 (inside a FakeTensorMode)."""
    attention.register()
    causal = cast(Any, AutoModelForCausalLM).from_config(
        configuration(preset, layers), dtype=torch.bfloat16, attn_implementation=attention_name
    )
    head = TokenHead(causal.get_output_embeddings(), causal.config, 1.0)
    return HeadedModel(causal.base_model, head, causal.config, "lm_head", StoredForm(causal)).train()


def configuration(preset: str, layers: int | None = None) -> Any:
    """transformers' configuration of a preset, cut to `layers`."""
    return AutoConfig.for_model(**_shape(preset, layers))


def _measure(model: HeadedModel, live: LiveBytes, rows: int, length: int) -> Measured:
    live.follow([*model.parameters(), *model.buffers()], "weights")
    weights = live.reset()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    after_head: list[tuple[int, dict[str, int]]] = []

    def head_is_done(_: Tensor) -> None:
        after_head.append((live.peak, dict(live.at_peak)))
        live.reset()

    model.backbone.register_forward_hook(
        lambda _, __, output: output.last_hidden_state.register_hook(head_is_done) and None
    )
    values = _forward(model, rows, length)
    saved, forward = live.live, live.peak
    live.reset()
    values.sum().backward()
    (head, in_head), (layers, in_layers) = after_head[0], (live.peak, dict(live.at_peak))
    return Measured(
        saved=saved - weights,
        forward=forward - weights,
        head=head - weights,
        layers=layers - weights,
        contents=in_head if head > layers else in_layers,
    )


def _forward(model: HeadedModel, rows: int, length: int) -> Tensor:
    """Log-probs (N,) of every token."""
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(length).expand(rows, length).contiguous()
    places = torch.arange(rows * length)
    values, _ = model(tokens, positions, places, torch.zeros_like(places))
    return cast(Tensor, values)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@cache
def _presets() -> dict[str, Any]:
    file = Path(presets.__file__).with_name("presets.json")
    return cast(dict[str, Any], json.loads(file.read_text())["presets"])


def _shape(preset: str, layers: int | None) -> dict[str, Any]:
    """Its config.json, cut to `layers`."""
    shape = dict(_presets()[preset]["config"])
    if layers is not None:
        shape["num_hidden_layers"] = layers
        if "layer_types" in shape:
            shape["layer_types"] = shape["layer_types"][:layers]
    return shape


@contextmanager
def _unpacked_masks() -> Iterator[None]:
    """Fake position ids cannot be compared, and the flash kernel needs no mask either way."""
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
        yield
