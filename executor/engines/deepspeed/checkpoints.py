"""Engine state of a rank in one file, written and read back bit for bit; a copy for users in safetensors.

The file holds what the rank's memory holds: module parameters (ZeRO-3: their partitions), fp32 masters,
optimizer states, step counters and random streams. It fits only the same ranks, layout, precision and model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from executor.engines.protocols import EngineSpec
from executor.engines.transformers.heads import HeadedModel
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError

GATHER_BYTES = 256 * 2**20
"""Of one bucket of the copy for users."""
FORMAT = 1


class Trained(Protocol):
    """What is saved."""

    spec: EngineSpec
    model: HeadedModel
    engine: Any
    steps: int

    def buckets(self, bucket_bytes: int) -> Iterator[list[Named]]:
        """Full weights; a collective."""


def save(trained: Trained, folder: Path) -> None:
    """Write this rank's file; rank 0 also model.safetensors and config.json; a collective.

    Files appear under their names only when they are complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "identity": _identity(trained.spec),
        "steps": trained.steps,
        "module": {name: _copy(tensor) for name, tensor in _module_tensors(trained.model)},
        "optimizer": [_optimizer_state(trained.engine, master) for master in masters(trained.engine)],
        "random": _random(),
    }
    path = _path(folder)
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    _export(trained, folder)
    dist.barrier()


def load(trained: Trained, folder: Path) -> None:
    """Put the state of `save` back.

    Raises:
        RlhfsimError: no file for this rank, or one of another number of ranks, layout, precision or head.
    """
    path = _path(folder)
    if not path.is_file():
        raise RlhfsimError(
            "no-checkpoint",
            f"{folder} has no {path.name}: it was not saved by {dist.get_world_size()} ranks",
            help="resume with the layout that saved it, or start from its model.safetensors",
        )
    state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    saved = state["identity"]
    for key, value in _identity(trained.spec).items():
        if saved.get(key) != value:
            raise RlhfsimError(
                "checkpoint-layout",
                f"{path} was saved with {key}={saved.get(key)}, this run has {key}={value}",
                help="resume with the layout that saved it, or start from its model.safetensors",
            )
    trained.steps = state["steps"]
    with torch.no_grad():
        for name, tensor in _module_tensors(trained.model):
            tensor.copy_(state["module"][name])
        for master, optimizer_state in zip(masters(trained.engine), state["optimizer"], strict=True):
            _put_optimizer_state(trained.engine, master, optimizer_state)
    _refresh(trained.engine)
    _put_random(state["random"])
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
        "fp32_groups_flat",
    ):
        if (groups := getattr(outer, name, None)) is not None:
            return [tensor for group in groups for tensor in (group if isinstance(group, list) else [group])]
    return [tensor for group in engine.basic_optimizer.param_groups for tensor in group["params"]]


def _path(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def _identity(spec: EngineSpec) -> dict[str, Any]:
    layout = spec.layout
    return {
        "format": FORMAT,
        "tp": layout.tp,
        "dp": layout.dp,
        "zero": layout.zero,
        "head": spec.head,
        "precision": spec.precision,
        "lora_rank": spec.lora_rank,
    }


def _module_tensors(model: HeadedModel) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of every parameter, and buffers that transformers would save."""
    for name, parameter in model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter.data)
    kept = model.state_dict().keys()
    yield from ((name, buffer.data) for name, buffer in model.named_buffers() if name in kept)


def _optimizer_state(engine: Any, master: Tensor) -> dict[str, Any]:
    states = engine.basic_optimizer.state.get(master, {})
    return {"master": _copy(master), "states": {key: _copy(value) for key, value in states.items()}}


def _copy(value: Any) -> Any:
    """A tensor's own copy on the host: a view of a flat buffer would write the whole buffer."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


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


def _random() -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the stream that libraries draw from
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _put_random(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002  the stream that libraries draw from
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _export(trained: Trained, folder: Path) -> None:
    """A model folder as transformers and vLLM load it, without tokenizer."""
    from safetensors.torch import save_file

    full: dict[str, Tensor] = {}
    for bucket in trained.buckets(GATHER_BYTES):
        full |= {name: tensor.cpu().clone() for name, tensor in bucket}
    if dist.get_rank() == 0:
        save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
        trained.model.config.save_pretrained(folder)
