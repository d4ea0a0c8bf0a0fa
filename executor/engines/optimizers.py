"""The optimizer of a training engine, AdamW of torch, of DeepSpeed or with 8-bit states, and its rate."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.engines import device
from executor.engines.protocols import EngineSpec
from executor.settings import Optimizer
from rlhfsim.errors import RlhfsimError

logger = logging.getLogger(__name__)
BUILD_LIMIT_S = 900.0
"""No build of an operator takes longer."""


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step`, from 0.

        warm-up  rate (step + 1) / warmup_steps          while step < warmup_steps
        constant rate    linear  rate (1 - x)    cosine  rate (1 + cos(pi x)) / 2

    x is the share of the steps after warm-up that are done, so that the last step still learns.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match optimizer.schedule:
        case "constant":
            return optimizer.learning_rate
        case "linear":
            return optimizer.learning_rate * (1.0 - done)
        case "cosine":
            return optimizer.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def adam(spec: EngineSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with the settings of `spec`.

    Raises:
        RlhfsimError: 8-bit states without bitsandbytes and a GPU.
    """
    assert spec.optimizer is not None
    arguments: dict[str, Any] = {
        "lr": spec.optimizer.learning_rate,
        "betas": spec.optimizer.betas,
        "eps": spec.optimizer.eps,
        "weight_decay": spec.optimizer.weight_decay,
    }
    if spec.optimizer_kind == "adam8bit":
        return _adam8bit(parameters, arguments)
    if spec.backend == "fsdp2":
        return torch.optim.AdamW(parameters, fused=device.available(), **arguments)
    if spec.layout.offload_optimizer == "cpu":
        return _host_adam(parameters, arguments)
    return torch.optim.AdamW(parameters, fused=True, **arguments)


def _adam8bit(parameters: Iterable[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except ImportError:
        bitsandbytes = None
    if bitsandbytes is None or not device.available():
        raise RlhfsimError(
            "adam8bit-unavailable",
            "8-bit Adam states need bitsandbytes and a CUDA GPU",
            help="pip install 'rlhfsim[adam8bit]' on a GPU machine, or use optimizer: adam",
        )
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, **arguments)
    return optimizer


def _host_adam(parameters: Iterable[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam where there is a GPU and it can be built (about a minute once), else torch's.

    Its build raises without a compiler, and where nvcc is of another CUDA than torch: of CUDA 13 the table of
    versions that may differ knows none (`cuda_minor_mismatch_ok` in deepspeed/ops/op_builder). Without
    a GPU the optimizer is on the host anyway and torch's AdamW needs no build.
    """
    parameters = list(parameters)
    reason = "no GPU"
    if device.available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        _forget_killed_builds()
        try:
            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, **arguments)
            return optimizer
        except Exception as error:  # of compilers, CUDA and DeepSpeed's own
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    logger.warning(
        "optimizer states on the host with torch's AdamW, whose step takes several times as long as "
        "DeepSpeedCPUAdam's: %s",
        reason,
    )
    return torch.optim.AdamW(parameters, fused=True, **arguments)


def _forget_killed_builds() -> None:
    """Remove the locks of builds that were killed: torch waits for such a file without a limit."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(root).glob("**/cpu_adam/lock"):
        with suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > BUILD_LIMIT_S:
                lock.unlink()
