"""One optimizer step of the executor's AdamW with the gradient norm, against the number of parameters."""

from __future__ import annotations

import torch

from executor.engines.optimizers import adam
from executor.engines.protocols import EngineSpec
from executor.microbench.setup import ProbeSetup
from executor.settings import Optimizer
from rlhfsim.specs.hardware.measured import Measured, summarise
from rlhfsim.specs.placement.layout import Layout

SIZES = (2**18, 2**22, 2**25)
QUICK = (2**18, 2**23)
"""Parameters; the largest lie far outside any cache."""
TENSORS = 16


def measure(setup: ProbeSetup) -> list[Measured]:
    """`optimizer_step`, seconds, by (parameters,)."""
    spec = EngineSpec(role="actor", model="", layout=Layout(), optimizer=Optimizer())
    return [_step(setup, spec, size) for size in (QUICK if setup.quick else SIZES)]


def _step(setup: ProbeSetup, spec: EngineSpec, size: int) -> Measured:
    weights = [torch.nn.Parameter(torch.randn(size // TENSORS, device=setup.device)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = adam(spec, weights)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    taken = setup.samples(step, 12, 5)
    return summarise(
        "optimizer_step",
        taken,
        "s",
        f"AdamW of torch in FP32 and the gradient norm, {TENSORS} tensors",
        at=(float(size),),
    )
