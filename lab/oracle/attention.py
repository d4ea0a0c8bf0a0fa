"""Flash attention as the caching allocator sees it: what the CUDA kernels keep and what they allocate.

Without a GPU the kernels themselves cannot run, not even on fake tensors, so this function has their signature:

    forward saves   q, k, v, out (B, H, L, D) and log-sum-exp (B, H, L) fp32
    backward takes  dq, dk, dv; with grouped queries dk and dv first once a query head;
                    softmax_d (B, H, L) and an accumulator of dq (B, L, H, D), both fp32

Source: PyTorch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd and mha_bwd;
the flash-attn package's functions of the same names allocate the same.

Legend: B sequences, H query heads, G key/value heads, L tokens, D head width (flash rounds it up to 32, L to 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "signature_only"
"""Under which transformers finds it."""


class Flash(torch.autograd.Function):
    """Attention of (B, H, L, D), computed nowhere."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`out` (B, H, L, D), a view of (B, L, H, D) as the kernel returns it."""
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum_exp = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        query, key, value, _, log_sum_exp = ctx.saved_tensors
        batch, heads, length, width = query.shape
        rounded = -(-length // 128) * 128
        softmax_d = log_sum_exp.new_empty(batch, heads, rounded)
        accumulator = log_sum_exp.new_empty(batch, rounded, heads, -(-width // 32) * 32)
        groups = heads // key.shape[1]
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
        if groups > 1:
            expanded = [side.new_empty(batch, length, heads, side.shape[-1]) for side in (key, value)]
            del expanded
        del softmax_d, accumulator
        return dq, dk, dv


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: (B, H, L, D) in, (B, L, H, D) out."""
    assert attention_mask is None, "flash attention reads positions, not a mask"
    out = Flash.apply(query, key, value)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make it known to transformers, with no mask as under flash attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
