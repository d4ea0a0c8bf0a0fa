"""A forward step of the inference engine as seconds per resource, vectorised, and its matrix products.

Every kernel is a measured time that is never faster than its own roof; the larger of the two roofs
says whether it counts as compute or as HBM. A product has the format that its weights are stored in.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhfsim.elementwise import Size
from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.curves import element_bytes
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.layers import Matrix
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT

Floats = NDArray[np.float64]
RESOURCES: tuple[Resource, ...] = ("compute", "hbm", "nvlink", "network", "overhead")
ACTIVATION_BYTES = 2.0
"""Activations and collectives of the rollout are BF16, whatever the weights are."""
FP4 = "fp4"
"""Kernel curves and peak of products with NVFP4 weights and activations."""
Spread = tuple[float, float]
CURVE_SPREAD: Spread = (0.85, 1.20)
"""P10 and P90 of measured over predicted for kernels timed alone and run inside an engine; prior,
of the order of what docs/validation_decode.md shows over the fitted rows."""
_RESTS_ON: dict[Resource, str] = {
    "compute": "gemm_efficiency",
    "hbm": "hbm_efficiency",
    "nvlink": "nvlink_latency",
    "network": "nic_efficiency",
    "overhead": "eager_layer_overhead",
}


class EngineStep(NamedTuple):
    """Seconds by resource, in the order of `RESOURCES`; the arrays broadcast to one shape."""

    compute: Floats
    hbm: Floats
    nvlink: Floats
    network: Floats
    overhead: Floats

    @property
    def seconds(self) -> Floats:
        """Sum over the resources."""
        return np.asarray(sum(self))

    def __add__(self, other: EngineStep) -> EngineStep:  # type: ignore[override]
        """One step after the other."""
        return EngineStep(*map(add, self, other))

    def scaled(self, factor: ArrayLike) -> EngineStep:
        """Every part times `factor`."""
        f = np.asarray(factor, dtype=np.float64)
        return EngineStep(*(part * f for part in self))

    def costs(self, device: Device, kernels: Spread = CURVE_SPREAD) -> list[Cost]:
        """A cost, with intervals, of each entry."""
        rows = np.stack(np.broadcast_arrays(*self), axis=-1).reshape(-1, len(self)).tolist()
        return [cost_of(device, dict(zip(RESOURCES, row, strict=True)), kernels) for row in rows]

    def cost(self, device: Device, kernels: Spread = CURVE_SPREAD) -> Cost:
        """The cost of a step with a single entry."""
        [cost] = self.costs(device, kernels)
        return cost


def cost_of(device: Device, seconds: dict[Resource, float], kernels: Spread = CURVE_SPREAD) -> Cost:
    """A cost with the intervals of the `kernels` and of the coefficients behind each part."""
    return Cost(parts=tuple(_part(device, r, s, kernels) for r, s in seconds.items() if s > 0))


def _part(device: Device, resource: Resource, seconds: float, kernels: Spread) -> Part:
    name = _RESTS_ON.get(resource, "hbm_efficiency")
    own = resource in ("network", "overhead")
    spread = device.spread(name) if own else device.borrowed(kernels)
    return part(resource, seconds, name, spread=spread)


def nothing() -> EngineStep:
    """A step that takes no time."""
    return on("overhead", 0.0)


def on(resource: Resource, seconds: ArrayLike) -> EngineStep:
    """A step that spends `seconds` on one resource."""
    s, zero = np.asarray(seconds, dtype=np.float64), np.zeros(())
    return EngineStep(*(s if name == resource else zero for name in RESOURCES))


def chosen(holds: Size, yes: Callable[[], EngineStep], no: Callable[[], EngineStep]) -> EngineStep:
    """The step of `yes` where it holds, else that of `no`; what no layout takes is not worked out."""
    if not isinstance(holds, np.ndarray):
        return yes() if holds else no()
    if not holds.any() or holds.all():
        return yes() if holds.any() else no()
    return EngineStep(*(np.where(holds, *each) for each in zip(yes(), no(), strict=True)))


def kernel(
    device: Device, seconds: ArrayLike, *, flop: ArrayLike, size: ArrayLike, precision: str
) -> EngineStep:
    """A kernel of measured `seconds`, at least flop / F and size / B_m, on the larger of the two.

    `size` is bytes through HBM. Source: Williams et al. 2009, CACM 52(4), roofline.
    """
    roof_compute = np.asarray(flop, dtype=np.float64) / device.peak(precision)
    roof_hbm = np.asarray(size, dtype=np.float64) / device.profile.hbm.value
    taken = np.maximum(np.asarray(seconds, dtype=np.float64), np.maximum(roof_compute, roof_hbm))
    bound = roof_compute > roof_hbm
    zero = np.zeros(())
    return EngineStep(np.where(bound, taken, 0.0), np.where(bound, 0.0, taken), zero, zero, zero)


# --- matrix products ---------------------------------------------------------------------------------


def gemm(device: Device, matrix: Matrix, rows: Floats, precision: str, *, fused: bool = False) -> EngineStep:
    """One matrix product from the measured curve; routers and the LM head stay BF16.

    `fused`: an FP8 product takes at most the time of the BF16 one. The FP8 tables time the quantisation of
    activations as a kernel of its own, which vLLM's compiler fuses into the norm or activation before.
    """
    name = precision if matrix.linear else "bf16"
    if widened(device, name):
        read = matrix.n * matrix.k
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
    compute, hbm = flop / device.peak("bf16"), device.profile.hbm.value
    narrow, wide = (BYTES_PER_ELEMENT[name] * np.asarray(read) / hbm for name in (stored, "bf16"))
    return step.scaled(np.maximum(compute, narrow) / np.maximum(compute, wide))
