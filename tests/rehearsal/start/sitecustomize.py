"""With this folder in PYTHONPATH every Python process computes on the rehearsal device from its first import of torch.

What Ray's NVML answers of the device is what an empty GPU of 80 GB would.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import device


class OnImport(MetaPathFinder):
    """Does something before and after the first import of a module."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._name, self._before, self._after = name, before, after

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own, once, with `after` called behind its body."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        self._before()
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._after(module)

        spec.loader.exec_module = exec_module
        return spec


def _nvml(module: Any) -> None:
    memory = SimpleNamespace(used=0, total=80 * 10**9)
    module._nvml = lambda: SimpleNamespace(
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetMemoryInfo=lambda _: memory,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
    )


sys.meta_path.insert(0, OnImport("torch", device.load, device.show))
sys.meta_path.insert(0, OnImport("executor.coordination.others", lambda: None, _nvml))

if os.environ.get("RLHFSIM_DEVICE_BRANCHES"):  # this start-up module hides the one that records
    from lab.device_branches import seen

    seen.begin()
