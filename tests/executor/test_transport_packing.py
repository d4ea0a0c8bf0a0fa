"""Buckets, their checksums and the merge of adapters, without a channel."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from planted_weights import some_weights
from safetensors.torch import save_file
from torch import Tensor

from executor.weight_transfer.merge import merged
from executor.weight_transfer.packing import Bucket, pack, sums, unpack
from rlhfsim.errors import RlhfsimError


def test_a_bucket_holds_whole_tensors_unless_one_is_larger() -> None:
    weights = some_weights()
    buckets = [
        Bucket(bucket.flat.clone(), bucket.parts)
        for bucket in pack(weights, 4096, lambda _: torch.empty(4096, dtype=torch.uint8))
    ]
    cut = {part.name for bucket in buckets for part in bucket.parts if not part.whole}
    assert cut == {"embed", "head"}, "8400 bytes each, all others fit"
    assert all(bucket.flat.numel() <= 4096 for bucket in buckets)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(weights, chain.from_iterable(unpack(buckets)), strict=True)
    )


def test_checksum_for_gpus_sees_changed_lost_and_swapped_words() -> None:
    data = torch.randint(0, 255, (100_003,), dtype=torch.uint8)
    seen = {sums(data)}
    for change in ("one bit", "two words", "two rows", "the end"):
        other = data.clone()
        if change == "one bit":
            other[50_001] ^= 4
        elif change == "two words":
            other[0:8], other[8:16] = data[8:16], data[0:8]
        elif change == "two rows":
            other[:32768], other[32768:65536] = data[32768:65536], data[:32768]
        else:
            other[-1] ^= 1
        seen.add(sums(other))
    assert len(seen) == 5
    assert sums(torch.cat([data[:3], data])[3:]) == sums(data), "wherever it lies"


def base_model(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
    base = {f"layers.{i}.{name}.weight": torch.randn(6, 4) for i in range(2) for name in names}
    base["layers.0.self_attn.q_proj.bias"] = torch.randn(6)
    save_file(base, folder / "model.safetensors")
    return base


def test_adapter_without_partner_or_base_weight_is_refused(tmp_path: Path) -> None:
    base_model(tmp_path)
    name = "layers.0.mlp.up_proj.weight"
    with pytest.raises(RlhfsimError, match="lacks lora_A or lora_B"):
        list(merged([(f"{name}.lora_A", torch.zeros(2, 4))], str(tmp_path), 1.0))
    pair = [("other.weight.lora_A", torch.zeros(2, 4)), ("other.weight.lora_B", torch.zeros(6, 2))]
    with pytest.raises(RlhfsimError, match=r"has no weight 'other\.weight'"):
        list(merged(pair, str(tmp_path), 1.0))
