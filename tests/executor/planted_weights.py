"""Weights that transports must carry whole."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = list[tuple[str, Tensor]]


def some_weights(seed: int = 0) -> Weights:
    """Every kind that could go wrong: odd sizes, several dtypes, a scalar, none, larger than a bucket."""
    draw = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(300, 7, generator=draw)),
        ("half", torch.randn(33, generator=draw).to(torch.bfloat16)),
        ("scalar", torch.randn((), generator=draw)),
        ("nothing", torch.empty(0, 4)),
        ("counts", torch.arange(5)),
        ("strided", torch.randn(8, 6, generator=draw).t()),
        ("head", torch.randn(300, 7, generator=draw)),
    ]
