"""Reads a Hugging Face `config.json` into a `ModelSpec`.

What the file does not write down (biases, norms, tied embeddings) comes from the table of
`model_families`. A type that is not in it is read as a Llama block (SwiGLU, RMSNorm, two norms a
layer, biases as `attention_bias` and `mlp_bias` say) and must then say whether its embeddings are
tied. Models that `ModelSpec` cannot express are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import Source, parse_json, read_text
from rlhfsim.specs.model.blocks import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    MAX_WIDTH,
    Attention,
    Moe,
)
from rlhfsim.specs.model.config_keys import ConfigKeys
from rlhfsim.specs.model.families import FAMILIES, REFUSED, REFUSED_KEYS
from rlhfsim.specs.model.hybrid_configs import LINEAR, layer_blocks, recurrent
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.vision_configs import vision

_NESTED = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "kv_channels")
_VOCAB = ("vocab_size", "padded_vocab_size")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "seq_length",
    "max_sequence_length",
    "n_ctx",
)
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "share_expert_dim", "moe_shared_expert_intermediate_size")
_WINDOW = ("sliding_window", "attention_chunk_size", "window_size")
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_FULL = ("full_attention", "attention", "global_attention", "deepseek_sparse_attention")


DESCRIBED = (
    "rlhfsim describes decoder-only models of MHA, GQA, MLA or DeepSeek sparse attention, gated delta nets "
    "and Mamba-2, each with one shape throughout"
)


def load_config(path: Path) -> ModelSpec:
    """The model of a `config.json`, or of the folder that holds one.

    Raises:
        RlhfsimError: unreadable, malformed, incomplete, absurd, or not a decoder-only transformer.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    source = parse_json(read_text(file), str(file))
    name = file.parent.name if file.name == "config.json" else file.stem
    return read_config(source, name or str(file))


def read_config(source: Source, name: str, *, origin: str = "") -> ModelSpec:
    """The model of a parsed config; `origin` becomes its `source`.

    Raises:
        RlhfsimError: incomplete, absurd, or not a decoder-only transformer.
    """
    if not isinstance(source.data, Mapping) or not source.data:
        empty = ", and this one is empty" if isinstance(source.data, Mapping) else ""
        raise RlhfsimError(
            "not-a-model-config",
            f"a model's config.json holds one mapping of keys to values{empty}",
            place=source.place(),
            help="give the config.json of a Hugging Face checkpoint",
        )
    config = _open(source)
    try:
        return _model(config, name, origin or source.name)
    except RlhfsimError as error:
        raise error.at(source.place(config.path)) from error


def _open(source: Source) -> ConfigKeys:
    """The part of the document that describes the language model."""
    data: Mapping[str, Any] = source.data
    path: tuple[str, ...] = ()
    _refuse(source, data, ())
    for key in _NESTED:
        if isinstance(data.get(key), Mapping):
            path, data = (key,), data[key]
            _refuse(source, data, path)
            break
    return ConfigKeys(source, path, data)


