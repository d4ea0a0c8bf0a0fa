"""Full weights by Hugging Face name out of a sharded model, a bucket at a time.

Every rank iterates, because ZeRO-3 and AutoTP gather with collectives. Legend: a bucket is a list of
(name, tensor), consecutive parameters of about a given number of bytes, so of neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError

Entry = TypeVar("Entry")


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Inside, ZeRO-3 parameters hold all their elements; a collective over their data-parallel ranks."""
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return cast(AbstractContextManager[Any], deepspeed.zero.GatheredParameters(partitioned))


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


def names_in_groups(named: Mapping[str, nn.Parameter], bucket_bytes: int) -> Iterator[list[str]]:
    """Names in order, in groups of about `bucket_bytes` of full parameters."""
    return grouped(((name, _full_bytes(parameter)) for name, parameter in named.items()), bucket_bytes)


def buckets(
    named: Mapping[str, nn.Parameter], shards: Mapping[int, SplitParameter], bucket_bytes: int, *, first: bool
) -> Iterator[list[Named]]:
    """Buckets of full tensors on the rank that is `first`, empty ones elsewhere; valid until the next."""
    for names in names_in_groups(named, bucket_bytes):
        with gathered([named[name] for name in names]), torch.no_grad():
            full = [(name, _whole(named[name], shards)) for name in names]
            yield full if first else []


class SplitParameter(NamedTuple):
    """How AutoTP split one parameter."""

    layer: Any
    dim: int
    """0 in a column-parallel layer, 1 in a row-parallel one."""

    def gather(self, shard: Tensor) -> Tensor:
        """The full parameter; a collective over the tensor-parallel group."""
        # DeepSpeed's public GatherReplacedLayerParams replaces param.data, which ZeRO needs as a view of its
        # flat buffer; its gather alone leaves the parameter as it is
        full = self.layer._all_gather_shards(shard, self.layer._partition_sizes, dim=self.dim)
        return cast(Tensor, full).contiguous()


def shards(module: nn.Module) -> dict[int, SplitParameter]:
    """Split parameters of a module by id; empty without AutoTP.

    Raises:
        RlhfsimError: a fused layer, which AutoTP splits in a way of its own.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer

    split: dict[int, SplitParameter] = {}
    for name, layer in module.named_modules():
        if type(layer) is LinearLayer:
            split |= {id(p): SplitParameter(layer, 0) for p in (layer.weight, layer.bias) if p is not None}
        elif type(layer) is LinearAllreduce:
            split[id(layer.weight)] = SplitParameter(layer, 1)
        elif isinstance(layer, TensorParallel_Layer):
            raise RlhfsimError(
                "autotp-layer",
                f"tensor parallelism of {type(layer).__name__} ({name}) is not gathered here",
                help="use tp: 1 for this model",
            )
    return split


def _full_bytes(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()


def _whole(parameter: nn.Parameter, shards: Mapping[int, SplitParameter]) -> Tensor:
    tensor = parameter.detach()
    shard = shards.get(id(parameter))
    return shard.gather(tensor) if shard else tensor.contiguous()
