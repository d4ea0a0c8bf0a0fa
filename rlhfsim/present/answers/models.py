"""What `rlhfsim models` answers: the model presets, and the shape of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rlhfsim.present.answers.tree import Column, Page, TypedTable, answer, facts, hidden, table_of
from rlhfsim.present.tables import ALIASES, BYTES, COUNT, CUT, PARAMETERS, fields
from rlhfsim.present.words import plural
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import aliases

SCHEMA = "rlhfsim.models/1"
NOTE = (
    "active: parameters that one token uses. KV: bytes per token in BF16 over the whole model. Other names: "
    "Hugging Face ids, and any config.json (docs/models.md)."
)


EXPERTS = {
    "layers": "num_moe_layers",
    "experts": "num_experts",
    "top_k": "top_k",
    "expert_ffn": "expert_ffn",
    "shared_experts": "num_shared_experts",
}
"""Key in JSON -> field of a mixture of experts."""


class NamedModel(NamedTuple):
    """A model and the name of its preset, where it is one."""

    spec: ModelSpec
    preset: str | None

    @property
    def aliases(self) -> list[str]:
        """Other names of the preset."""
        return [alias for alias, owner in aliases().items() if owner == self.preset]


def listing(models: Iterable[NamedModel]) -> Page:
    """One line a preset, and what the columns mean."""
    return answer(SCHEMA, _table(models))


def _table(models: Iterable[NamedModel]) -> TypedTable:
    return table_of(
        "",
        models,
        Column("name", "spec.name"),
        Column("also", "aliases", ALIASES, fit=CUT),
        Column("params", "spec.num_params", PARAMETERS, "params"),
        Column("active", "spec.num_active_params", PARAMETERS, "active_params"),
        Column("layers", "spec.num_layers", COUNT),
        Column("hidden", "spec.hidden", COUNT, spare=3),
        Column("heads", "spec.attention.num_heads", COUNT, spare=2),
        Column("KV heads", "spec.attention.num_kv_heads", COUNT, spare=1),
        Column("KV/token", lambda m: m.spec.kv_bytes_per_token(), BYTES, "kv_bytes_per_token"),
        *hidden("spec.state_bytes"),
        Column("experts", "spec.moe.num_experts", COUNT, "experts", spare=4),
        name="models",
        notes=(NOTE,),
    )


def _details(model: NamedModel) -> dict[str, Any]:
    spec, moe = model.spec, model.spec.moe
    return {
        **_table([model]).records[0],
        **fields(spec, "vocab", "ffn", attention="attention.kind", head_dim="attention.head_dim"),
        **fields(spec, "tied_embeddings", "max_position"),
        "moe": moe and fields(moe, **EXPERTS),
        "layer_kinds": [
            {"layers": count, "kind": words, "params": params} for count, words, params in _kinds(spec)
        ],
        "vision_params": spec.params_vision,
        "bf16_bytes": 2.0 * spec.num_params,
        "valid_tp": _tp(spec),
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
        return f"sparse attention to {COUNT.shown(at.index_topk)} tokens"
    if at.num_windowed_layers and at.num_windowed_layers < spec.num_attention_layers:
        return f"attention ({at.num_windowed_layers} layers see {COUNT.shown(at.sliding_window)} tokens)"
    return f"attention to {COUNT.shown(at.sliding_window)} tokens" if at.num_windowed_layers else "attention"


def sheet(model: NamedModel) -> Page:
    """The shape of one model."""
    tiles = facts(_facts(model.spec, model.aliases))
    return answer(SCHEMA, title=model.spec.name, tiles=tiles, data={"models": [_details(model)]})


def _facts(spec: ModelSpec, names: Sequence[str]) -> dict[str, str]:
    at, count, size = spec.attention, PARAMETERS.shown, BYTES.shown
    shape = {
        "aliases": ", ".join(names) or "none",
        "params": f"{count(spec.num_params)} ({COUNT.shown(spec.num_params)}), "
        f"{size(2.0 * spec.num_params)} in BF16",
        "shape": f"{spec.num_layers} layers, hidden {COUNT.shown(spec.hidden)}, FFN {COUNT.shown(spec.ffn)}, "
        f"vocabulary {COUNT.shown(spec.vocab)}" + ", tied embeddings" * spec.tied_embeddings,
        "heads": f"{at.kind.upper()}, {at.num_heads} query and {at.num_kv_heads} key/value heads of "
        f"{at.head_dim}",
        "layers": "; ".join(f"{n} x {words}, {count(params)} each" for n, words, params in _kinds(spec)),
        "KV cache": f"{size(spec.kv_bytes_per_token())} per token in BF16"
        + (f", and {size(spec.state_bytes)} a sequence" if spec.state_bytes else ""),
        "context": plural(spec.max_position, "token") if spec.max_position else "not stated",
        "TP": f"may be {', '.join(map(str, _tp(spec)))}",
        "source": spec.source or "given",
    }
    if moe := spec.moe:
        shape["experts"] = (
            f"{moe.num_experts} in {moe.num_moe_layers} layers, {moe.top_k} per token, FFN "
            f"{COUNT.shown(moe.expert_ffn)}, {moe.num_shared_experts} shared; "
            f"{count(spec.num_active_params)} parameters active"
        )
    if spec.vision:
        tokens = plural(spec.vision.tokens(1024, 1024), "token")
        shape["vision tower"] = (
            f"{count(spec.params_vision)} parameters; an image of 1024 x 1024 is {tokens} of the prompt"
        )
    return shape


def _tp(spec: ModelSpec) -> Sequence[int]:
    return spec.tp_degrees(min(spec.attention.num_heads, 64))
