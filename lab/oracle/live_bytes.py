"""Bytes of the tensors that are alive, followed operation by operation.

Every storage that an operation returns counts from there until it is freed. What a kernel allocates and
frees inside itself is not seen by a dispatcher; `WORKSPACE` adds what the CUDA kernels are known to take.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WORKSPACE: Mapping[Any, Callable[..., int]] = {
    # sum(exp(x - max)): one tensor of the shape of x (aten/src/ATen/native/ReduceOps.cpp, logsumexp)
    torch.ops.aten.logsumexp.default: lambda x, *_: x.untyped_storage().nbytes()
}


def _accumulates() -> bool:
    """Whether autograd adds two gradients of one tensor.

    It does so in place, but never under a dispatcher such as this one (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace), so what it would do is done here. Recomputation runs with gradients enabled.
    """
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


class LiveBytes(TorchDispatchMode):
    """Counts bytes from the moment it is entered; what stood before counts once it is given to `follow`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.names: Counter[str] = Counter()
        """Live bytes by the operation that made them, or by the name given to `follow`."""
        self.at_peak: Counter[str] = Counter()
        """`names` at the peak."""
        self._known: set[int] = set()

    def follow(self, tensors: Iterable[Tensor], name: str) -> None:
        """Count tensors that exist."""
        for tensor in tensors:
            self._add(tensor, name)

    def reset(self) -> int:
        """Forget the peak; the bytes that are alive."""
        self.peak, self.at_peak = self.live, self.names.copy()
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        if func is torch.ops.aten.add.Tensor and _accumulates():
            func = torch.ops.aten.add_.Tensor
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, name)
        if func in WORKSPACE:
            self._mark(WORKSPACE[func](*args), name)
        return result

    def _add(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        weakref.finalize(storage, self._freed, key, size, name)
        self.live += size
        self.names[name] += size
        self._mark(0, name)

    def _mark(self, workspace: int, name: str) -> None:
        if self.live + workspace > self.peak:
            self.peak = self.live + workspace
            self.at_peak = self.names.copy()
            self.at_peak[f"{name} workspace"] += workspace

    def _freed(self, key: int, size: int, name: str) -> None:
        self._known.discard(key)
        self.live -= size
        self.names[name] -= size
