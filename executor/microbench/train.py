"""Forward and backward of tiny models of two depths: what a layer costs when there is little to compute."""

from __future__ import annotations

from typing import Any, cast

import torch

from executor.microbench.setup import ProbeSetup
from executor.tasks import tiny
from rlhfsim.specs.hardware.measured import HEADS, HIDDEN, KV_HEADS, Measured, summarise

LAYERS = (2, 6)
SEQUENCES, LENGTH = 2, 16


def measure(setup: ProbeSetup) -> list[Measured]:
    """`train_pass`, seconds of forward and backward, by (layers, tokens, length)."""
    return [_pass(setup, layers) for layers in LAYERS]


def _pass(setup: ProbeSetup, layers: int) -> Measured:
    from transformers import AutoModelForCausalLM

    folder = tiny.build(
        setup.scratch / f"model{layers}", hidden=HIDDEN, layers=layers, heads=HEADS, kv_heads=KV_HEADS
    )
    dtype = torch.bfloat16 if setup.device == "cuda" else torch.float32
    model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    model.to(setup.device).train()
    ids = torch.randint(4, 60, (SEQUENCES, LENGTH), device=setup.device)

    def step() -> None:
        model(input_ids=ids).logits.float().mean().backward()

    taken = setup.samples(step, 20, 8)
    at = (float(layers), float(SEQUENCES * LENGTH), float(LENGTH))
    return summarise(
        "train_pass",
        taken,
        "s",
        f"transformers, forward and backward of {SEQUENCES * LENGTH} tokens, width {HIDDEN}, eager",
        at=at,
    )
