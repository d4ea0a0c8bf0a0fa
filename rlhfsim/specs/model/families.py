"""What each `model_type` of a Hugging Face config implies but does not write down.

Biases, norms, positions and window patterns live in the modelling code of `transformers`, not in
config.json. Each entry states them for one `model_type`, with the defaults of its configuration
class where a config may leave a key out. Source of all of them: huggingface/transformers,
`models/<type>/{configuration,modeling}_<type>.py`, or the checkpoint's own remote code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhfsim.specs.model.blocks import Norm

Flag = bool | tuple[str, bool]
"""A fact of the architecture, or the key that decides it with the default when it is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The unwritten part of a config; the defaults are those of Llama."""

    gated: bool = True
    """Three matrices in an MLP."""
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    lm_head_bias: Flag = False
    tied: bool = False
    """`tie_word_embeddings` when the key is absent."""
    norm: Norm = "rmsnorm"
    norms_per_layer: int = 2
    extra_norms: int = 1
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_if: Flag = True
    """Key that switches `qk_norm` on."""
    sinks: bool = False
    positions: int | None = None
    """Learned position table with this many rows more than the context; None: rotary or ALiBi."""
    ffn_multiple: int | None = None
    """FFN width in units of `hidden` when the key is absent or null."""
    window: Literal["none", "all", "from_layer"] | int = "none"
    """Windowed layers without `layer_types`: all, or all but every n-th."""
    window_if: Flag = True
    """Key that switches the window on."""
    experts_from_ffn: bool = False
    """`intermediate_size` is the width of an expert (Mixtral style)."""
    router_bias: Flag = False
    fp32_combine: bool = True
    shared_gate: bool = False
    shared_experts: int = 0
    """Shared experts where no key gives their number."""
    output_gate: Flag = False
    """Queries bring a gate for the attention's output."""
    recurrent: Literal["gated_delta_net", "mamba2"] | None = None
    """What its layers with a state of constant size are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the configuration class that checkpoints of this type rely on."""


_ATTENTION: dict[str, Any] = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}
"""Two biases under one key, absent unless it says so."""
_CLASSIC: dict[str, Any] = {"gated": False, "mlp_bias": True, "norm": "layernorm"}
"""Blocks before Llama: two matrices in an MLP, biases, LayerNorm."""
_WINDOWS: dict[str, Any] = {"window": "from_layer", "window_if": ("use_sliding_window", False)}


def _biases(key: str, default: bool) -> dict[str, Any]:
    """One key for the biases of attention and MLP."""
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), (key, default))


