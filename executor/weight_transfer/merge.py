"""LoRA at the receiving end: adapters and base weights to full weights.

    W' = W + scale * B A        W (out, in), A (rank, in), B (out, rank), scale = alpha / rank

Source: Hu et al. 2021, arXiv 2106.09685, section 4.1. Computed and given in float32; the engine rounds to its
own precision, as it does with any weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError


def merged(adapters: Iterable[Named], base_model: str, scale: float) -> Iterator[Named]:
    """Full weights of every module that an adapter touches, with its siblings.

    Siblings (all weights under the module's parent) go along because engines fuse q, k, v and gate, up into
    one weight that is loaded as a whole or not at all.
    """
    from safetensors import safe_open

    pairs = _pairs(adapters)
    index = weight_files(Path(base_model))
    if not index:
        raise RlhfsimError("weight-sync-adapters", f"no safetensors files in {base_model}")
    missing = sorted(set(pairs) - set(index))
    if missing:
        raise RlhfsimError(
            "weight-sync-adapters", f"{base_model} has no weight {missing[0]!r} for its adapter"
        )
    touched = {_parent(name) for name in pairs}
    for name in index:
        if _parent(name) in touched:
            with safe_open(index[name], framework="pt") as opened:
                full = opened.get_tensor(name).to(torch.float32)
            if pair := pairs.get(name):
                a, b = (pair[side].to(device="cpu", dtype=torch.float32) for side in "AB")
                full = full + scale * (b @ a)
            yield name, full


def weight_files(folder: Path) -> dict[str, Path]:
    """Safetensors file of every weight of a checkpoint, in its order; empty where there are none."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in named.items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))
    return files


def _pairs(adapters: Iterable[Named]) -> dict[str, dict[str, Tensor]]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapters:
        weight, _, side = name.rpartition(".lora_")
        pairs.setdefault(weight, {})[side] = tensor
    broken = sorted(weight for weight, sides in pairs.items() if set(sides) != {"A", "B"})
    if broken:
        raise RlhfsimError(
            "weight-sync-adapters",
            f"adapter of {broken[0]!r} lacks lora_A or lora_B",
            help="send <weight>.lora_A and <weight>.lora_B for every adapted weight",
        )
    return pairs


def _parent(weight: str) -> str:
    """`model.layers.0.self_attn` of `model.layers.0.self_attn.q_proj.weight`."""
    return weight.rsplit(".", 2)[0]
