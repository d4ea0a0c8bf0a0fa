"""Tensors to flat byte buckets and back, and the checksum of what travelled.

A bucket holds whole tensors laid end to end; only a tensor larger than a bucket is cut over several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from rlhfsim.errors import RlhfsimError

ALIGNMENT = 64
"""Tensors start at multiples of this, so that a view as any dtype is allowed."""

Named = tuple[str, Tensor]


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


def parts_of(header: Mapping[str, Any]) -> list[TensorPart]:
    """What a header, or a file's table, says that lies where."""
    return [TensorPart(*fields) for fields in header["parts"]]


def describe(name: str, tensor: Tensor, at: int = 0) -> TensorPart:
    """A whole tensor as one part."""
    size = tensor.numel() * tensor.element_size()
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


def unpack(buckets: Iterable[Bucket]) -> Iterator[Named]:
    """Tensors of the buckets in order: views of a bucket, or copies where one was cut."""
    unfinished: dict[str, Tensor] = {}
    for bucket in buckets:
        for part in bucket.parts:
            data = bucket.flat[part.at : part.at + part.size]
            if not part.whole:
                empty = torch.empty(part.total, dtype=torch.uint8, device=data.device)
                whole = unfinished.setdefault(part.name, empty)
                whole[part.start : part.start + part.size].copy_(data)
                if part.start + part.size < part.total:
                    continue
                data = unfinished.pop(part.name)
            yield part.name, data.view(getattr(torch, part.dtype)).view(part.shape)
    if unfinished:
        raise RlhfsimError("weight-sync-failed", f"the transfer ended inside of {sorted(unfinished)}")


class Digest:
    """Checksum of names, dtypes, shapes and bytes in the order sent.

    On CPU: BLAKE3 of the bytes. On CUDA the bytes stay on the device; two 64-bit sums of each part, one
    weighted by position, stand for them (they find lost, swapped and changed words, not an adversary).
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        self.hash = blake3()
        self.bytes = 0

    def add(self, bucket: Bucket) -> None:
        """Count a bucket in."""
        for part in bucket.parts:
            if part.start == 0:
                self.hash.update(json.dumps([part.name, part.dtype, part.shape]).encode())
            self.bytes += part.size
            data = bucket.flat[part.at : part.at + part.size]
            self.hash.update(data.numpy().data if self.device == "cpu" else _sums(data))

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Count a whole tensor in."""
        self.add(Bucket(as_bytes(tensor), [describe(name, tensor)]))

    def hex(self) -> str:
        """The checksum."""
        return self.hash.hexdigest()


def _sums(data: Tensor) -> bytes:
    words = (data.view(torch.int32) if data.numel() % 4 == 0 else data).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device)
    return bytes(torch.stack([words.sum(), (words * weights).sum()]).cpu().view(torch.uint8).numpy())
