"""Seconds of a training pass by how its micro-batches are formed: same samples, same tokens priced for each.

    python lab/benchmarks/packing_speed.py [--samples 48] [--threads 1]

A random llama (4 layers of 256, vocabulary 4,096) learns from responses with a long tail. The peer of packs is
one row with a mask over the pack, as transformers makes it where FlashAttention is not installed; the peer of
padded micro-batches are those of a fixed number of samples in the order they come. Limits: packs at most 0.7
of their peer's seconds, padded ones 0.8.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from executor.engines.packing import MicroBatch, micro_batch, micro_batches
from executor.engines.transformers import heads
from executor.engines.transformers.attention import VARLEN
from executor.samples import Sample

PRICED, LONGEST, PROMPT = 2048, 512, 64
LIMITS = {"packed": 0.7, "padded": 0.8}
REPEATS = 3


def main() -> None:
    """Print one row for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    some = samples(asked.samples)
    with tempfile.TemporaryDirectory() as folder:
        model = llama(folder)
    size = PRICED // LONGEST
    fixed = [micro_batch(some[i : i + size], packed=False) for i in range(0, len(some), size)]
    packs = micro_batches(some, PRICED, packed=True)
    masked = seconds(lambda: learn(model, packs, "sdpa"))
    in_order = seconds(lambda: learn(model, fixed, "sdpa"))
    rows = {
        "packed, a mask over the pack (peer)": (packs, masked, None),
        "packed": (packs, seconds(lambda: learn(model, packs, VARLEN)), masked),
        "padded, in the order they come (peer)": (fixed, in_order, None),
    }
    alike = micro_batches(some, PRICED, packed=False)
    rows["padded"] = (alike, seconds(lambda: learn(model, alike, "sdpa")), in_order)
    print(f"{'micro-batches':40} {'number':>6} {'padding':>8} {'seconds':>8} {'of peer':>8} {'limit':>6}")
    tokens = sum(sample.length for sample in some)
    for title, (batches, spent, peer) in rows.items():
        padding = 1 - tokens / sum(batch.tokens.numel() for batch in batches)
        ratio = "" if peer is None else f"{spent / peer:8.2f} {LIMITS[title]:6.1f}"
        print(f"{title:40} {len(batches):6} {padding:8.0%} {spent:8.2f} {ratio}")


def samples(count: int) -> list[Sample]:
    """Prompts of one length, responses with a long tail."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(LONGEST - PROMPT, draw.lognormal(4.6, 0.8, count).astype(int) + 1)
    return [
        Sample(id=i, group=i, prompt=draw.integers(0, 4096, PROMPT), response=draw.integers(0, 4096, length))
        for i, length in enumerate(lengths)
    ]


def llama(folder: str) -> heads.HeadedModel:
    """The model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return heads.load(folder, "causal", "fp32")


def learn(model: heads.HeadedModel, batches: Sequence[MicroBatch], attention: str) -> None:
    """Forward and backward passes over all micro-batches."""
    model.config._attn_implementation = attention
    for batch in batches:
        model(batch.tokens, batch.positions, batch.index, batch.targets)[0].sum().backward()


def seconds(call: Callable[[], None]) -> float:
    """Median of some calls, after one that warms up."""
    spent = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent[1:])


if __name__ == "__main__":
    main()
