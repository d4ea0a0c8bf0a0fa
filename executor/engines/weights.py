"""Full weights by Hugging Face name out of a sharded model, a bucket at a time.

Every rank iterates, because shards are gathered with collectives. Legend: a bucket is a list of
(name, tensor), consecutive parameters of about a given number of bytes, so of neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from executor.weight_transfer.packing import Named

Entry = TypeVar("Entry")


def grouped(sizes: Iterable[tuple[Entry, int]], bucket_bytes: int) -> Iterator[list[Entry]]:
    """Entries in order, cut before the one that would make a group larger than `bucket_bytes`."""
    group: list[Entry] = []
    total = 0
    for entry, size in sizes:
        if group and total + size > bucket_bytes:
            yield group
            group, total = [], 0
        group.append(entry)
        total += size
    if group:
        yield group


def names_in_groups(
    named: Mapping[str, Tensor], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[str]]:
    """Names in order, in groups of about `bucket_bytes` of full parameters in `dtype` (None: their own)."""
    return grouped(((name, _full_bytes(p, dtype or p.dtype)) for name, p in named.items()), bucket_bytes)


@contextmanager
def gathered(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[list[Tensor]]:
    """The parameters with all their elements, valid inside; a collective over their data-parallel ranks.

    ZeRO-3 fills the parameters themselves; FSDP2's DTensors are rounded to `dtype` where their shards lie and
    gathered into tensors of their own.
    """
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    context: Any = nullcontext()
    if partitioned:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(partitioned)
    with context, torch.no_grad():
        yield [_full(p, dtype) if isinstance(p, DTensor) else p.detach() for p in parameters]


def buckets(
    named: Mapping[str, Tensor],
    bucket_bytes: int,
    *,
    here: bool,
    dtype: torch.dtype | None = None,
    whole: Callable[[Tensor, Tensor], Tensor] = lambda _, tensor: tensor,
) -> Iterator[list[Named]]:
    """Buckets of full tensors where they are wanted `here`, else empty ones; valid until the next.

    `whole` completes what was gathered over data-parallel ranks only; a collective where it is one.
    """
    for names in names_in_groups(named, bucket_bytes, dtype):
        parameters = [named[name] for name in names]
        with gathered(parameters, dtype) as tensors:
            full = [whole(*pair).contiguous() for pair in zip(parameters, tensors, strict=True)]
            group = list(zip(names, full, strict=True)) if here else []
            yield group
        for held in (group, full, tensors):  # readers still have the list while the next bucket is read
            held.clear()


def _full(parameter: DTensor, dtype: torch.dtype | None) -> Tensor:
    """All elements on the device of the mesh, wherever the shard lies."""
    shard = parameter.detach().to(device=parameter.device_mesh.device_type, dtype=dtype)
    return cast(DTensor, shard).full_tensor()


def _full_bytes(parameter: Tensor, dtype: torch.dtype) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel())) * dtype.itemsize
