"""Parameters that AutoTP split over tensor-parallel ranks, and their gathering."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from rlhfsim.errors import RlhfsimError


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
