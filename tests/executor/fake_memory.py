"""GPU memory that counts and runs out: the storages of real tensors laid out in one piece of so many bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIGNMENT = 512
"""Bytes, as torch's allocator rounds."""


class CountedMemory(TorchDispatchMode):
    """Every storage that an operation makes gets the first hole that holds it, until its tensors are gone."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.taken: dict[int, tuple[int, int]] = {}
        """Key of a storage -> first byte, bytes."""
        self.top = 0
        """Bytes below the end of the highest storage so far."""
        self._keys = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                self._take(tensor.untyped_storage())
        return made

    def _take(self, storage: torch.UntypedStorage) -> None:
        size = -(-max(1, storage.nbytes()) // ALIGNMENT) * ALIGNMENT
        at = 0
        for start, length in sorted(self.taken.values()):
            if start - at >= size:
                break
            at = max(at, start + length)
        if at + size > self.capacity:
            raise torch.OutOfMemoryError(self._words(size))
        self._keys += 1
        key = self._keys
        self.taken[key] = (at, size)
        self.top = max(self.top, at + size)
        weakref.finalize(storage, self.taken.pop, key, None)

    def _words(self, size: int) -> str:
        """As torch 2.13 says it, with KiB for its GiB."""
        used = sum(length for _, length in self.taken.values())
        free, total = (self.capacity - used) / 1024, self.capacity / 1024
        return (
            f"CUDA out of memory. Tried to allocate {size / 1024:.2f} KiB. GPU 0 has a total capacity of {total:.2f} "
            "KiB of which 0.00 KiB is free. Including non-PyTorch memory, this process has "
            f"{total:.2f} KiB memory in use. Of the allocated memory {used / 1024:.2f} KiB is allocated by "
            f"PyTorch, and {free:.2f} KiB is reserved by PyTorch but unallocated. If reserved but unallocated "
            "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )
