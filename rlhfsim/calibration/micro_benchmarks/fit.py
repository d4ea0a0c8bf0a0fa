"""From repeated timings to coefficients: kernel tables, straight lines, overheads by least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from rlhfsim.calibration.predict import with_coefficients
from rlhfsim.kernels.cost import Z90
from rlhfsim.kernels.curves import PERCENT, element_bytes, peaks_of
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.grid import encode
from rlhfsim.kernels.work import KINDS, roof
from rlhfsim.rollout.decode import gpu_work
from rlhfsim.rollout.prefill import prefill
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.measured import HEADS, HIDDEN, KV_HEADS, TINY_FFN, TINY_VOCAB, WIDENING, Measured
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.model import Attention, ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.software import default_software
from rlhfsim.training.passes import passes
from rlhfsim.training.work import Work

Floats = NDArray[np.float64]
DRAWS = 400
"""Refits with every timing drawn from its own interval."""


def nonnegative(
    rows: Sequence[Sequence[float]], points: Sequence[Measured], less: Sequence[float] | None = None
) -> list[Measured]:
    """x >= 0 that minimises the sum of squared relative errors of rows x + less against the timings.

        min_x sum_i ((r_i x + l_i - t_i) / t_i)^2

    Intervals: P10 to P90 of refits with every t_i drawn log-normally from its own interval, widened as
    every measured number is (the fit averages out what repeats show, not what differs between sessions).
    Source: non-negative least squares, Lawson and Hanson 1974.
    """
    design = np.asarray(rows, dtype=np.float64)
    known = np.zeros(len(points)) if less is None else np.asarray(less, dtype=np.float64)
    seconds = np.array([p.value for p in points])
    sigma = np.array([np.log(p.high / p.low) / (2 * Z90) for p in points])
    best = _solve(design, seconds, known)
    draw = np.random.default_rng(0).normal(size=(DRAWS, len(points)))
    tried = np.array([_solve(design, seconds * np.exp(sigma * z), known) for z in draw])
    low, high = np.percentile(tried, [10, 90], axis=0)
    return [
        Measured(
            name="fitted",
            value=float(b),
            low=float(min(lo / WIDENING, b)),
            high=float(max(hi * WIDENING, b)),
            n=sum(p.n for p in points),
            unit="s",
            how=points[0].how,
        )
        for b, lo, hi in zip(best, low, high, strict=True)
    ]


def _solve(design: Floats, seconds: Floats, known: Floats) -> Floats:
    solution: Floats = nnls(design / seconds[:, None], (seconds - known) / seconds)[0]
    return solution


def misfit(
    rows: Sequence[Sequence[float]],
    points: Sequence[Measured],
    coefficients: Sequence[Measured],
    less: Sequence[float],
) -> float:
    """Median relative error of the fit over its own points."""
    fitted = np.asarray(rows) @ np.array([f.value for f in coefficients]) + np.asarray(less)
    seconds = np.array([p.value for p in points])
    return float(np.median(np.abs(fitted / seconds - 1)))


# --- kernel tables --------------------------------------------------------------------------------


def kernel_table(name: str, profile: Profile, points: Sequence[Measured], source: str) -> dict[str, Any]:
    """A table of `kernels.curves` from a full grid of points: the loss against the roofline at every node."""
    kind, peaks = KINDS[name.split("/")[0]], peaks_of(profile)
    knots = [sorted({p.at[axis] for p in points}) for axis in range(len(kind.axes))]
    by_point = {p.at: p.value for p in points}
    mesh = np.meshgrid(*[np.array(axis) for axis in knots], indexing="ij")
    demand = kind.demand(element_bytes("bf16"), *mesh)
    least = np.asarray(roof(demand, peaks.rate("bf16"), peaks.hbm, peaks.link))
    seconds = np.array([by_point[node] for node in zip(*(m.ravel().tolist() for m in mesh), strict=True)])
    loss = PERCENT * np.log(seconds.reshape(least.shape) / least)
    spread = [(p.value / p.high, p.value / p.low) for p in points]
    return {
        "source": source,
        "interval": [round(float(np.median([s[i] for s in spread])), 3) for i in (0, 1)],
        "axes": {
            axis: " ".join(f"{v:g}" for v in known) for axis, known in zip(kind.axes, knots, strict=True)
        },
        "loss": encode(loss),
    }


def is_grid(points: Sequence[Measured]) -> bool:
    """Whether the points fill a grid with two knots or more on every axis, which a kernel table needs."""
    axes = [set(axis) for axis in zip(*(p.at for p in points), strict=True)]
    return bool(points) and min(map(len, axes)) > 1 and math.prod(map(len, axes)) == len(points)


def roof_rates(points: Sequence[Measured]) -> tuple[float, float]:
    """Fastest FLOP/s and fastest byte/s (operands counted as BF16) that measured products reached."""
    flop, size = 0.0, 0.0
    for p in points:
        demand = KINDS["gemm"].demand(element_bytes("bf16"), *p.at)
        flop, size = max(flop, float(demand.flop) / p.value), max(size, float(demand.hbm) / p.value)
    return flop, size


# --- models ---------------------------------------------------------------------------------------


def tiny_model(layers: int) -> ModelSpec:
    """The model whose steps were timed."""
    return ModelSpec(
        name="tiny",
        num_layers=layers,
        hidden=HIDDEN,
        vocab=TINY_VOCAB,
        ffn=TINY_FFN,
        attention=Attention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HIDDEN // HEADS, qkv_bias=True),
    )


def decode_kernels(profile: Profile, points: Sequence[Measured]) -> list[float]:
    """Seconds of the kernels alone, as priced, for points (layers, sequences, context)."""
    device = _device(profile)
    return [
        float(
            gpu_work(device, tiny_model(int(layers)), RolloutLayout(), np.asarray(n), np.asarray(c)).seconds
        )
        for layers, n, c in (p.at for p in points)
    ]


def prefill_kernels(profile: Profile, points: Sequence[Measured]) -> list[float]:
    """The same of a prefill pass, for points (layers, prompts, length)."""
    device = _device(
        with_coefficients(
            profile, {"prefill_efficiency": 1.0, "prefill_overhead_vllm": 0.0, "eager_layer_overhead": 0.0}
        )
    )
    return [
        float(prefill(device, tiny_model(int(layers)), RolloutLayout(), n, length).seconds)
        for layers, n, length in (p.at for p in points)
    ]


def train_kernels(profile: Profile, point: Measured) -> float:
    """The same of forward and backward of one layer, for a point (layers, tokens, length)."""
    layers, tokens, length = point.at
    work = Work(tokens=tokens, length=length, fused=False)
    through = passes(
        _device(with_coefficients(profile, {"host_layer_time": 0.0})),
        tiny_model(int(layers)),
        work,
        default_software("megatron"),
        "none",
    )
    return float(through.layer)


def _device(profile: Profile) -> Device:
    return device_of(node_group(profile, 1, gpus_per_node=1))
