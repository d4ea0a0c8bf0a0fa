"""Tensors to flat byte buckets and back, and the checksum of what travelled.

A bucket holds whole tensors laid end to end; only a tensor larger than a bucket is cut over several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from rlhfsim.errors import RlhfsimError

ALIGNMENT = 64
"""Tensors start at multiples of this, so that a view as any dtype is allowed."""

ROW_BYTES = 32768
"""Bytes in a row of the matrix whose rows and columns are summed."""

Named = tuple[str, Tensor]
Load = Callable[[Sequence[Named]], None]
"""What a receiver gives weights to, by Hugging Face name, some at a time in the order sent."""


class TensorPart(NamedTuple):
    """Where (a part of) a tensor lies in a bucket or file; JSON keeps it as a list."""

    name: str
    dtype: str
    shape: Sequence[int]
    total: int
    """Bytes of the whole tensor."""
    start: int
    """First byte of the tensor that this part holds."""
    size: int
    """Bytes of this part."""
    at: int
    """Its first byte in the bucket."""

    @property
    def whole(self) -> bool:
        """Whether the tensor is in one part."""
        return self.size == self.total


@dataclass(slots=True)
class Bucket:
    """A filled buffer and what lies in it."""

    flat: Tensor
    """(bytes,) uint8."""
    parts: list[TensorPart]

    def header(self) -> dict[str, Any]:
        """JSON form, without the bytes."""
        return {"bytes": self.flat.numel(), "parts": self.parts}


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, (bytes,) uint8; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def num_bytes(tensors: Iterable[Named]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.nbytes for _, tensor in tensors)


def parts_of(bucket: Iterable[Sequence[Any]]) -> list[TensorPart]:
    """What a header, or a file's table, says that lies where in a bucket."""
    return [TensorPart(*fields) for fields in bucket]


def describe(name: str, tensor: Tensor, at: int = 0) -> TensorPart:
    """A whole tensor as one part."""
    size = tensor.nbytes
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorPart(name, dtype, tuple(tensor.shape), total=size, start=0, size=size, at=at)


def aligned(size: int) -> int:
    """`size` rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(tensors: Iterable[Named], capacity: int, buffer: Callable[[int], Tensor]) -> Iterator[Bucket]:
    """Fill buckets of `capacity` bytes; `buffer(i)` gives the i-th one once it is free to write."""
    number, used, parts = 0, 0, list[TensorPart]()
    flat = buffer(0)
    for name, tensor in tensors:
        whole, source = describe(name, tensor), as_bytes(tensor)
        start = 0
        while start < whole.total or (whole.total == 0 and start == 0):
            rest, room = whole.total - start, capacity - used
            if used and (room < min(rest, capacity) or room <= 0):
                yield Bucket(flat[:used], parts)
                number, used, parts = number + 1, 0, []
                flat, room = buffer(number), capacity
            size = min(rest, room)
            flat[used : used + size].copy_(source[start : start + size])
            parts.append(whole._replace(start=start, size=size, at=used))
            used, start = min(aligned(used + size), capacity), start + max(size, 1)
    if parts:
        yield Bucket(flat[:used], parts)


def unpack(buckets: Iterable[Bucket]) -> Iterator[list[Named]]:
    """Tensors of each bucket in order: views of it, or copies where one was cut."""
    unfinished: dict[str, Tensor] = {}
    for bucket in buckets:
        tensors = list[Named]()
        for part in bucket.parts:
            data = bucket.flat[part.at : part.at + part.size]
            if not part.whole:
                whole = unfinished.setdefault(part.name, torch.empty(part.total, dtype=torch.uint8))
                whole[part.start : part.start + part.size].copy_(data)
                if part.start + part.size < part.total:
                    continue
                data = unfinished.pop(part.name)
            tensors.append((part.name, data.view(getattr(torch, part.dtype)).view(part.shape)))
        yield tensors
    if unfinished:
        raise RlhfsimError("weight-sync-failed", f"the transfer ended inside of {sorted(unfinished)}")


class Digest:
    """Checksum of names, dtypes, shapes and bytes in the order sent.

    In host memory: BLAKE3 of the bytes (6.8 GB/s on one core with AVX-512). On a GPU the bytes stay there and
    64-bit sums represent them: of rows and of columns, so lost, swapped and changed words are found, not an
    adversary. Both ends must see the bytes in the same kind of memory.
    """

    def __init__(self) -> None:
        self.hash = blake3()

    def add(self, name: str, tensor: Tensor) -> None:
        """Count a whole tensor in."""
        part, data = describe(name, tensor), as_bytes(tensor)
        self.hash.update(json.dumps([part.name, part.dtype, part.shape]).encode())
        self.hash.update(data.numpy().data if data.device.type == "cpu" else sums(data))

    def hex(self) -> str:
        """The checksum."""
        return self.hash.hexdigest()


def sums(data: Tensor) -> bytes:
    """Sums of the columns and rows of (bytes,) uint8 as a matrix of 64-bit words, then its last bytes."""
    data = data.clone() if data.storage_offset() % 8 else data
    size = data.numel() // ROW_BYTES * ROW_BYTES
    words = data[:size].view(torch.int64).view(-1, ROW_BYTES // 8)
    parts = [words.sum(0), words.sum(1), data[size:].to(torch.int64)]
    return bytes(torch.cat(parts).cpu().view(torch.uint8).numpy())


@dataclass(eq=False)
class GatheredWeights:
    """The trainer's weights, gathered anew for every pass (a collective of its ranks), and their checksum.

    Iterating gives buckets, lists of (name, tensor).
    """

    gather: Callable[[], Iterator[list[Named]]]
    on_host: bool = False
    """Whether they travel through host memory, in which they are then counted."""
    digest: Digest = field(default_factory=Digest)
    """Digest of the latest pass."""
    reduce: Callable[[Sequence[Named]], list[Named]] | None = None
    """What travels in place of some whole tensors; None: they do."""
    sent_bytes: int = 0
    """Bytes of the latest pass that travel."""
    _buckets: Iterator[list[Named]] | None = None

    def __iter__(self) -> Iterator[list[Named]]:
        self.digest, self.sent_bytes, self._buckets = Digest(), 0, self.gather()
        for bucket in self._buckets:
            sent = [(name, tensor.cpu()) for name, tensor in bucket] if self.on_host else bucket
            for name, tensor in sent:
                self.digest.add(name, tensor)
            parts = self.reduce(sent) if self.reduce else sent
            self.sent_bytes += num_bytes(parts)
            yield parts

    def exhaust(self) -> None:
        """Gather to the end and send nothing: other ranks wait in the collective."""
        if self._buckets is None:
            self._buckets = self.gather()
        with suppress(ValueError):  # a transfer that hangs in a thread of its own is inside of it
            for _ in self._buckets:
                pass
