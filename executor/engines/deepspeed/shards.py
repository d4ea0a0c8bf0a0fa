"""Reading a model so that no rank ever holds it whole: ZeRO-3 partitions, AutoTP shards."""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import nn

from executor.engines.deepspeed.split import split_parameters
from executor.engines.transformers.heads import HeadedModel
from executor.engines.transformers.shards import EmptyParameters, give_storage


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
