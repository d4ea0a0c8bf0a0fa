"""What the executor does on a GPU alone, over fakes of what answers there: NVML, vLLM's platform, the accelerator."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from executor.coordination import others
from executor.engines.vllm.start import OWN_BYTES, free_share
from executor.microbench import memory
from executor.microbench.setup import ProbeSetup
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import GIB


class Nvml(ModuleType):
    """Two of four GPUs are this process's: 5 and 7, by their physical numbers."""

    class NVMLError(Exception):
        pass

    def __init__(self, free: dict[int, float]) -> None:
        super().__init__("pynvml")
        self.free, self.calls = free, list[str]()

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if not self.free:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(free=self.free[handle], total=80 * GIB)


def _vllm(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    platform = SimpleNamespace(
        device_count=lambda: 2, device_id_to_physical_device_id=lambda index: (5, 7)[index]
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("vllm", "vllm.platforms", "vllm.utils")}
    modules["vllm.platforms"].current_platform = platform
    modules["vllm.utils"].import_utils = SimpleNamespace(import_pynvml=lambda: nvml)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_an_engine_takes_what_is_free_on_the_fullest_of_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({0: 1.0, 5: 60 * GIB, 7: 41.5 * GIB})
    _vllm(monkeypatch, nvml)
    assert free_share() == pytest.approx((41.5 * GIB - OWN_BYTES) / (80 * GIB))
    assert nvml.calls == ["init", "shutdown"]


def test_nvml_is_closed_where_a_gpu_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({5: 60 * GIB})
    _vllm(monkeypatch, nvml)
    with pytest.raises(KeyError):
        free_share()
    assert nvml.calls == ["init", "shutdown"]


def test_a_driver_that_does_not_answer_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    there, absent = Nvml({0: GIB}), Nvml({})
    for nvml in (there, absent):
        package = ModuleType("ray._private.thirdparty.pynvml")
        package.pynvml = nvml  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package.__name__, package)
        if nvml is there:
            assert others._nvml() is there
            continue
        with pytest.raises(RlhfsimError, match="NVML does not answer: Driver Not Loaded") as refused:
            others._nvml()
        assert refused.value.help == "install the driver"


@dataclass
class Recorded:
    """A tensor of which only copies are looked at."""

    copies: set[tuple[str, str, bool]]
    place: str

    def pin_memory(self) -> Recorded:
        return replace(self, place="pinned")

    def copy_(self, source: Recorded, non_blocking: bool = False) -> None:
        self.copies.add((source.place, self.place, non_blocking))


def test_copies_are_timed_to_their_end_and_pinned_ones_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits, copies = list[int](), set[tuple[str, str, bool]]()

    def made(size: int, device: str = "pageable") -> Recorded:
        return Recorded(copies, device)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch, "ones", made)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr("executor.microbench.setup.LEAST_S", 1e-9)
    found = memory._host_device(ProbeSetup(device="cuda", scratch=tmp_path, quick=True), 4096)
    assert [m.name for m in found] == ["host_to_device", "device_to_host", "pageable_copy", "copy_latency"]
    assert copies == {("pinned", "cuda", True), ("cuda", "pinned", True), ("pageable", "cuda", False)}
    assert len(waits) >= 2 * sum(m.n for m in found), "each sample begins and ends with a device that is done"
    assert [m.unit for m in found] == ["byte/s", "byte/s", "byte/s", "s"]
