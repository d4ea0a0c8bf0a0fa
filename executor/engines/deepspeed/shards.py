"""A model of which no rank holds all: ZeRO-3 partitions and AutoTP shards are read, shards are gathered."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import deepspeed
from torch import Tensor, nn

from executor.engines.transformers.heads import HeadedModel
from executor.engines.transformers.shards import EmptyParameters, give_storage
from rlhfsim.errors import RlhfsimError


def partition(model: HeadedModel, unread: EmptyParameters, config: dict[str, Any]) -> None:
    """Make each unread parameter a ZeRO-3 partition and read that; one parameter has storage at a time.

    What has values already (a drawn head, adapters) DeepSpeed partitions when its engine starts.
    """
    dtype = next(model.parameters()).dtype
    zero: Any = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=dict(config), dtype=dtype)
    for name, parameter in unread.parameters(model):
        give_storage(parameter, zero.local_device)
        # what zero.Init(module=...) does before it broadcasts the whole parameter from rank 0
        zero._convert_to_deepspeed_param(parameter)
        ours: Any = parameter
        size = ours.aligned_size() // ours.ds_zero_partition_world_size
        start = ours.ds_zero_partition_rank * size
        unread.files.read_flat(name, ours.data.view(-1)[start : start + size], start)
        ours.partition()
    for buffer in model.buffers():  # DeepSpeed takes them to be where zero.Init built the module
        buffer.data = buffer.data.to(zero.local_device)


def read(model: HeadedModel, unread: EmptyParameters) -> None:
    """Fill each unread parameter: of those that AutoTP split, this rank's shard."""
    split = split_parameters(model)
    for name, parameter in unread.parameters(model):
        cut = split.get(id(parameter))
        dim, start = (cut.dim, cut.start) if cut else (0, 0)
        unread.files.read(name, parameter.data, dim=dim, start=start)


def give_all_storage(model: HeadedModel, unread: EmptyParameters) -> None:
    """Storage on the host that nobody writes, so that it takes no memory, for DeepSpeed to cut."""
    for _, parameter in unread.parameters(model):
        give_storage(parameter, "cpu")


class SplitParameter(NamedTuple):
    """How AutoTP split one parameter."""

    layer: Any
    dim: int
    """0 in a column-parallel layer, 1 in a row-parallel one."""

    @property
    def start(self) -> int:
        """Start of this rank's shard along `dim`."""
        return int(sum(self.layer._partition_sizes[: self.layer.tp_index]))

    def gather(self, shard: Tensor) -> Tensor:
        """The full parameter; a collective over the tensor-parallel group."""
        # DeepSpeed's public GatherReplacedLayerParams replaces param.data, which ZeRO needs as a view of its
        # flat buffer; its gather alone leaves the parameter as it is
        full = self.layer._all_gather_shards(shard, self.layer._partition_sizes, dim=self.dim)
        return cast(Tensor, full)


def split_parameters(module: nn.Module) -> dict[int, SplitParameter]:
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
