"""One matrix product of the inference engine, in the format that its weights are stored in."""

from __future__ import annotations

import numpy as np

from rlhfsim.kernels.curves import element_bytes
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.layers import Matrix
from rlhfsim.rollout.engine_step import EngineStep, Floats, kernel, peak
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT

ACTIVATION_BYTES = 2.0
"""Activations and collectives of the rollout are BF16, whatever the weights are."""
WEIGHT_ONLY = "mxfp4"
"""Weights that are stored narrow and computed with in BF16."""


def gemm(device: Device, matrix: Matrix, rows: Floats, precision: str, *, fused: bool = False) -> EngineStep:
    """One matrix product from the measured curve; routers and the LM head stay BF16.

    `fused`: an FP8 product takes at most the time of the BF16 one. The FP8 tables time the quantisation of
    activations as a kernel of its own, which vLLM's compiler fuses into the norm or activation before.
    """
    name = precision if matrix.linear else "bf16"
    if name == WEIGHT_ONLY:
        read = float(matrix.n * matrix.k)
        step = gemm(device, matrix, rows, "bf16")
        return weight_only(device, step, 2.0 * np.maximum(rows, 1.0) * read, read)
    m, each = np.maximum(rows, 1.0), element_bytes(name)
    size = each * matrix.n * matrix.k + m * (each * matrix.k + ACTIVATION_BYTES * matrix.n)
    seconds = device.curves.gemm(m, matrix.n, matrix.k, name)
    if fused and name != "bf16":
        seconds = np.minimum(seconds, device.curves.gemm(m, matrix.n, matrix.k, "bf16"))
    return kernel(
        device, seconds, flop=2.0 * m * matrix.n * matrix.k, size=size, precision=name.removesuffix("_static")
    )


def weight_only(device: Device, step: EngineStep, flop: Floats, read: float | Floats) -> EngineStep:
    """A BF16 kernel whose `read` weights are stored in MXFP4 and widened on the way to the arithmetic.

        t = t_BF16 max(flop / F, w4 / B) / max(flop / F, w2 / B)      the efficiency of the BF16 kernel stays

    Prior: no table of such kernels is at hand (gpt-oss in vLLM on Hopper computes so).
    """
    compute, hbm = flop / peak(device, "bf16"), device.profile.hbm.value
    narrow, wide = (BYTES_PER_ELEMENT[name] * np.asarray(read) / hbm for name in (WEIGHT_ONLY, "bf16"))
    return step.scaled(np.maximum(compute, narrow) / np.maximum(compute, wide))
