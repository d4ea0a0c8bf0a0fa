"""Causal attention inside each sequence of a packed row: no score or mask between sequences is ever made.

Registered with transformers under `VARLEN`, which then makes no mask at all. Kernels, the first that can run:
FlashAttention through transformers, PyTorch's variable-length attention (both CUDA, half precision), else one
scaled dot product a sequence. Models whose attention does more than causal softmax are padded, not packed.

Legend: B rows, L tokens of a row, H query heads, G key heads, D head size.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from executor.engines import device
from rlhfsim.errors import RlhfsimError

logger = logging.getLogger(__name__)

VARLEN, FLASH = "rlhfsim_varlen", "flash_attention_2"
MORE = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size", "attention_sinks")
"""Fields of a model's configuration that ask for more than causal softmax."""
SINKS = ("gpt_oss",)
"""Types whose heads have a learnt score in addition to those of tokens; PyTorch's scaled dot product knows
neither that nor a cap."""
WIDEST = 256
"""Largest head size of FlashAttention."""


def implementation(config: Any, dtype: torch.dtype) -> str:
    """Name under which transformers looks up the attention of this model."""
    from transformers import AttentionInterface
    from transformers.utils.import_utils import is_flash_attn_2_available

    half = dtype in (torch.bfloat16, torch.float16)
    if half and device.available() and is_flash_attn_2_available():
        return FLASH
    more = _more(config)
    if more:
        logger.info("%s: attention with %s is not packed", config.model_type, ", ".join(more))
        return "eager" if "attn_logit_softcapping" in more or config.model_type in SINKS else "sdpa"
    AttentionInterface.register(VARLEN, attend)
    return VARLEN


def packs(config: Any) -> bool:
    """Whether sequences of this model may lie in one row."""
    return config._attn_implementation in (VARLEN, FLASH)


def sequences(config: Any, positions: Tensor) -> dict[str, Any]:
    """What attention must know of rows with these positions (B, L), as keyword arguments of the model.

    One row is taken as packed, several as padded on the right.
    """
    name = config._attn_implementation
    if name not in (VARLEN, FLASH) or (name == FLASH and len(positions) > 1):
        return {}
    lengths = _lengths(positions)
    if name == VARLEN:
        return {"lengths": lengths}
    ends = _ends(lengths, positions.device)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _lengths(positions: Tensor) -> tuple[int, ...]:
    """Lengths of the sequences of the only row, cached: to read them waits for the device."""
    if len(positions) > 1:
        return ()
    known: tuple[int, ...] | None = positions.__dict__.get("rlhfsim_lengths")
    if known is None:
        starts = (positions[0] == 0).nonzero()[:, 0].tolist()
        known = tuple(end - start for start, end in pairwise([*starts, positions.shape[1]]))
        positions.__dict__["rlhfsim_lengths"] = known
    return known


def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(sequences + 1,) int32 bounds of the sequences in their row."""
    return torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Output (B, L, H, D) from query (B, H, L, D), key and value (B, G, L, D), as transformers calls it.

    `lengths`: tokens of every sequence of the only row; empty: padded rows.

    Raises:
        RlhfsimError: a model that does not pass `lengths` on, or asks for more than causal softmax.
    """
    asked = [
        name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if more.get(name) is not None
    ]
    if lengths is None or asked or attention_mask is not None:
        raise RlhfsimError(
            "attention-not-packed",
            f"{type(module).__name__} asks for {', '.join(asked) or 'a mask of its own'}, "
            "which attention over packed sequences does not do",
            help="set packing: false in the workload, or install flash-attn",
        )
    if len(lengths) > 1 and query.is_cuda and _in_one_kernel(query):
        return _varlen(query, key, value, lengths, scaling), None
    sizes = lengths or (query.shape[2],)
    outputs = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
        for q, k, v in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    ]
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0].contiguous()), None


def _in_one_kernel(query: Tensor) -> bool:
    """Whether FlashAttention takes such heads (PyTorch, flash_api.cpp, `mha_varlen_fwd`)."""
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return half and width % 8 == 0 and width <= WIDEST


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None
) -> Tensor:
    """Output (1, L, H, D) of PyTorch's kernel over all sequences at once.

    It takes values as wide as keys: those of latent attention, which are narrower, are filled up with zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends, longest, width = _ends(lengths, query.device), max(lengths), value.shape[-1]
    wide = pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, wide))
    output = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None, ..., :width]


def _more(config: Any) -> list[str]:
    """What the attention of this model does beyond causal softmax, by field."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "layer_types", None) is None
    fields = [name for name in MORE if getattr(config, name, None) and (name != MORE[0] or windowed)]
    return [*fields, *sorted(kinds)]
