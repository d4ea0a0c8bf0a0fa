"""Matrix products as linear layers make them, from one decoded token to a training batch.

A grid over (m, n, k): rows, outputs, inputs. The backward products of a training step are the same
shapes in another order. FP32 on a CPU, which the executor computes in there; BF16 on a GPU. Operands
that fit the cache stay in it between calls, as those of a model of that size do.
"""

from __future__ import annotations

from functools import partial
from itertools import product as grid

import torch

from executor.microbench.setup import ProbeSetup
from rlhfsim.specs.hardware.measured import Measured, summarise

CPU = ((1.0, 8.0, 64.0, 512.0, 4096.0), (64.0, 256.0, 1024.0, 4096.0))
CPU_QUICK = ((1.0, 16.0, 256.0), (64.0, 512.0, 2048.0))
CUDA = ((1.0, 16.0, 128.0, 1024.0, 8192.0), (256.0, 1024.0, 4096.0, 16384.0))
CUDA_QUICK = ((1.0, 64.0, 4096.0), (256.0, 2048.0, 8192.0))
"""Knots of m, and of n and k."""


def measure(setup: ProbeSetup) -> list[Measured]:
    """Seconds of (m, k) times (k, n) at every node of the grid."""
    cuda = setup.device == "cuda"
    rows, widths = (CUDA_QUICK if setup.quick else CUDA) if cuda else (CPU_QUICK if setup.quick else CPU)
    dtype, kind = (torch.bfloat16, "BF16") if cuda else (torch.float32, "FP32, one thread")
    points = []
    for m, n, k in grid(rows, widths, widths):
        x = torch.randn(int(m), int(k), device=setup.device, dtype=dtype)
        w = torch.randn(int(n), int(k), device=setup.device, dtype=dtype)
        product = partial(torch.nn.functional.linear, x, w)
        taken = setup.samples(product, 12, 5)
        points.append(summarise("gemm", taken, "s", f"torch linear, {kind}", at=(m, n, k)))
    return points