_PLAIN = Family()
_LLAMA = Family(**_ATTENTION, mlp_bias=("mlp_bias", False))
_QWEN2 = Family(qkv_bias=("qkv_bias", True), **_WINDOWS)
_QWEN3 = Family(**_ATTENTION, qk_norm="head", fp32_combine=False, **_WINDOWS)
_HYBRID: dict[str, Any] = {
    **_ATTENTION,
    "qk_norm": "head",
    "norm": "offset_rmsnorm",
    "fp32_combine": False,
    "output_gate": ("attn_output_gate", True),
    "recurrent": "gated_delta_net",
    "shared_gate": True,
    "defaults": {
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
    },
}
_DEEPSEEK = Family(**_ATTENTION)
_DEEPSEEK_V3 = Family(**_ATTENTION, router_bias=True)
_GEMMA: dict[str, Any] = {**_ATTENTION, "tied": True, "norm": "offset_rmsnorm"}
_GEMMA3 = Family(
    **_GEMMA,
    norms_per_layer=4,
    qk_norm="head",
    window=6,
    defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
_GPT = Family(**_CLASSIC, qkv_bias=True, out_bias=True, tied=True, positions=0, ffn_multiple=4)
_LLAMA4 = Family(
    **_ATTENTION,
    window=4,
    shared_experts=1,
    defaults={"attention_chunk_size": 8192, "interleave_moe_layer_step": 1},
)
_COHERE: dict[str, Any] = {**_ATTENTION, "tied": True, "norm": "layernorm_without_bias", "norms_per_layer": 1}
_FALCON: dict[str, Any] = {"gated": False, "tied": True, "norm": "layernorm", "ffn_multiple": 4}

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("yi", "Yi", "baichuan", "exaone"), _PLAIN),
    **dict.fromkeys(("llama", "granite"), _LLAMA),
    **dict.fromkeys(("mistral", "ministral", "phi3"), Family(window="all")),
    "mixtral": Family(window="all", experts_from_ffn=True),
    "qwen": Family(qkv_bias=True),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "mimo"), _QWEN2),
    "qwen2_moe": Family(qkv_bias=("qkv_bias", True), shared_gate=True, shared_experts=1, fp32_combine=False),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), Family(**_HYBRID, shared_experts=1)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), Family(**_HYBRID)),
    "nemotron_h": Family(
        gated=False,
        mlp_bias=("mlp_bias", False),
        norms_per_layer=1,
        router_bias=True,
        recurrent="mamba2",
        defaults={"conv_kernel": 4, "head_dim": 128, "n_groups": 8, "ssm_state_size": 128},
    ),
    **dict.fromkeys(("deepseek", "deepseek_v2"), _DEEPSEEK),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite"), _DEEPSEEK_V3),
    "dots1": Family(qkv_bias=("attention_bias", False), qk_norm="head", router_bias=True),
    "glm4_moe": Family(
        qkv_bias=("attention_bias", False),
        qk_norm="head",
        qk_norm_if=("use_qk_norm", False),
        router_bias=True,
    ),
    "glm": Family(qkv_bias=("attention_bias", True)),
    "glm4": Family(qkv_bias=("attention_bias", True), norms_per_layer=4),
    "chatglm": Family(qkv_bias=("add_qkv_bias", False)),
    "gpt_oss": Family(
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=True,
        sinks=True,
        router_bias=True,
        experts_from_ffn=True,
        window=2,
    ),
    "minimax_m2": Family(
        qk_norm="full", qk_norm_if=("use_qk_norm", True), experts_from_ffn=True, router_bias=True
    ),
    "gemma": Family(**_GEMMA, defaults={"head_dim": 256}),
    "gemma2": Family(
        **_GEMMA, norms_per_layer=4, window=2, defaults={"head_dim": 256, "sliding_window": 4096}
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    "phi": Family(
        **_CLASSIC, qkv_bias=True, out_bias=True, lm_head_bias=True, norms_per_layer=1, ffn_multiple=4
    ),
    "phimoe": Family(
        **_ATTENTION,
        window="all",
        lm_head_bias=("lm_head_bias", False),
        norm="layernorm",
        experts_from_ffn=True,
    ),
    "opt": Family(gated=False, **_biases("enable_bias", True), tied=True, norm="layernorm", positions=2),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT),
    "gpt_neo": Family(
        **_CLASSIC, out_bias=True, tied=True, positions=0, ffn_multiple=4, defaults={"vocab_size": 50257}
    ),
    "gptj": Family(**_CLASSIC, lm_head_bias=True, norms_per_layer=1, ffn_multiple=4),
    "gpt_neox": Family(**_CLASSIC, qkv_bias=("attention_bias", True), out_bias=("attention_bias", True)),
    "bloom": Family(**_CLASSIC, qkv_bias=True, out_bias=True, tied=True, extra_norms=2, ffn_multiple=4),
    "falcon": Family(**_FALCON, **_biases("bias", False)),
    "mpt": Family(**_FALCON, **_biases("bias", True)),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    "internlm": Family(qkv_bias=("bias", True), out_bias=("bias", True)),
    "internlm2": Family(qkv_bias=("bias", False), out_bias=("bias", False)),
    "internlm3": Family(qkv_bias=("qkv_bias", False), out_bias=("bias", False), mlp_bias=("bias", False)),
    "olmo": Family(**_ATTENTION, norm="without_weights"),
    "olmo2": Family(**_ATTENTION, qk_norm="full"),
    "olmo3": Family(**_ATTENTION, qk_norm="full", window=4),
    "olmoe": Family(fp32_combine=False, **_ATTENTION, qk_norm="full", experts_from_ffn=True),
    "nemotron": Family(gated=False, **_ATTENTION, mlp_bias=("mlp_bias", False), norm="layernorm"),
    "cohere": Family(**_COHERE, qk_norm="full", qk_norm_if=("use_qk_norm", False)),
    "cohere2": Family(**_COHERE, window=4),
    "starcoder2": Family(gated=False, **_biases("use_bias", True), tied=True, norm="layernorm", window="all"),
    "granitemoe": Family(**_ATTENTION, experts_from_ffn=True),
    "smollm3": Family(
        **_ATTENTION, mlp_bias=("mlp_bias", False), tied=True, window_if=("use_sliding_window", False)
    ),
    "exaone4": Family(qk_norm="head", window=4),
    "stablelm": Family(qkv_bias=("use_qkv_bias", False), norm="layernorm"),
    "ernie4_5": Family(**_biases("use_bias", False), tied=True),
    "seed_oss": Family(
        qkv_bias=("attention_bias", True),
        out_bias=("attention_out_bias", False),
        mlp_bias=("mlp_bias", False),
    ),
    "grok-1": Family(norms_per_layer=4, experts_from_ffn=True),
}

