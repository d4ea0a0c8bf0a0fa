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
FP4 = "fp4"
"""Kernel curves and peak of products with NVFP4 weights and activations."""


def gemm(device: Device, matrix: Matrix, rows: Floats, precision: str, *, fused: bool = False) -> EngineStep:
    """One matrix product from the measured curve; routers and the LM head stay BF16.

    `fused`: an FP8 product takes at most the time of the BF16 one. The FP8 tables time the quantisation of
    activations as a kernel of its own, which vLLM's compiler fuses into the norm or activation before.
    """
    name = precision if matrix.linear else "bf16"
    if widened(device, name):
        read = float(matrix.n * matrix.k)
        step = gemm(device, matrix, rows, "bf16")
        return weight_only(device, step, 2.0 * np.maximum(rows, 1.0) * read, read, name)
    name = kernel_name(name)
    m, each = np.maximum(rows, 1.0), element_bytes(name)
    size = each * matrix.n * matrix.k + m * (each * matrix.k + ACTIVATION_BYTES * matrix.n)
    seconds = device.curves.gemm(m, matrix.n, matrix.k, name)
    if fused and name != "bf16":
        seconds = np.minimum(seconds, device.curves.gemm(m, matrix.n, matrix.k, "bf16"))
    return kernel(
        device, seconds, flop=2.0 * m * matrix.n * matrix.k, size=size, precision=name.removesuffix("_static")
    )


def widened(device: Device, precision: str) -> bool:
    """Whether weights are stored narrow and widened to BF16 on the way to the arithmetic.

    MXFP4 is; NVFP4 where the GPU has no FP4 tensor cores (Marlin kernels of vLLM).
    """
    return precision == "mxfp4" or (precision == "nvfp4" and FP4 not in device.profile.peak)


def kernel_name(precision: str) -> str:
    """Name of the kernels that compute with weights of a format."""
    return FP4 if precision == "nvfp4" else precision


def weight_only(
    device: Device, step: EngineStep, flop: Floats, read: float | Floats, stored: str
) -> EngineStep:
    """A BF16 kernel whose `read` weights are `stored` narrow and widened on the way to the arithmetic.

        t = t_BF16 max(flop / F, w4 / B) / max(flop / F, w2 / B)      the efficiency of the BF16 kernel stays

    Prior: no table of such kernels is at hand (gpt-oss in vLLM on Hopper computes so).
    """
    compute, hbm = flop / peak(device, "bf16"), device.profile.hbm.value
    narrow, wide = (BYTES_PER_ELEMENT[name] * np.asarray(read) / hbm for name in (stored, "bf16"))
    return step.scaled(np.maximum(compute, narrow) / np.maximum(compute, wide))
