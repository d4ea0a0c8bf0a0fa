"""A described world: as many ranks as a configuration asks for, of which one process is the first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import math
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch


@contextmanager
def world(ranks: int, each: int) -> Iterator[None]:
    """Rank 0 of `ranks` processes, `each` of them a node; collectives return at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": each, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}
    told = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()}
    with patch.dict(os.environ, told):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


class Groups:
    """`megatron.core.parallel_state` of one process."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sizes = ranks, dict[str, Any]()

    def is_initialized(self) -> bool:
        return bool(self.sizes)

    def initialize_model_parallel(self, **sizes: Any) -> None:
        self.sizes = {name: sizes.get(key) for name, key in SIZES.items()}

    def get_data_parallel_world_size(self) -> int:
        return self.ranks // math.prod(self.sizes[name] for name in ("tp", "pp", "cp"))

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that hold: Megatron-Core's experts are cut as the rest where nobody says otherwise."""
        experts = self.sizes["etp"] or (self.sizes["tp"] if self.sizes["ep"] > 1 else 1)
        return {name: size or 1 for name, size in self.sizes.items()} | {"etp": experts}

    def __getattr__(self, name: str) -> Any:
        return MagicMock(return_value=0)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of Megatron-Core and of what comes with it, empty."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("megatron", "mbridge", "nvidia_resiliency_ext", "flash_attn"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="0.16.0")
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def without_megatron() -> None:
    """Let modules be imported that need Megatron-Core, which is not installed."""
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Absent())
