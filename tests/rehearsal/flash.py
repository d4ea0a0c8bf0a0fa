"""FlashAttention of the rehearsal device: PyTorch's CUDA operators by name, their values from the CPU's kernel.

What stays on the device and what comes and goes there is what the CUDA kernels keep and allocate:

    forward   output, log-sum-exp (H, L) fp32, two numbers of the random generator
    backward  gradients of query, key and value; with grouped queries the latter two once a query head;
              softmax_d (H, L) and an accumulator of the query's gradient (L, H, D), both fp32

Source: PyTorch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd, mha_bwd,
mha_varlen_fwd and mha_varlen_bwd. Half precision alone, as there (device.cpp chooses); values are computed in host memory.

Legend: B sequences, H query heads, G key heads, L tokens, D head size; T tokens of all sequences of a pack.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def register() -> Any:
    """The operators on the device; the library must be kept."""
    library = torch.library.Library("aten", "IMPL")
    for name, operator in {
        "_scaled_dot_product_flash_attention": _padded,
        "_scaled_dot_product_flash_attention_backward": _padded_backward,
        "_flash_attention_forward": _packed,
        "_flash_attention_backward": _packed_backward,
    }.items():
        library.impl(name, operator, "CUDA")
    return library


def _host(tensor: Tensor) -> Tensor:
    return torch.ops.rehearsal.on_host(tensor)  # type: ignore[no-any-return]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp (B, H, L) in host memory."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, *_each_head(q, k, v), 0.0, causal, scale=scale)  # type: ignore[no-any-return]


def _each_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [side.repeat_interleave(q.shape[1] // side.shape[1], 1) for side in (k, v)]


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> list[Tensor]:
    """Of query, key and value, in host memory."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, *sides = kernel(grad, q, *_each_head(q, k, v), out, lse, 0.0, causal, scale=scale)
    groups = k.shape[1]
    return [dq, *(side.unflatten(1, (groups, -1)).sum(2) for side in sides)]


def _generator_numbers(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_zeros((), dtype=torch.int64), like.new_zeros((), dtype=torch.int64)


def _work_spaces(query: Tensor, tokens: int, heads: int, width: int, groups: int) -> list[Tensor]:
    """What a backward pass takes for its time."""
    rounded, wide = -(-tokens // 128) * 128, -(-width // 32) * 32
    spaces = [
        query.new_empty(heads * rounded, dtype=torch.float32),
        query.new_empty(rounded * heads * wide, dtype=torch.float32),
    ]
    return spaces + [query.new_empty(tokens * heads * width) for _ in range(2 if groups < heads else 0)]


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(B, H, L, D) each."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(batch, heads, length, dtype=torch.float32)
    values, sums = _attend(*map(_host, (query, key, value)), is_causal, scale)
    _host(out).copy_(values)
    _host(lse).copy_(sums)
    nothing = query.new_empty(0)
    return (out, lse, None, None, length, key.shape[2], *_generator_numbers(query), nothing)


def _padded_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    is_causal = rest[5]  # behind bounds, longest sequences and dropout
    batch, heads, length, width = query.shape
    found = [torch.empty_like(tensor) for tensor in (query, key, value)]
    spaces = _work_spaces(query, batch * length, heads, width, key.shape[1])
    on_host = map(_host, (grad_out, query, key, value, out, logsumexp))
    for mine, computed in zip(found, _gradients(*on_host, is_causal, scale), strict=True):
        _host(mine).copy_(computed)
    del spaces
    return tuple(found)


def _parts(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(_host(ends).tolist()))


def _rows(tensor: Tensor, start: int, end: int) -> Tensor:
    """(1, H, L, D) of a pack's (T, H, D)."""
    return tensor[start:end].transpose(0, 1)[None]


def _refuse(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What mha_varlen_fwd checks of its tensors."""
    (_, heads, width), groups = query.shape, key.shape[1]
    checks = {
        "FlashAttention only support fp16 and bf16 data type": query.dtype in (torch.float16, torch.bfloat16),
        "FlashAttention forward only supports head dimension at most 256": width <= 256,
        "head_size must be a multiple of 8, this is ensured by padding!": width % 8 == 0,
        "Number of heads in key/value must divide number of heads in query": heads % groups == 0,
        "k must have shape (total_k, num_heads_k, head_size_og)": key.shape[1:] == (groups, width),
        "v must have shape (total_k, num_heads_k, head_size_og)": value.shape == key.shape,
        "Input tensor must have contiguous last dimension": {t.stride(-1) for t in (query, key, value)}
        == {1},
    }
    for words, kept in checks.items():
        if not kept:
            raise RuntimeError(words)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> tuple[Any, ...]:
    """(T, H, D) each; a window to the right of 0 is causal."""
    _refuse(query, key, value)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    q, k, v, on_host, sums = map(_host, (query, key, value, out, lse))
    for start, end in _parts(cum_seq_q):
        values, own = _attend(*(_rows(t, start, end) for t in (q, k, v)), True, scale)
        on_host[start:end] = values[0].transpose(0, 1)
        sums[:, start:end] = own[0]
    state, unused = _generator_numbers(query)
    return out, lse, state, unused, query.new_empty(0)


def _packed_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> tuple[Tensor, ...]:
    tokens, heads, width = query.shape
    found = [torch.empty_like(tensor) for tensor in (query, key, value)]
    spaces = _work_spaces(query, tokens + 128 * (len(cum_seq_q) - 1), heads, width, key.shape[1])
    on_host = [_host(tensor) for tensor in (grad_out, query, key, value, out)]
    sums, mine = _host(logsumexp), [_host(tensor) for tensor in found]
    for start, end in _parts(cum_seq_q):
        rows = [_rows(tensor, start, end) for tensor in on_host]
        computed = _gradients(*rows, sums[None, :, start:end], True, scale)
        for into, gradient in zip(mine, computed, strict=True):
            into[start:end] = gradient[0].transpose(0, 1)
    del spaces
    return tuple(found)
