"""Which layers of a config.json keep a state of constant size, and its shape."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rlhfsim.specs.model.blocks import MAX_LAYERS, MAX_WIDTH
from rlhfsim.specs.model.config_keys import ConfigKeys
from rlhfsim.specs.model.mixers import Recurrent

LINEAR = ("linear_attention",)
_BLOCKS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "recurrent"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "dense"),
    **dict.fromkeys(("E", "moe"), "experts"),
}
"""Letters of `hybrid_override_pattern` and words of `layers_block_type`, as nemotron_h writes them."""
_PATTERNS = ("hybrid_override_pattern", "layers_block_type", "layer_types")


class Blocks(NamedTuple):
    """Layers of one block each, by what that is."""

    layers: int
    recurrent: int
    dense: int
    experts: int


def layer_blocks(config: ConfigKeys) -> Blocks | None:
    """The layers of a model whose mixers and MLPs are layers of their own; None for all others."""
    if config.family.recurrent != "mamba2":
        return None
    key, pattern = config.value(_PATTERNS)
    if not isinstance(pattern, (str, list)) or not pattern or len(pattern) > MAX_LAYERS:
        raise config.error(
            "missing-key", f"{key} of a {config.kind} model is missing", None, f"add {key} to the config"
        )
    odd = next((each for each in pattern if not isinstance(each, str) or each not in _BLOCKS), None)
    if odd is not None:
        message = f"{key} holds {repr(odd)[:40]}, which is no kind of layer"
        raise config.error(
            "bad-model-shape", message, key, "write M (Mamba), * (attention), - (MLP), E (experts)"
        )
    number = Counter(_BLOCKS[each] for each in pattern)
    return Blocks(len(pattern), number["recurrent"], number["dense"], number["experts"])


def recurrent(config: ConfigKeys, layers: int, blocks: Blocks | None) -> Recurrent | None:
    """The block with a state; None where every mixer is attention."""
    kind = config.family.recurrent
    if kind == "mamba2":
        count = blocks.recurrent if blocks else 0
        return _mamba(config, count) if count else None
    count = _linear_layers(config, layers) if kind else 0
    if not count:
        return None
    _, stored = config.value(("mamba_ssm_dtype", "mamba_ssm_cache_dtype"))
    return Recurrent(
        kind="gated_delta_net",
        num_layers=count,
        num_heads=config.number(("linear_num_value_heads",)),
        head_dim=config.number(("linear_value_head_dim",)),
        num_groups=config.number(("linear_num_key_heads",)),
        state_dim=config.number(("linear_key_head_dim",)),
        conv_kernel=config.number(("linear_conv_kernel_dim",)),
        state_bytes_per_element=4.0 if stored == "float32" else 2.0,
    )


def _mamba(config: ConfigKeys, count: int) -> Recurrent:
    _, stored = config.value(("mamba_ssm_cache_dtype",))
    return Recurrent(
        kind="mamba2",
        num_layers=count,
        num_heads=config.number(("mamba_num_heads",)),
        head_dim=config.number(("mamba_head_dim",)),
        num_groups=config.number(("n_groups", "mamba_n_groups")),
        state_dim=config.number(("ssm_state_size", "mamba_state_dim")),
        conv_kernel=config.number(("conv_kernel", "mamba_d_conv")),
        conv_bias=config.flag(("use_conv_bias", True)),
        state_bytes_per_element=2.0 if stored in ("bfloat16", "float16") else 4.0,
    )


def _linear_layers(config: ConfigKeys, layers: int) -> int:
    kinds = config.items("layer_types", layers)
    if kinds is not None:
        return sum(kind in LINEAR for kind in kinds)
    return layers - layers // config.number(("full_attention_interval",), MAX_WIDTH)