def _refuse(source: Source, data: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Raise for a model that is not a decoder-only transformer of uniform layers."""
    kind = data.get("model_type")
    reason, key = (REFUSED.get(kind) if isinstance(kind, str) else None), "model_type"
    nested = not path and any(isinstance(data.get(k), Mapping) for k in _NESTED)
    known = FAMILIES.get(kind) if isinstance(kind, str) else None
    if reason is None and not nested and not (known and known.recurrent):
        telling = next((k for k in REFUSED_KEYS if data.get(k)), None)
        reason, key = (REFUSED_KEYS[telling], telling) if telling else (None, key)
    if reason is None and data.get("is_encoder_decoder") is True:
        reason, key = "is an encoder-decoder", "is_encoder_decoder"
    if reason is None and "ForMaskedLM" in str(data.get("architectures"))[:200]:
        reason, key = "is an encoder, not a decoder-only language model", "architectures"
    if reason:
        raise RlhfsimError(
            "unsupported-model",
            f"model type {str(kind)[:60]!r} {reason}",
            place=source.place((*path, key)),
            help=f"{DESCRIBED}; take the preset of a model of this size as a stand-in",
        )


def _model(config: ConfigKeys, name: str, origin: str) -> ModelSpec:
    family = config.family
    blocks = layer_blocks(config)
    layers = blocks.layers if blocks else config.number(_LAYERS, MAX_LAYERS)
    hidden = config.number(_HIDDEN)
    positions = config.optional(_POSITIONS, 1, MAX_POSITION)
    moe = _moe(config, blocks.experts if blocks else None, layers)
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden=hidden,
        vocab=config.number(_VOCAB, MAX_VOCAB),
        attention=_attention(config, layers, hidden, positions),
        ffn=_ffn(config, hidden, moe),
        tied_embeddings=_tied(config),
        gated=family.gated,
        mlp_bias=config.flag(family.mlp_bias),
        norm=family.norm,
        norms_per_layer=family.norms_per_layer,
        extra_norms=family.extra_norms,
        learned_positions=_learned_positions(config),
        max_position=positions,
        moe=moe,
        recurrent=recurrent(config, layers, blocks),
        num_dense=blocks.dense if blocks else None,
        vision=vision(config.source.data.get("vision_config"), config.source.data, hidden),
        embed_dim=_embed_dim(config, hidden),
        lm_head_bias=config.flag(family.lm_head_bias),
        source=origin,
    )


def _tied(config: ConfigKeys) -> bool:
    key = "tie_word_embeddings"
    outer = config.source.data.get(key)
    if config.data.get(key) is None and outer is None and not config.known:
        raise config.error(
            "missing-key",
            f"model type {config.kind!r} is not known, so tie_word_embeddings must be given",
            None,
            "add tie_word_embeddings: true or false",
        )
    default = outer if isinstance(outer, bool) else config.family.tied
    return config.flag((key, default))


def _learned_positions(config: ConfigKeys) -> int:
    more = config.family.positions
    return 0 if more is None else config.number(_POSITIONS, MAX_POSITION) + more


def _embed_dim(config: ConfigKeys, hidden: int) -> int | None:
    width = config.optional(("word_embed_proj_dim",), 1, MAX_WIDTH)
    return None if width == hidden else width


def _ffn(config: ConfigKeys, hidden: int, moe: Moe | None) -> int:
    width = config.optional(_FFN, 1, MAX_WIDTH)
    if width is None and config.family.ffn_multiple:
        return config.family.ffn_multiple * hidden
    if width is None and moe and not config.data.get("first_k_dense_replace"):
        return moe.expert_ffn  # every layer has experts
    return config.number(_FFN)


def _attention(config: ConfigKeys, layers: int, hidden: int, positions: int | None) -> Attention:
    heads, family = config.number(_HEADS), config.family
    window, windowed = _window(config, layers, positions)
    common = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=1,
        qkv_bias=config.flag(family.qkv_bias),
        out_bias=config.flag(family.out_bias),
        qk_norm=family.qk_norm if config.flag(family.qk_norm_if) else "none",
        sinks=family.sinks,
        output_gate=config.flag(family.output_gate),
        sliding_window=window,
        num_windowed_layers=windowed,
        index_num_heads=config.optional(("index_n_heads",), 1, MAX_WIDTH) or 0,
        index_head_dim=config.optional(("index_head_dim",), 1, MAX_WIDTH) or 0,
        index_topk=config.optional(("index_topk",), 1, MAX_POSITION),
    )
    if config.data.get("kv_lora_rank") is not None:
        return _latent(config, common)
    return replace(
        common,
        num_kv_heads=config.optional(_KV_HEADS, 1, MAX_WIDTH) or heads,
        head_dim=_head_dim(config, hidden, heads),
        v_head_dim=config.optional(("v_head_dim",), 1, MAX_WIDTH),
    )


def _latent(config: ConfigKeys, common: Attention) -> Attention:
    nope, rope = config.number(("qk_nope_head_dim",)), config.number(("qk_rope_head_dim",))
    return replace(
        common,
        head_dim=nope + rope,
        v_head_dim=config.number(("v_head_dim",)),
        q_lora_rank=config.optional(("q_lora_rank",), 1, MAX_WIDTH),
        kv_lora_rank=config.number(("kv_lora_rank",)),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        qk_norm="none",
    )


def _head_dim(config: ConfigKeys, hidden: int, heads: int) -> int:
    width = config.optional(_HEAD_DIM, 1, MAX_WIDTH)
    if width is None and hidden % heads:
        message = f"{heads} heads do not divide the hidden size {hidden}, and head_dim is missing"
        raise config.error("heads-do-not-divide-hidden", message, _HEADS[0], "add head_dim")
    return width or hidden // heads


def _window(config: ConfigKeys, layers: int, positions: int | None) -> tuple[int | None, int]:
    """Width of the window and number of layers that have one."""
    windowed = _windowed_layers(config, layers)
    width = config.optional(_WINDOW, 1, MAX_POSITION)
    explicit = config.data.get("layer_types") is not None
    if windowed and explicit and width is None:
        raise config.error(
            "missing-key",
            "layer_types names windowed layers but sliding_window is missing",
            "layer_types",
            "add sliding_window",
        )
    if not windowed or width is None or (positions is not None and width >= positions):
        return None, 0
    return width, windowed


def _windowed_layers(config: ConfigKeys, layers: int) -> int:
    kinds = config.items("layer_types", layers)
    if kinds is not None:
        linear = LINEAR if config.family.recurrent else ()
        odd = next((k for k in kinds if k not in (*_WINDOWED, *_FULL, *linear)), None)
        if odd is not None:
            message = f"layer type {repr(odd)[:40]} is neither full nor windowed attention"
            raise config.error(
                "unsupported-model", message, "layer_types", "only full, windowed and linear attention"
            )
        return sum(k in _WINDOWED for k in kinds)
    rule: str | int = config.family.window if config.flag(config.family.window_if) else "none"
    pattern = config.data.get("sliding_window_pattern")
    if rule != "none" and isinstance(pattern, str) and pattern:
        rule = len(pattern)
    elif rule != "none" and pattern is not None:
        rule = config.number(("sliding_window_pattern",), MAX_LAYERS)
    match rule:
        case "none":
            return 0
        case "all":
            return layers
        case "from_layer":
            return layers - (config.optional(("max_window_layers",), 0, layers) or 0)
        case _:
            return layers - layers // int(rule)


def _moe(config: ConfigKeys, known: int | None, layers: int) -> Moe | None:
    """The experts of `known` layers, or of those that the keys name."""
    family = config.family
    experts = config.optional(_EXPERTS, 0, MAX_EXPERTS)
    moe_layers, period = _moe_layers(config, layers) if experts and known is None else (known or 0, 1)
    if not experts or not moe_layers:
        return None
    width = config.number(_FFN if family.experts_from_ffn else ("moe_intermediate_size",))
    shared_width = config.optional(_SHARED_WIDTH, 0, MAX_WIDTH)
    shared = config.optional(_SHARED, 0, MAX_EXPERTS)
    shared = family.shared_experts if shared is None else shared
    groups = config.optional(("n_group",), 0, experts) or 1
    return Moe(
        num_experts=experts,
        top_k=config.number(_TOP_K, experts),
        groups=groups,
        token_groups=(config.optional(("topk_group",), 0, groups) or groups) if groups > 1 else 1,
        expert_ffn=width,
        num_moe_layers=moe_layers,
        num_shared_experts=shared,
        shared_ffn=(shared_width or width) if shared else 0,
        latent=config.optional(("moe_latent_size",), 1, MAX_WIDTH),
        shared_gate=family.shared_gate and bool(shared),
        router_bias=config.flag(family.router_bias),
        fp32_combine=family.fp32_combine,
        period=period,
    )


def _moe_layers(config: ConfigKeys, layers: int) -> tuple[int, int]:
    """Number of layers with experts, and every how many layers they come."""
    kinds = config.items("mlp_layer_types", layers)
    if kinds is not None:
        return sum(kind == "sparse" for kind in kinds), 1
    flags = config.items("moe_layer_freq", layers)
    if flags is not None:
        return sum(flag in (1, True) for flag in flags), 1
    first = config.optional(("first_k_dense_replace",), 0, layers) or 0
    every = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step")
    period = config.optional(every, 1, MAX_LAYERS) or 1
    only = config.data.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) and all(isinstance(i, int) for i in only) else set()
    sparse = [i for i in range(first, layers) if (i + 1) % period == 0 and i not in dense]
    return len(sparse), period