_LINEAR = "mixes attention with linear attention or state-space layers of a kind that is not described here"
_ENCODER = "is an encoder, not a decoder-only language model"
_VISION = "is a vision or audio model without a language decoder"
_SEQ2SEQ = "is an encoder-decoder"
_UNEVEN = "has layers of different attention or FFN shape"
_SSM = "is a state-space or recurrent model without attention"


def _all(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


REFUSED: Mapping[str, str] = {
    **_all(
        "jamba zamba zamba2 bamba falcon_h1 granitemoehybrid kimi_linear kimi_k3 minimax minimax_text_01 "
        "minimax_m1 lfm2 lfm2_moe recurrent_gemma olmo_hybrid bailing_moe_linear",
        _LINEAR,
    ),
    **_all("mamba mamba2 falcon_mamba rwkv rwkv7 xlstm", _SSM),
    **_all(
        "bert roberta xlm-roberta distilbert albert electra deberta deberta-v2 modernbert nomic_bert "
        "mpnet camembert xlnet esm ernie big_bird longformer layoutlm layoutlmv3 new",
        _ENCODER,
    ),
    **_all(
        "t5 mt5 umt5 bart mbart pegasus marian whisper m2m_100 led blenderbot t5gemma encoder-decoder",
        _SEQ2SEQ,
    ),
    **_all(
        "vit clip clip_vision_model siglip siglip_vision_model dinov2 swin convnext resnet detr sam deit "
        "beit wav2vec2 hubert wavlm",
        _VISION,
    ),
    **_all(
        "nemotron-nas deci gemma3n gemma3n_text gemma4 gemma4_text openelm mimo_v2_flash mimo_v2 step3p5 "
        "step3p7",
        _UNEVEN,
    ),
    **_all(
        "deepseek_v4 deepseek_ref minimax_m3 minimax_m3_vl",
        "has a compressed or sparse attention whose shapes are not described here",
    ),
    "dbrx": "keeps its shapes in nested groups that are not read here",
}
"""Model types that this spec cannot express, with the reason."""
REFUSED_KEYS: Mapping[str, str] = {
    **_all("hybrid_override_pattern layers_block_type linear_num_key_heads linear_attn_config", _LINEAR),
    **_all("full_attention_interval mamba_d_state mamba_num_heads", _LINEAR),
    "ssm_cfg": _SSM,
    "ssm_state_size": _LINEAR,
    "state_size": _SSM,
    "attn_layer_period": _LINEAR,
    **_all("block_configs swa_num_attention_heads global_head_dim", _UNEVEN),
    "sparse_attention_config": "has a sparse attention whose shapes are not described here",
    **_all("num_encoder_layers encoder_layers", _SEQ2SEQ),
    "image_size": _VISION,
}
"""Keys that give such a model away when its type is unknown."""
