"""The vision tower of a config.json; towers of other types are not counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.specs.model.vision import Vision

_QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_vl_vision")
_QWEN2 = ("qwen2_5_vl", "qwen2_5_vl_vision")
_INTERN = ("intern_vit_6b", "internvl_vision")
_TILES = 12
"""Tiles of an image at most in `max_dynamic_patch` of every InternVL 2, 2.5, 3 and 3.5."""


def vision(data: Any, whole: Mapping[str, Any], width: int) -> Vision | None:
    """The tower that `vision_config` describes, projecting to `width`; None where its type is not known."""
    if not isinstance(data, Mapping):
        return None
    kind = str(data.get("model_type") or "")
    if kind in _QWEN2:
        return _qwen2(data, width)
    if kind in _QWEN3:
        return _qwen3(data, width)
    if kind in _INTERN:
        return _intern(data, whole, width)
    return _siglip(data, whole, width) if kind == "siglip_vision_model" else None


def _number(data: Mapping[str, Any], key: str, default: int) -> int:
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _qwen2(data: Mapping[str, Any], width: int) -> Vision:
    """Qwen2.5-VL: RMSNorm, gated MLP with biases, one merger of 2 x 2 patches."""
    h, f, merge = _number(data, "hidden_size", 1280), _number(data, "intermediate_size", 3420), 2
    patch, joined = _number(data, "patch_size", 14), _number(data, "hidden_size", 1280) * merge**2
    return Vision(
        num_layers=_number(data, "depth", 32),
        hidden=h,
        ffn=f,
        num_heads=_number(data, "num_heads", 16),
        patch=patch,
        patch_params=3 * 2 * patch**2 * h,
        layer_params=2 * h + 4 * (h * h + h) + 3 * h * f + 2 * f + h,
        merger_params=h + joined * (joined + 1) + width * (joined + 1),
        merge=merge,
        window=(_number(data, "window_size", 112) // patch) ** 2,
        num_full_layers=4,  # fullatt_block_indexes [7, 15, 23, 31]
    )


def _qwen3(data: Mapping[str, Any], width: int) -> Vision:
    """Qwen3-VL and Qwen3.5: LayerNorm, two matrices, a merger and one more a deep-stacked layer."""
    h, f, merge = _number(data, "hidden_size", 1152), _number(data, "intermediate_size", 4304), 2
    patch, joined = _number(data, "patch_size", 16), h * merge**2
    deep = data.get("deepstack_visual_indexes")
    extra = len(deep) if isinstance(deep, list) else 0
    merger = joined * (joined + 1) + width * (joined + 1)
    return Vision(
        num_layers=_number(data, "depth", 27),
        hidden=h,
        ffn=f,
        num_heads=_number(data, "num_heads", 16),
        patch=patch,
        patch_params=(3 * 2 * patch**2 + 1 + _number(data, "num_position_embeddings", 2304)) * h,
        layer_params=4 * h + 4 * (h * h + h) + 2 * h * f + f + h,
        merger_params=merger + 2 * h + extra * (merger + 2 * joined),
        merge=merge,
    )


def _siglip(data: Mapping[str, Any], whole: Mapping[str, Any], width: int) -> Vision:
    """SigLIP before Gemma 3: every image is resized, its patches pooled to `mm_tokens_per_image` tokens."""
    h, f = _number(data, "hidden_size", 1152), _number(data, "intermediate_size", 4304)
    patch, size = _number(data, "patch_size", 14), _number(data, "image_size", 896)
    return Vision(
        num_layers=_number(data, "num_hidden_layers", 27),
        hidden=h,
        ffn=f,
        num_heads=_number(data, "num_attention_heads", 16),
        patch=patch,
        patch_params=(3 * patch**2 + 1 + (size // patch) ** 2) * h,
        layer_params=4 * h + 4 * (h * h + h) + 2 * h * f + f + h,
        merger_params=2 * h + h * width + h,
        merge=1,
        tokens_per_image=_number(whole, "mm_tokens_per_image", 256),
        image_size=size,
    )


def _intern(data: Mapping[str, Any], whole: Mapping[str, Any], width: int) -> Vision:
    """InternViT before InternVL: tiles of one size, a class token, layer scales, 2 x 2 patches a token."""
    h, f, merge = _number(data, "hidden_size", 1024), _number(data, "intermediate_size", 4096), 2
    patch, size = _side(data, "patch_size", 14), _side(data, "image_size", 448)
    query_bias = data.get("qkv_bias", data.get("attention_bias", True)) is not False
    query_norm = data.get("qk_normalization", data.get("use_qk_norm", False)) is True
    norms = (2 if str(data.get("norm_type")) == "rms_norm" else 4) + 2 * query_norm
    joined = h * merge**2
    tiled = whole.get("dynamic_image_size", True) is not False
    return Vision(
        num_layers=_number(data, "num_hidden_layers", 24),
        hidden=h,
        ffn=f,
        num_heads=_number(data, "num_attention_heads", 16),
        patch=patch,
        patch_params=(3 * patch**2 + 1 + 1 + (size // patch) ** 2 + 1) * h,
        layer_params=(norms + 2) * h + 4 * h * h + (3 * query_bias + 1) * h + 2 * h * f + f + h,
        merger_params=2 * joined + width * (joined + 1) + width * (width + 1),
        merge=merge,
        window=(size // patch) ** 2,  # patches of a tile see each other
        tokens_per_image=None if tiled else (size // patch // merge) ** 2,
        image_size=size,
        max_tiles=_number(whole, "max_dynamic_patch", _TILES) if tiled else None,
    )


def _side(data: Mapping[str, Any], key: str, default: int) -> int:
    """A side that may be written twice: `448` or `[448, 448]`."""
    value = data.get(key)
    return _number({key: value[0]} if isinstance(value, list) and value else data, key, default)
