"""Tensors to flat byte buckets and back, and the checksum of what travelled.

A bucket holds whole tensors laid end to end; only a tensor larger than a bucket is cut over several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor

from rlhfsim.errors import RlhfsimError

ALIGNMENT = 64
"""Tensors start at multiples of this, so that a view as any dtype is allowed."""

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where (a part of) a tensor lies in a bucket or file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    total: int
    """Bytes of the whole tensor."""
    start: int
    """First byte of the tensor that this piece holds."""
    size: int
    """Bytes of this piece."""
    at: int
    """Its first byte in the bucket."""

    @property
    def whole(self) -> bool:
        """Whether the tensor is in one piece."""
        return self.size == self.total


@dataclass(slots=True)
class Bucket:
    """A filled buffer and what lies in it."""

    flat: Tensor
    """(bytes,) uint8."""
    pieces: list[Piece]

    def header(self) -> dict[str, Any]:
        """JSON form, without the bytes."""
        return header_of(self.pieces, self.flat.numel())


def header_of(pieces: Iterable[Piece], size: int) -> dict[str, Any]:
    """JSON form of a table of pieces in `size` bytes."""
    return {"bytes": size, "pieces": [list(asdict(piece).values()) for piece in pieces]}


def pieces_of(header: dict[str, Any]) -> list[Piece]:
    """Undo `header_of`."""
    return [
        Piece(name=name, dtype=dtype, shape=tuple(shape), total=total, start=start, size=size, at=at)
        for name, dtype, shape, total, start, size, at in header["pieces"]
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, (bytes,) uint8; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def describe(name: str, tensor: Tensor, at: int) -> Piece:
    """A whole tensor as one piece."""
    size = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Piece(name=name, dtype=dtype, shape=tuple(tensor.shape), total=size, start=0, size=size, at=at)


def aligned(size: int) -> int:
    """`size` rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(tensors: Iterable[Named], capacity: int, buffer: Callable[[int], Tensor]) -> Iterator[Bucket]:
    """Fill buckets of `capacity` bytes; `buffer(i)` gives the i-th one once it is free to write."""
    number, used, pieces = 0, 0, list[Piece]()
    flat = buffer(0)
    for name, tensor in tensors:
        whole, source = describe(name, tensor, 0), as_bytes(tensor)
        start = 0
        while start < whole.total or (whole.total == 0 and start == 0):
            rest, room = whole.total - start, capacity - used
            if used and (room < min(rest, capacity) or room <= 0):
                yield Bucket(flat[:used], pieces)
                number, used, pieces = number + 1, 0, []
                flat, room = buffer(number), capacity
            size = min(rest, room)
            flat[used : used + size].copy_(source[start : start + size])
            pieces.append(_part(whole, start, size, used))
            used, start = min(aligned(used + size), capacity), start + max(size, 1)
    if pieces:
        yield Bucket(flat[:used], pieces)


def _part(whole: Piece, start: int, size: int, at: int) -> Piece:
    return Piece(
        name=whole.name,
        dtype=whole.dtype,
        shape=whole.shape,
        total=whole.total,
        start=start,
        size=size,
        at=at,
    )


def unpack(buckets: Iterable[Bucket]) -> Iterator[Named]:
    """Tensors of the buckets in order: views of a bucket, or copies where one was cut."""
    parts: dict[str, Tensor] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            data = bucket.flat[piece.at : piece.at + piece.size]
            if not piece.whole:
                whole = parts.setdefault(
                    piece.name, torch.empty(piece.total, dtype=torch.uint8, device=data.device)
                )
                whole[piece.start : piece.start + piece.size].copy_(data)
                if piece.start + piece.size < piece.total:
                    continue
                data = parts.pop(piece.name)
            yield piece.name, data.view(getattr(torch, piece.dtype)).view(piece.shape)
    if parts:
        raise RlhfsimError("weight-sync-failed", f"the transfer ended inside of {sorted(parts)}")


class Digest:
    """Checksum of names, dtypes, shapes and bytes in the order sent.

    On CPU: BLAKE3 of the bytes. On CUDA the bytes stay on the device; two 64-bit sums of each piece, one weighted
    by position, stand for them (they find lost, swapped and changed words, not an adversary).
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        self.hash = blake3()
        self.bytes = 0

    def add(self, bucket: Bucket) -> None:
        """Count a bucket in."""
        for piece in bucket.pieces:
            if piece.start == 0:
                self.hash.update(json.dumps([piece.name, piece.dtype, piece.shape]).encode())
            self.bytes += piece.size
            data = bucket.flat[piece.at : piece.at + piece.size]
            self.hash.update(data.numpy().data if self.device == "cpu" else _sums(data))

    def hex(self) -> str:
        """The checksum."""
        return self.hash.hexdigest()


def _sums(data: Tensor) -> bytes:
    words = (data.view(torch.int32) if data.numel() % 4 == 0 else data).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device)
    return bytes(torch.stack([words.sum(), (words * weights).sum()]).cpu().view(torch.uint8).numpy())
