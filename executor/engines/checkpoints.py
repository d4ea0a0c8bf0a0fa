"""The file that a rank writes into a checkpoint, its random streams, and a copy for users in safetensors.

It fits only the same ranks, layout, precision and model.
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


class Saved(Protocol):
    """What is saved."""

    spec: EngineSpec
    model: HeadedModel
    steps: int

    def buckets(self, bucket_bytes: int) -> Iterator[list[Named]]:
        """Full weights; a collective."""


def write(saved: Saved, folder: Path, state: Mapping[str, Any]) -> None:
    """This rank's file with `state`; rank 0 also model.safetensors and config.json; a collective.

    Files appear under their names only when they are complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {"identity": _identity(saved.spec), "steps": saved.steps, "random": _random()}
    path = _path(folder)
    torch.save({**common, **state}, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    _export(saved, folder)
    dist.barrier()


def read(saved: Saved, folder: Path) -> dict[str, Any]:
    """This rank's file; its steps and random streams are put back.

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
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    before = state["identity"]
    for key, value in _identity(saved.spec).items():
        if before.get(key) != value:
            raise RlhfsimError(
                "checkpoint-layout",
                f"{path} was saved with {key}={before.get(key)}, this run has {key}={value}",
                help="resume with the layout that saved it, or start from its model.safetensors",
            )
    saved.steps = state["steps"]
    _put_random(state["random"])
    return state


def _path(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def _identity(spec: EngineSpec) -> dict[str, Any]:
    layout = spec.layout
    return {
        "format": FORMAT,
        "backend": spec.backend,
        "tp": layout.tp,
        "dp": layout.dp,
        "zero": layout.zero,
        "head": spec.head,
        "precision": spec.precision,
        "lora_rank": spec.lora_rank,
    }


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


def _export(saved: Saved, folder: Path) -> None:
    """A model folder as transformers and vLLM load it, without tokenizer."""
    from safetensors.torch import save_file

    full: dict[str, Tensor] = {}
    for bucket in saved.buckets(GATHER_BYTES):
        full |= {name: tensor.cpu().clone() for name, tensor in bucket}
    if dist.get_rank() == 0:
        save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
        saved.model.config.save_pretrained(folder)
