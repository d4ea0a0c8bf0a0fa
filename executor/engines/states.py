"""Every tensor that makes up an engine, and moving their storages out of memory and back.

DeepSpeed keeps parameters as views of flat buffers and hands them around in many places. Emptying and
refilling the STORAGES leaves all of these views as they are, so one mechanism serves every ZeRO stage,
engines without optimizer, CPU and GPU, and what comes back is the same bytes in the same objects.
(DeepSpeed's own offload_states covers neither engines without optimizer nor files.)
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.engines import device
from executor.engines.scoring import ForwardPasses, trim
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import GIB

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**30
"""Bytes of pinned memory at a time: torch rounds each allocation up to a power of two."""


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 shards; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters (ZeRO-3: their partitions too), gradients and buffers of a module."""
    for parameter in module.parameters():
        yield own_part(parameter.data)
        for name in ("ds_tensor", "ds_secondary_tensor"):
            if isinstance(partition := getattr(parameter, name, None), Tensor):
                yield partition
        if parameter.grad is not None:
            yield own_part(parameter.grad)
    yield from (buffer.data for buffer in module.buffers())


def nested_tensors(value: Any, depth: int = 7) -> Iterator[Tensor]:
    """Tensors inside lists, tuples and dicts (also as keys: optimizer states are keyed by parameter)."""
    if isinstance(value, Tensor):
        yield own_part(value.data)
        if value.is_leaf and value.grad is not None:
            yield own_part(value.grad)
    elif depth > 0 and isinstance(value, dict | list | tuple | set):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from nested_tensors(item, depth - 1)


