"""The causal attention kernel of a forward pass, as the training engine calls it (grouped SDPA of torch)."""

from __future__ import annotations

from itertools import product

import torch

from executor.microbench.setup import ProbeSetup
from rlhfsim.specs.hardware.measured import Measured, summarise

GRID = ((2.0, 8.0, 32.0), (16.0, 128.0, 512.0), (1.0, 4.0), (32.0, 128.0))
QUICK = ((2.0, 16.0), (16.0, 256.0), (1.0, 4.0), (32.0, 128.0))
CUDA = ((8.0, 64.0), (128.0, 1024.0, 8192.0), (1.0, 8.0), (64.0, 128.0))
"""KV streams (sequences times KV heads), length, query heads on each, head width."""


def measure(setup: ProbeSetup) -> list[Measured]:
    """`attention`, seconds of one layer forward, at every node of the grid."""
    cuda = setup.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    points = []
    for streams, length, queries, width in product(*(CUDA if cuda else QUICK if setup.quick else GRID)):
        heads = int(streams * queries)
        q = torch.randn(1, heads, int(length), int(width), device=setup.device, dtype=dtype)
        k = torch.randn(1, int(streams), int(length), int(width), device=setup.device, dtype=dtype)

        def attend(q: torch.Tensor = q, k: torch.Tensor = k) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

        taken = setup.samples(attend, 8, 4)
        points.append(
            summarise(
                "attention", taken, "s", "torch SDPA, causal, forward", at=(streams, length, queries, width)
            )
        )
    return points
