"""DeepSpeed's process groups, one set for each tensor-parallel degree.

DeepSpeed keeps them in module variables, one set a process. Roles that share a process have layouts of their
own, so each engine puts its set in place before it does anything.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from deepspeed.utils import groups

_NAMES = (
    "mpu",
    "mesh_device",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
# process groups cannot be taken back cheaply: a role that is destroyed and created again reuses its set
_SETS: dict[int, dict[str, Any]] = {}


class Groups:
    """`with` this, DeepSpeed's variables belong to engines of tensor-parallel degree `tp`."""

    def __init__(self, tp: int) -> None:
        self._tp = tp
        self._others: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._others.append({name: getattr(groups, name) for name in _NAMES})
        for name, value in _SETS.get(self._tp, dict.fromkeys(_NAMES)).items():
            setattr(groups, name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _SETS[self._tp] = {name: getattr(groups, name) for name in _NAMES}
        for name, value in self._others.pop().items():
            setattr(groups, name, value)


def forget() -> None:
    """Drop all sets: the process group is about to end."""
    _SETS.clear()