class HostMemory:
    """Pinned host memory for the storages of an engine: allocated once, used again by every move."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    def pieces(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """(bytes of a storage, host bytes that keep them), the same for storages of the same sizes."""
        left = sum(storage.nbytes() for storage in storages)
        number = offset = 0
        for storage in storages:
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(data):
                if number == len(self.chunks):
                    size = min(CHUNK_BYTES, left)
                    self.chunks.append(_pinned(size))
                kept = self.chunks[number][offset : offset + len(data)]
                yield data[: len(kept)], kept
                data, offset, left = data[len(kept) :], offset + len(kept), left - len(kept)
                if offset == len(self.chunks[number]):
                    number, offset = number + 1, 0


def _pinned(size: int) -> Tensor:
    """Host bytes that a GPU copies while the host goes on; without a GPU any.

    Raises:
        RlhfsimError: they are not pinned, so that a copy could be read before it has arrived.
    """
    on_gpu, reason = device.available(), "the system gave other memory"
    try:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        if not on_gpu or memory.is_pinned():
            return memory
    except RuntimeError as error:  # CUDA calls it out of memory, and the GPU's is not meant
        reason = str(error).splitlines()[0].replace("out of memory", "no more of it")
    raise RlhfsimError(
        "host-memory-not-pinned",
        f"{size / GIB:.1f} GiB of host memory is not pinned: {reason}",
        help="rlhfsim check-machine shows limits and free host memory; or design without offload",
    )


class Storages:
    """The storages behind some tensors, out of memory until `restore`.

    Device storages are emptied. Host storages keep their addresses (NumPy arrays may share them) and give
    their pages back to the system.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        folder: Path | None = None,
        but: Storages | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Copy each storage once, to a file in `folder` or to `host`, and free it; not those of `but`.

        On a CPU without a folder there is nowhere to go, and nothing moves.
        """
        gone = {storage.data_ptr() for storage in but._storages} if but else set()
        unique: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            kind = storage.device.type
            moves = kind != "meta" and (kind != "cpu" or folder is not None)
            if moves and storage.nbytes() and storage.data_ptr() not in gone:
                unique.setdefault(storage.data_ptr(), storage)
        self._storages: list[torch.UntypedStorage] = list(unique.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._file = folder / f"offload-{os.getpid()}-{uuid4().hex}.bin" if folder else None
        self._host = host or HostMemory()
        self._write()
        for storage in self._storages:
            _free(storage)
        trim()

    def restore(self) -> None:
        """Allocate the storages again and fill them with what they held."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.device.type != "cpu":
                storage.resize_(size)
        self._read()
        self._storages, self._sizes = [], []

    def drop(self) -> None:
        """Forget what was moved: the engine ends while it is away."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._file is None:
            for data, kept in self._host.pieces(self._storages):
                kept.copy_(data, non_blocking=True)
            device.settle()
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("wb") as file:
            for storage in self._storages:
                host = storage.cpu()  # of a GPU a copy, which must outlive the view of its bytes
                file.write(_memory(host))

    def _read(self) -> None:
        if self._file is None:
            for data, kept in self._host.pieces(self._storages):
                data.copy_(kept, non_blocking=True)
            device.settle()
            return
        with self._file.open("rb") as file:
            for storage in self._storages:
                on_host = storage.device.type == "cpu"
                host = storage if on_host else torch.UntypedStorage(storage.nbytes())
                read = file.readinto(_memory(host))
                assert read == storage.nbytes(), "the offload file is shorter than the storage"
                if not on_host:
                    storage.copy_(host)
        self._file.unlink()


class Movable(ForwardPasses, ABC):
    """An engine whose storages leave memory and come back: its states, and with them its weights."""

    _states: Storages | None = None
    _weights: Storages | None = None
    _hosts: tuple[HostMemory, HostMemory] | None = None
    """Host memory of states and weights, reused from move to move."""

    @abstractmethod
    def _movable(self, *, weights: bool) -> Iterable[Tensor]:
        """All tensors of the engine, or all but the weights."""

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """All states, or all but the weights, to host memory, or to files in `folder`."""
        assert (self._weights if weights else self._states) is None, "already offloaded"
        self._hosts = self._hosts or (HostMemory(), HostMemory())
        states, rest = self._hosts
        self._states = self._states or Storages(self._movable(weights=False), folder, host=states)
        if weights:
            self._weights = Storages(self._movable(weights=True), folder, self._states, rest)

    def reload(self, *, states: bool = True) -> None:
        """Undo `offload`; without `states` only of the weights: enough for forward passes."""
        assert self._states is not None, "not offloaded"
        if self._weights is not None:
            self._weights.restore()
            self._weights = None
        if states:
            self._states.restore()
            self._states = None

    def save_and_compare(self, path: Path, limit: int) -> int:
        """The beginning of every tensor, `limit` bytes in all, to a file and back; how many bytes that was.

        Raises:
            RlhfsimError: other bytes came back.
        """
        tensors = [t.detach() for t in self._movable(weights=True) if t.is_contiguous() and t.numel()]
        share = limit // max(1, len(tensors))
        parts = [t.view(-1)[: share // t.element_size()].cpu() for t in tensors]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([part.clone() for part in parts], path)
        back: list[Tensor] = torch.load(path, weights_only=True)
        path.unlink()
        if any(
            not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(parts, back, strict=True)
        ):
            raise RlhfsimError(
                "storage-changes-bytes",
                f"states that were written to {path.parent} came back as other bytes",
                help="try the folder of the run on another file system",
            )
        return sum(part.nbytes for part in parts)

    def close(self) -> None:
        """Free everything; what is away stays away, and its files are gone."""
        for away in (self._weights, self._states):
            if away is not None:
                away.drop()
        self._weights = self._states = self._hosts = None
        del self.model, self.module
        trim()


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a host storage. (A NumPy view would mark the storage as shared for good.)"""
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def _free(storage: torch.UntypedStorage) -> None:
    """Empty a device storage; drop the whole pages of a host storage, which then read as zeros."""
    if storage.device.type != "cpu":
        storage.resize_(0)
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
        if failed:
            logger.warning("madvise: %s; memory stays", os.strerror(ctypes.get_errno()))


def engine_tensors(engine: Any, *, weights: bool = True) -> Iterator[Tensor]:
    """Tensors of a DeepSpeed engine: module, ZeRO optimizer with its buffers, and the optimizer inside it.

    The buckets in which ZeRO sums gradients live from step to step, each in an object of its own.

    Without `weights` those that share no storage with the module.
    """
    kept = set()
    if weights:
        yield from module_tensors(engine.module)
    else:
        kept = {tensor.untyped_storage().data_ptr() for tensor in module_tensors(engine.module)}
    for optimizer in (engine.optimizer, getattr(engine, "basic_optimizer", None)):
        if optimizer is not None:
            buckets = [vars(bucket) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
            states = [dict(vars(optimizer)), dict(getattr(optimizer, "state", {})), buckets]
            yield from (t for t in nested_tensors(states) if t.untyped_storage().data_ptr() not in kept)
