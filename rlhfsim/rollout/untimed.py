"""Kernels of an engine that nobody timed for us: scans of recurrent layers, the indexer of sparse attention.

Their speed is a share of the peak, or of memory bandwidth, with a wide interval (`scan_efficiency`,
`state_efficiency`, `indexer_efficiency` of hardware_profiles/common.yaml, each with its reason).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rlhfsim.elementwise import Size, least
from rlhfsim.kernels.device import Device
from rlhfsim.rollout.engine_step import CURVE_SPREAD, EngineStep, Floats, Spread, kernel, nothing, widened
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout

UNTIMED_SPREAD: Spread = (0.85, 1.54)
"""P10 and P90 of measured over predicted decode times of models with such layers, and of weights that are
widened on the way: 287 points of Qwen3.5-397B, GLM-5 and gpt-oss-120b whose MD5 of model and GPU is even
(lab.decode)."""


def kernel_spread(device: Device, model: ModelSpec, layout: AnyRolloutLayout) -> Spread:
    """P10 and P90 of measured over predicted time of an engine's kernels; wider where some were not timed."""
    untimed = model.recurrent is not None or model.attention.index_num_heads > 0
    return UNTIMED_SPREAD if untimed or widened(device, layout.precision) else CURVE_SPREAD


def scan(device: Device, model: ModelSpec, tp: Size, tokens: Size) -> EngineStep:
    """The scans of all recurrent layers over `tokens` prompt tokens, cut over tp by heads."""
    block = model.recurrent
    if block is None:
        return nothing()
    flop = model.num_recurrent_layers * block.scan_flop * tokens / tp
    seconds = flop / (device.peak("bf16") * device["scan_efficiency"])
    return kernel(device, seconds, flop=flop, size=0.0, precision="bf16")


def state_update(
    device: Device, model: ModelSpec, tp: Size, sequences: Floats, tokens: int = 1
) -> EngineStep:
    """One decode step of all recurrent layers: every state read and written, whatever the context."""
    if model.recurrent is None:
        return nothing()
    size = 2.0 * model.state_bytes * np.asarray(sequences) * tokens / least(tp, model.recurrent.num_heads)
    seconds = size / (device.profile.hbm.value * device["state_efficiency"])
    return kernel(device, seconds, flop=0.0, size=size, precision="bf16")


def index(device: Device, model: ModelSpec, pairs: ArrayLike, keys: ArrayLike) -> EngineStep:
    """The indexers of all layers over `pairs` of query and key; `keys` that are read. Not cut over tp."""
    at = model.attention
    if not at.index_num_heads:
        return nothing()
    layers = float(model.num_attention_layers)
    flop = layers * at.index_flop(1.0) * np.asarray(pairs, dtype=np.float64)
    size = layers * at.index_bytes * np.asarray(keys, dtype=np.float64)
    seconds = np.maximum(flop / (device.peak("fp8") * device["indexer_efficiency"]), size / device.hbm)
    return kernel(device, seconds, flop=flop, size=size, precision="fp8")
