"""The keys of a Hugging Face config.json, read with their bounds; every refusal names its place.

Configs of a few older model types are brought to the common keys first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.blocks import MAX_WIDTH
from rlhfsim.specs.model.families import FAMILIES, Family, Flag


class ConfigKeys:
    """The keys of one language model with their places."""

    def __init__(self, source: Source, path: tuple[str, ...], data: Mapping[str, Any]) -> None:
        self.source, self.path = source, path
        self.kind = str(data.get("model_type") or source.data.get("model_type") or "")[:60]
        known = FAMILIES.get(self.kind)
        self.known = known is not None
        self.family, self.data = _rewrite(self.kind, known or FAMILIES["llama"], data)

    def error(self, code: str, message: str, key: str | None, remedy: str) -> RlhfsimError:
        """A refusal at the place of `key`."""
        place = self.source.place(self.path + ((key,) if key else ()))
        return RlhfsimError(code, message, place=place, help=remedy)

    def value(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of several spellings that is present and not null."""
        for data in (self.data, self.family.defaults):
            for key in keys:
                if data.get(key) is not None:
                    return key, data[key]
        return keys[0], None

    def optional(self, keys: tuple[str, ...], low: int, high: int) -> int | None:
        """A whole number that may be absent."""
        key, value = self.value(keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            message = f"{key} must be a whole number from {low} to {high}, got {repr(value)[:40]}"
            raise self.error("bad-model-shape", message, key, "compare with the published config")
        return value

    def number(self, keys: tuple[str, ...], high: int = MAX_WIDTH) -> int:
        """A whole number that must be there."""
        value = self.optional(keys, 1, high)
        if value is None:
            kind = f" of a {self.kind} model" if self.kind else ""
            message = f"{' or '.join(map(repr, keys[:2]))}{kind} is missing"
            raise self.error("missing-key", message, None, f"add {keys[0]} to the config")
        return value

    def flag(self, flag: Flag) -> bool:
        """A fact of the family, or the key that decides it."""
        if isinstance(flag, bool):
            return flag
        key, default = flag
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            message = f"{key} must be true or false, got {repr(value)[:40]}"
            raise self.error("bad-model-shape", message, key, "write true or false")
        return value

    def items(self, key: str, length: int) -> list[Any] | None:
        """A list with one entry per layer."""
        value = self.data.get(key)
        if not isinstance(value, list):
            return None
        if len(value) != length:
            message = f"{key} has {len(value)} entries for {length} layers"
            raise self.error("bad-model-shape", message, key, "give one entry per layer")
        return value


# --- older types -----------------------------------------------------------------------------------

Keys = dict[str, Any]


def _rewrite(kind: str, family: Family, data: Mapping[str, Any]) -> tuple[Family, Keys]:
    """The family as this config switches it, and the config in common keys.

    Values are passed on unchecked: the reader checks them under the key it finds them.
    """
    keys = dict(data)
    match kind:
        case "mpt":
            return _mpt(family, keys)
        case "falcon" | "RefinedWeb" | "RefinedWebModel":
            return _falcon(family, keys)
        case "opt":
            after = keys.get("do_layer_norm_before") is False  # OPT-350M has no final norm
            return replace(family, extra_norms=0 if after else 1), keys
        case "phi":
            # PhiConfig.qk_layernorm: a LayerNorm with bias, not written by any published Phi
            return family, keys
        case "qwen":
            return family, keys | {"intermediate_size": _half(keys.get("intermediate_size"))}
        case "chatglm":
            return family, keys | _chatglm(keys)
        case "llama4" | "llama4_text":
            return family, keys | _llama4(keys)
        case "gpt_bigcode":
            one = {} if keys.get("multi_query") is False else {"num_key_value_heads": 1}
            return family, keys | one
        case _:
            return family, keys


def _half(value: Any) -> Any:
    """Qwen 1 writes the width of gate and up together."""
    return value // 2 if isinstance(value, int) and not isinstance(value, bool) else value


def _mpt(family: Family, keys: Keys) -> tuple[Family, Keys]:
    """MPT: groups `attn_config` and `ffn_config`, `no_bias` for biases and norms alike."""
    attention = keys.get("attn_config")
    attention = attention if isinstance(attention, Mapping) else {}
    ffn = keys.get("ffn_config")
    ratio = (ffn if isinstance(ffn, Mapping) else {}).get("expansion_ratio")
    ratio = keys.get("expansion_ratio", 4) if ratio is None else ratio
    plain = keys.get("no_bias") is True
    rotary = attention.get("alibi") is True or attention.get("rope") is True
    learned = not rotary and keys.get("learned_pos_emb") is not False
    family = replace(
        family, norm="layernorm_without_bias" if plain else "layernorm", positions=0 if learned else None
    )
    hidden = keys.get("d_model")
    integers = isinstance(hidden, int) and isinstance(ratio, int)
    more = {"bias": not plain, "ffn_dim": ratio * hidden if integers else ratio}
    kv_heads = attention.get("kv_n_heads")
    if attention.get("attn_type") == "multiquery_attention":
        kv_heads = 1
    return family, keys | more | ({} if kv_heads is None else {"num_kv_heads": kv_heads})


def _falcon(family: Family, keys: Keys) -> tuple[Family, Keys]:
    """Falcon: one norm before the parallel block in the first generation, two in the second."""
    if keys.get("new_decoder_architecture") is True:
        norms = 1 if keys.get("num_ln_in_parallel_attn") == 1 else 2
        return replace(family, norms_per_layer=norms), keys
    norms = 2 if keys.get("parallel_attn") is False else 1
    keys.pop("num_kv_heads", None)
    one = {} if keys.get("multi_query") is False else {"num_kv_heads": 1}
    return replace(family, norms_per_layer=norms), keys | one


def _chatglm(keys: Keys) -> Keys:
    """ChatGLM 2 to GLM-4-9B: multi-query groups, `add_qkv_bias`."""
    groups = keys.get("multi_query_group_num") if keys.get("multi_query_attention") else None
    return {"num_key_value_heads": groups}


def _llama4(keys: Keys) -> Keys:
    """Llama 4: `intermediate_size` is that of an expert, `intermediate_size_mlp` of a dense layer."""
    experts, dense = keys.get("intermediate_size"), keys.get("intermediate_size_mlp")
    return {"moe_intermediate_size": experts, "intermediate_size": dense or experts}
