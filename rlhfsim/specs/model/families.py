"""What each `model_type` of a Hugging Face config implies but does not write down.

Biases, norms, positions and window patterns live in the modelling code of `transformers`, not in
config.json. Each entry of `families.json` states them for some types, with the defaults of their
configuration class where a config may leave a key out; what it leaves out is as in Llama. Source of all of
them: huggingface/transformers, `models/<type>/{configuration,modeling}_<type>.py`, or the checkpoint's own
remote code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from rlhfsim.frozen import frozen
from rlhfsim.specs.model.blocks import Norm

Flag = bool | tuple[str, bool]
"""A fact of the architecture, or the key that decides it with the default when it is absent."""


@frozen
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


_DATA = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))


def _family(given: Mapping[str, Any]) -> Family:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return Family(**values)


def _reasons(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: _DATA["reasons"].get(reason, reason) for reason, names in rows for name in names.split()}


FAMILIES: Mapping[str, Family] = {
    kind: _family(entry["implies"]) for entry in _DATA["families"] for kind in entry["types"].split()
}
REFUSED: Mapping[str, str] = _reasons(_DATA["refused"])
"""Model types that this spec cannot express, with the reason."""
REFUSED_KEYS: Mapping[str, str] = _reasons(_DATA["refused_keys"])
"""Keys that give such a model away when its type is unknown."""
