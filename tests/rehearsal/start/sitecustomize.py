"""With this folder in PYTHONPATH every Python process computes on the rehearsal device from its first import of torch.

NVML answers of a GPU of 80 GB of which processes hold what they hold of the device; vLLM is that of vllm_device.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from array import array
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


TOTAL = int(os.environ.get("REHEARSAL_NVML_BYTES", 80 * 10**9))
"""Bytes of the GPU that NVML knows; what is used of it is what processes hold of the rehearsal's."""


def _used(gpu: int | str) -> int:
    """Bytes that processes hold by the device's ledger (device.cpp), of those that live."""
    file = Path(os.environ.get("REHEARSAL_GPUS", "/nowhere") + str(gpu))
    rows = array("q", file.read_bytes() if file.exists() else b"")
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return sum(held for pid, held in pairs if pid and Path(f"/proc/{pid}").exists())


def _nvml() -> Any:
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(
            used=_used(gpu), free=TOTAL - _used(gpu), total=TOTAL
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
    )


def _answer(name: str) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, _nvml)


def _platform(module: Any) -> None:
    module.resolve_current_platform_cls_qualname = lambda: "vllm_platform.Platform"
    # on CPUs it has streams, events and pinned memory do nothing
    sys.modules["vllm.v1.worker.cpu.shm"] = ModuleType("vllm.v1.worker.cpu.shm")


def _nccl(module: Any) -> None:
    from vllm_platform import Communicator

    module.PyNcclCommunicator = Communicator


def nothing() -> None:
    """There is nothing to do before."""


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # kernels are not compiled for it
sys.meta_path[:0] = [
    OnImport("torch", device.load, device.show),
    OnImport("executor.coordination.others", nothing, _answer("_nvml")),
    OnImport("vllm.utils.import_utils", nothing, _answer("import_pynvml")),
    OnImport("vllm.platforms", nothing, _platform),
    OnImport("vllm.distributed.device_communicators.pynccl", nothing, _nccl),
]

if os.environ.get("RLHFSIM_DEVICE_BRANCHES"):  # this start-up module hides the one that records
    from lab.device_branches import seen

    seen.begin()
