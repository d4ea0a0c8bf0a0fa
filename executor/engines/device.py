"""The accelerator of this process by torch's device-agnostic interface; the one module that names torch.cuda.

`torch.accelerator` has streams, memory and synchronisation, `torch.get_device_module` the rest. CUDA alone is
asked why it cannot be used, for then there is no accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def available() -> bool:
    """Whether this process computes on a GPU."""
    return torch.accelerator.is_available()


def own() -> torch.device:
    """The GPU of this process, else the CPU."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not available():
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def use(index: int) -> torch.device:
    """Make a GPU the one of this thread."""
    torch.accelerator.set_device_index(index)
    return own()


def settle() -> None:
    """Wait for what the GPU was given; without one there is nothing to wait for."""
    if available():
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give freed blocks back to the driver."""
    if available():
        torch.accelerator.empty_cache()


def keep_for_stream(tensor: Tensor) -> None:
    """The allocator reuses the tensor's memory only after what the current stream does with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream())


def random_state() -> Tensor | None:
    """State of the GPU's random generator; None without a GPU."""
    return _module().get_rng_state() if available() else None


def put_random_state(state: Tensor | None) -> None:
    """Undo `random_state`; nothing without a GPU."""
    if state is not None and available():
        _module().set_rng_state(state)


def name() -> str:
    """The first GPU in the driver's words."""
    return str(_module().get_device_name(0))


def total_bytes() -> float:
    """Memory of the first GPU."""
    return float(torch.accelerator.get_memory_info(0)[1])


def why_not() -> str:
    """Why torch cannot use a GPU, in its words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split(". ")[0]
    return "it finds no device"


def _module() -> Any:
    return torch.get_device_module(own())
