"""State of a DeepSpeed engine, written and read back bit for bit, one file a rank.

The file holds what the rank's memory holds: module parameters (ZeRO-3: their partitions), fp32 masters,
optimizer states, step counters and random streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.engines import checkpoints
from executor.engines.deepspeed.resharding import resharded
from executor.engines.protocols import LaterWrites
from executor.engines.transformers.heads import HeadedModel


class Trained(checkpoints.Saved, Protocol):
    """What is saved."""

    engine: Any


def save(trained: Trained, folder: Path, background: LaterWrites | None = None) -> None:
    """Write this rank's file, rank 0 also the copy for users; a collective."""
    state = {
        "module": {name: compact(tensor) for name, tensor in _module_tensors(trained.model)},
        "optimizer": [_optimizer_state(trained.engine, master) for master in masters(trained.engine)],
    }
    checkpoints.write(trained, folder, state, background)


def load(trained: Trained, folder: Path) -> None:
    """Put the state of `save` back.

    Raises:
        RlhfsimError: no file of a rank, or one of another layout, precision or head.
    """
    if states := checkpoints.read_all(trained, folder):
        state = resharded(trained.engine, states, masters(trained.engine))
    else:
        state = checkpoints.read(trained, folder)
    with torch.no_grad():
        for name, tensor in _module_tensors(trained.model):
            tensor.copy_(state["module"][name])
        for master, optimizer_state in zip(masters(trained.engine), state["optimizer"], strict=True):
            _put_optimizer_state(trained.engine, master, optimizer_state)
    _refresh(trained.engine)
    dist.barrier()


def masters(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer inside DeepSpeed updates, in a fixed order.

    They are the parameters themselves, or fp32 copies: flat partitions under ZeRO.
    """
    outer = engine.optimizer
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    ):
        if (groups := getattr(outer, name, None)) is not None:
            return [tensor for group in groups for tensor in (group if isinstance(group, list) else [group])]
    return [tensor for group in engine.basic_optimizer.param_groups for tensor in group["params"]]


def _module_tensors(model: HeadedModel) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of every parameter, and buffers that transformers would save."""
    for name, parameter in model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter.data)
    kept = model.state_dict().keys()
    yield from ((name, buffer.data) for name, buffer in model.named_buffers() if name in kept)


def _optimizer_state(engine: Any, master: Tensor) -> dict[str, Any]:
    states = engine.basic_optimizer.state.get(master, {})
    return {"master": compact(master), "states": {key: compact(value) for key, value in states.items()}}


def compact(value: Any) -> Any:
    """What `torch.save` may be given: it takes storages to the host one at a time, and each whole.

    So a tensor that fills its storage goes as it is; a view of a flat buffer, as a copy on the host.
    """
    if not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value.detach() if isinstance(value, Tensor) else value
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _put_optimizer_state(engine: Any, master: Tensor, saved: Mapping[str, Any]) -> None:
    master.copy_(saved["master"])
    states = engine.basic_optimizer.state[master]
    for key, value in saved["states"].items():
        if isinstance(value, Tensor) and isinstance(states.get(key), Tensor):
            states[key].copy_(value)
        elif isinstance(value, Tensor) and value.shape == master.shape:
            states[key] = value.to(master.device, copy=True)
        else:  # a counter; torch keeps it on the host
            states[key] = value.clone() if isinstance(value, Tensor) else value


def _refresh(engine: Any) -> None:
    """ZeRO-3: parameters that stay gathered are gathered again from the partitions just read."""
    kept = getattr(engine.optimizer, "persistent_parameters", None)
    if kept:
        kept[0].partition(kept)
        kept[0].all_gather(kept)
