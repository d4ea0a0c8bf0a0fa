"""What `rlhfsim models` shows: the model presets, and the shape of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.tables import CUT, grid
from rlhfsim.present.terminal.console import NARROW, console, drawn, labelled
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import aliases

SCHEMA = "rlhfsim.models/1"
NOTE = (
    "active: parameters that one token uses. KV: bytes per token in BF16 over the whole model. Other names: "
    "Hugging Face ids, and any config.json (docs/models.md)."
)


def row(spec: ModelSpec, name: str | None) -> dict[str, Any]:
    """What the list shows."""
    return {
        "name": spec.name,
        "aliases": [a for a, owner in aliases().items() if owner == name],
        "params": spec.num_params,
        "active_params": spec.num_active_params,
        "num_layers": spec.num_layers,
        "hidden": spec.hidden,
        "num_heads": spec.attention.num_heads,
        "num_kv_heads": spec.attention.num_kv_heads,
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "state_bytes": spec.state_bytes,
        "experts": spec.moe.num_experts if spec.moe else None,
    }


def details(spec: ModelSpec, name: str | None) -> dict[str, Any]:
    """The whole shape of one model."""
    attention, moe = spec.attention, spec.moe
    return {
        **row(spec, name),
        "vocab": spec.vocab,
        "ffn": spec.ffn,
        "attention": attention.kind,
        "head_dim": attention.head_dim,
        "tied_embeddings": spec.tied_embeddings,
        "max_position": spec.max_position,
        "moe": None
        if moe is None
        else {
            "layers": moe.num_moe_layers,
            "experts": moe.num_experts,
            "top_k": moe.top_k,
            "expert_ffn": moe.expert_ffn,
            "shared_experts": moe.num_shared_experts,
        },
        "layer_kinds": [
            {"layers": count, "kind": words, "params": params} for count, words, params in _kinds(spec)
        ],
        "vision_params": spec.params_vision,
        "bf16_bytes": 2.0 * spec.num_params,
        "valid_tp": spec.tp_degrees(min(spec.attention.num_heads, 64)),
        "source": spec.source,
    }


def _kinds(spec: ModelSpec) -> Iterator[tuple[int, str, int]]:
    """The kinds of layer in words, with the elements of one."""
    for kind in spec.kinds:
        mixer, params = "", spec.params_layer_norms
        if kind.mixer == "attention":
            mixer, params = _attention(spec), params + spec.params_layer_attention
        elif kind.mixer == "recurrent" and spec.recurrent:
            mixer, params = spec.recurrent.words, params + spec.params_layer_recurrent
        if kind.ffn == "dense":
            params += spec.params_layer_dense_mlp
        elif kind.ffn == "experts" and spec.moe:
            params += spec.moe.num_experts * spec.params_expert + spec.params_shared_expert
            params += spec.params_router + spec.params_latent
        ffn = {"dense": "MLP", "experts": "experts", "none": ""}[kind.ffn]
        yield kind.layers, " + ".join(word for word in (mixer, ffn) if word), params


def _attention(spec: ModelSpec) -> str:
    at = spec.attention
    if at.index_topk:
        return f"sparse attention to {at.index_topk:,} tokens"
    if at.num_windowed_layers and at.num_windowed_layers < spec.num_attention_layers:
        return f"attention ({at.num_windowed_layers} layers see {at.sliding_window:,} tokens)"
    return f"attention to {at.sliding_window:,} tokens" if at.num_windowed_layers else "attention"


def count(params: float) -> str:
    """`70.6B`, `350M`."""
    large = params >= units.BILLION
    scale, letter = (units.BILLION, "B") if large else (units.MILLION, "M")
    return f"{units.significant(params / scale)}{letter}"


def listing(rows: Sequence[dict[str, Any]]) -> Sequence[RenderableType]:
    """One line per preset, and what the columns mean."""
    shape = (">layers",) if console().width < NARROW else (">layers", ">hidden", ">heads")
    titles = ("name", "also", ">params", ">active", *shape, ">KV/token")
    cells = (
        (
            each["name"],
            ", ".join(sorted(each["aliases"], key=len)),
            count(each["params"]),
            count(each["active_params"]) if each["experts"] else "",
            *[str(each["num_layers"]), str(each["hidden"]), f"{each['num_heads']}/{each['num_kv_heads']}"][
                : len(shape)
            ],
            units.format(each["kv_bytes_per_token"], "byte"),
        )
        for each in rows
    )
    return drawn(grid(titles, cells, fit={"also": CUT}), console().width), Text(NOTE)


def sheet(spec: ModelSpec, each: dict[str, Any]) -> Sequence[RenderableType]:
    """One model as labelled lines; `each` are its `details`."""
    rows = {
        "aliases": ", ".join(each["aliases"]) or "none",
        "params": f"{count(each['params'])} ({each['params']:,}), "
        f"{units.format(each['bf16_bytes'], 'byte')} in BF16",
        "shape": f"{spec.num_layers} layers, hidden {spec.hidden:,}, FFN {spec.ffn:,}, vocabulary "
        f"{spec.vocab:,}" + (", tied embeddings" if spec.tied_embeddings else ""),
        "heads": f"{spec.attention.kind.upper()}, {spec.attention.num_heads} query and "
        f"{spec.attention.num_kv_heads} key/value heads of {spec.attention.head_dim}",
        "layers": "; ".join(f"{n} x {words}, {count(params)} each" for n, words, params in _kinds(spec)),
        "KV cache": f"{units.format(each['kv_bytes_per_token'], 'byte')} per token in BF16"
        + (f", and {units.format(spec.state_bytes, 'byte')} a sequence" if spec.state_bytes else ""),
        "context": f"{spec.max_position:,} tokens" if spec.max_position else "not stated",
        "TP": f"may be {', '.join(map(str, each['valid_tp']))}",
        "source": spec.source or "given",
    }
    if spec.moe:
        moe = spec.moe
        rows["experts"] = (
            f"{moe.num_experts} in {moe.num_moe_layers} layers, {moe.top_k} per token, FFN "
            f"{moe.expert_ffn:,}, "
            f"{moe.num_shared_experts} shared; {count(each['active_params'])} parameters active"
        )
    if spec.vision:
        rows["vision tower"] = (
            f"{count(spec.params_vision)} parameters; an image of 1024 x 1024 is "
            f"{spec.vision.tokens(1024, 1024):,} tokens of the prompt"
        )
    return Text(spec.name, style="bold"), labelled(rows)
