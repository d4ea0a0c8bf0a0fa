"""DeepSpeed's process groups: module variables, one set a process.

Roles that share a process have layouts and pipelines of their own, so each engine puts its set in place
before it does anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.runtime import compiler
from deepspeed.utils import groups

_NAMES = (
    "mpu",
    "mesh_device",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
# process groups cannot be taken back cheaply: a role that is destroyed and created again reuses its set
_SETS: dict[int, Mapping[str, Any]] = {}


def join() -> None:
    """Hand the process group of this process to DeepSpeed."""
    # plain gloo: the shared-memory collectives are compiled for about 50 s and leave segments behind when a
    # rank is killed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_uncompiled()
    backend = torch.distributed.get_backend()
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)


def _import_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile`, whose import takes a second in every rank.

    Each engine imports Muon to see whether its optimizer is one; none here is.
    """
    compiled = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        with suppress(ImportError):  # a release without it
            import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled


def _current() -> dict[str, Any]:
    return {name: getattr(groups, name) for name in _NAMES}


@contextmanager
def _in_place(values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the variables have these values, those that are not named None."""
    before = _current()
    for name in _NAMES:
        setattr(groups, name, values.get(name))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(groups, name, value)


@contextmanager
def of_degree(tp: int) -> Iterator[None]:
    """Inside, DeepSpeed's variables belong to engines of tensor-parallel degree `tp`."""
    with _in_place(_SETS.get(tp, {})):
        try:
            yield
        finally:
            _SETS[tp] = _current()


@contextmanager
def of_pipeline(grid: Any) -> Iterator[None]:
    """Inside, they belong to the pipeline of `grid` (None: one that is being built)."""
    from deepspeed.runtime.pipe import p2p

    with _in_place({"mpu": grid}):
        if grid is not None:
            p2p.init_process_groups(grid)
        yield


def forget() -> None:
    """Drop all sets: the process group is about to end."""
    _SETS.clear()
