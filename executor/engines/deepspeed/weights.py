"""Full weights by Hugging Face name out of a sharded model, a bucket at a time.

Every rank iterates, because ZeRO-3 and AutoTP gather with collectives. Legend: a bucket is a list of
(name, tensor), consecutive parameters of about a given number of bytes, so of neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfsim.errors import RlhfsimError

Bucket = list[tuple[str, Tensor]]


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Inside, ZeRO-3 parameters hold all their elements; a collective over their data-parallel ranks."""
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return cast(AbstractContextManager[Any], deepspeed.zero.GatheredParameters(partitioned))


def grouped(named: Mapping[str, nn.Parameter], bucket_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut before the parameter that would make a group larger than `bucket_bytes`."""
    names: list[str] = []
    size = 0
    for name, parameter in named.items():
        more = _elements(parameter) * parameter.element_size()
        if names and size + more > bucket_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    if names:
        yield names


def buckets(
    named: Mapping[str, nn.Parameter], shards: Mapping[int, Shard], bucket_bytes: int, *, first: bool
) -> Iterator[Bucket]:
    """Buckets of full tensors on the rank that is `first`, empty ones elsewhere; valid until the next."""
    for names in grouped(named, bucket_bytes):
        with gathered([named[name] for name in names]), torch.no_grad():
            full = [(name, _whole(named[name], shards)) for name in names]
            yield full if first else []


class Shard:
    """How AutoTP split one parameter."""

    __slots__ = ("dim", "layer")

    def __init__(self, layer: Any, dim: int) -> None:
        """Dim 0 of a column-parallel layer, 1 of a row-parallel one."""
        self.layer, self.dim = layer, dim

    def gather(self, shard: Tensor) -> Tensor:
        """The full parameter; a collective over the tensor-parallel group."""
        # DeepSpeed's public GatherReplacedLayerParams replaces param.data, which ZeRO needs as a view of its
        # flat buffer; its gather alone leaves the parameter as it is
        full = self.layer._all_gather_shards(shard, self.layer._partition_sizes, dim=self.dim)
        return cast(Tensor, full).contiguous()


def shards(module: nn.Module) -> dict[int, Shard]:
    """Split parameters of a module by id; empty without AutoTP.

    Raises:
        RlhfsimError: a fused layer, which AutoTP splits in a way of its own.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer

    found: dict[int, Shard] = {}
    for name, layer in module.named_modules():
        if type(layer) is LinearLayer:
            found |= {id(p): Shard(layer, 0) for p in (layer.weight, layer.bias) if p is not None}
        elif type(layer) is LinearAllreduce:
            found[id(layer.weight)] = Shard(layer, 1)
        elif isinstance(layer, TensorParallel_Layer):
            raise RlhfsimError(
                "autotp-layer",
                f"tensor parallelism of {type(layer).__name__} ({name}) is not gathered here",
                help="use tp: 1 for this model",
            )
    return found


def _elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _whole(parameter: nn.Parameter, shards: Mapping[int, Shard]) -> Tensor:
    tensor = parameter.detach()
    shard = shards.get(id(parameter))
    return shard.gather(tensor) if shard else tensor.contiguous()
