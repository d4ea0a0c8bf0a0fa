"""State of an FSDP2 engine: shards of weights and optimizer, in torch's distributed checkpoint format.

Metadata is written last and under a name of its own, so a folder with metadata is whole. Beside it lies a
rank's file (engines/checkpoints.py) with step counter and random streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from executor.engines import checkpoints

SHARDS = "shards"


class TrainedShards(checkpoints.Saved, Protocol):
    """What is saved."""

    optimizer: torch.optim.Optimizer | None


def save(trained: TrainedShards, folder: Path) -> None:
    """Write this rank's shards and file, rank 0 also metadata and the copy for users; a collective."""
    save_shards(_state(trained), checkpoint_id=folder / SHARDS)
    checkpoints.write(trained, folder, {})


def load(trained: TrainedShards, folder: Path) -> None:
    """Put the state of `save` back.

    Raises:
        RlhfsimError: no file of a rank, or one of another layout, precision or head.
    """
    if not checkpoints.read_all(trained, folder):
        checkpoints.read(trained, folder)
    reader = FileSystemReader(folder / SHARDS)
    stored = reader.read_metadata().state_dict_metadata
    _make_states(trained, set(stored))
    load_shards(_state(trained), storage_reader=reader)
    dist.barrier()


def _state(trained: TrainedShards) -> dict[str, Any]:
    """Tensors by name, as they lie in memory: loading fills them."""
    named: dict[str, Any] = {f"model.{name}": p.detach() for name, p in trained.model.named_parameters()}
    states: dict[Tensor, Any] = {} if trained.optimizer is None else dict(trained.optimizer.state)
    for name, parameter in trained.model.named_parameters():
        for key, value in states.get(parameter, {}).items():
            named[f"optimizer.{key}.{name}"] = value
    return named


def _make_states(trained: TrainedShards, stored: set[str]) -> None:
    """Optimizer states that a step would make, for those that are stored; none where there are none."""
    if trained.optimizer is None:
        return
    trained.optimizer.state.clear()
    fused = trained.optimizer.defaults["fused"]
    for name, parameter in trained.model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"optimizer.{key}.{name}" not in stored:
                continue
            empty = torch.zeros_like(parameter).detach()
            counter = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
            trained.optimizer.state[parameter][key] = counter if key == "step" else empty
