"""Time of the experts of one layer in an engine's step; how tokens come to them: `collective_time`.

Legend as in `decode`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfsim.elementwise import Size, least, most
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.layers import Matrix, expert_matrices, shared_matrices
from rlhfsim.rollout.engine_step import EngineStep, Floats, gemm, kernel, kernel_name, weight_only, widened
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT


def experts(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, rows: Floats, linear: str
) -> EngineStep:
    """Router, routed and shared experts of one layer, without their communication.

    Tokens of all attention-DP ranks meet in the experts: q n rows. The curves are measured with
    skewed (power-law) routing and hold the experts that n tokens touch (G2) and the fullest rank.
    `linear`: kernel name of the dense products.
    """
    moe = model.moe
    assert moe is not None
    router = Matrix(name="router", n=moe.num_experts, k=model.hidden, linear=False)
    step = gemm(device, router, rows, layout.precision)
    for matrix in (*shared_matrices(model, layout.tp), *expert_matrices(model, 1)[3:]):
        step = step + gemm(device, matrix, rows, linear)
    return step + expert_work(device, model, layout, rows * layout.attention_dp, linear)


def expert_work(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, tokens: Floats, linear: str
) -> EngineStep:
    """Routed experts of one layer for `tokens` tokens of the whole replica, on its fullest GPU.

        at least beta params max(1, k/e) bytes and 2 params n k / e FLOP      params: of one expert / etp

    How many experts n tokens touch (G2: E (1 - (1 - k/E)^n) for uniform routing, fewer and
    hotter ones with skew) and the fullest rank are inside the measured curve.
    """
    moe = model.moe
    assert moe is not None
    ep, etp = expert_layout(layout)
    if widened(device, layout.precision):
        step = expert_work(device, model, replace(layout, precision="bf16"), tokens, "bf16")
        return _weight_only(device, model, layout, tokens, step)
    m, precision = np.maximum(tokens, 1.0), expert_precision(linear)
    params = (3 if model.gated else 2) * model.expert_width * moe.expert_ffn / etp
    touched = most(1.0, moe.top_k / ep)
    seconds = device.curves.moe(
        m, model.expert_width, moe.expert_ffn, moe.top_k, moe.num_experts, etp, ep, precision
    )
    return kernel(
        device,
        seconds,
        flop=2.0 * params * m * moe.top_k / ep,
        size=BYTES_PER_ELEMENT[layout.precision] * params * touched,
        precision=kernel_name(layout.precision),
    )


def _weight_only(
    device: Device, model: ModelSpec, layout: AnyRolloutLayout, tokens: Floats, step: EngineStep
) -> EngineStep:
    """Experts that n tokens touch are read: E (1 - (1 - k/E)^n) of a layer, over its ranks (G2)."""
    moe = model.moe
    assert moe is not None
    ep, etp = expert_layout(layout)
    n, params = np.maximum(tokens, 1.0), (3 if model.gated else 2) * model.expert_width * moe.expert_ffn / etp
    touched = moe.num_experts / ep * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** n)
    return weight_only(device, step, 2.0 * params * n * moe.top_k / ep, params * touched, layout.precision)


def expert_precision(linear: str) -> str:
    """Kernel name of the experts' precision: FP8 checkpoints of MoE models are scaled by block.

    DeepSeek-V3, Qwen3-MoE-FP8 and MiniMax-M2 ship 128 x 128 blocks. Their dense products are priced
    with the per-tensor curve: the block-scaled one was timed outside CUDA graphs, where the launch
    of its quantisation, not the GPU, takes 60 to 190 us whatever the size. Checkpoints of ModelOpt have one
    scale a tensor.
    """
    return "fp8_block" if linear == "fp8" else kernel_name(linear)


def expert_layout(layout: AnyRolloutLayout) -> tuple[Size, Size]:
    """Expert parallelism and the tensor parallelism inside one expert: ep x etp = tp x attention_dp."""
    ranks = layout.tp * layout.attention_dp
    ep = least(layout.ep, ranks)
    return ep, most(1, ranks // ep)
