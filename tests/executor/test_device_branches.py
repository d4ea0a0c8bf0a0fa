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
from executor.engines import device, optimizers
from executor.engines.transformers import attention
from executor.engines.vllm import start, worker
from executor.engines.vllm.start import OWN_BYTES, free_share
from executor.microbench import memory, sleep
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


def test_the_fullest_gpu_of_a_process_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by UUID, as CUDA_VISIBLE_DEVICES has them."""
    held = {3: (30, [SimpleNamespace(pid=1, usedGpuMemory=20)]), "GPU-a": (60, [])}
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=held[handle][0], total=80),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: held[handle][1],
    )
    monkeypatch.setattr(others, "_nvml", lambda: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a")
    told = others.held_by_others(gpu=True)
    assert (told.bytes, told.total) == (60.0, 80.0)
    assert told.where.startswith("GPU GPU-a of ")


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


def test_sleep_and_wake_are_timed_on_an_engine_that_is_closed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    engine = SimpleNamespace(
        sleep=lambda level: calls.append(level),
        wake=lambda: calls.append("wake"),
        close=lambda: calls.append("close"),
    )
    monkeypatch.setattr(sleep, "engine_at", lambda *_: engine)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    found = sleep.measure(ProbeSetup(device="cuda", scratch=tmp_path, quick=True))
    assert [point.name for point in found] == ["sleep", "wake"]
    assert calls == [2, "wake"] * (len(calls) // 2) + ["close"]


def test_8_bit_adam_is_that_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("bitsandbytes")
    made.optim = SimpleNamespace(AdamW8bit=lambda parameters, lr: (parameters, lr))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", made)
    monkeypatch.setattr(device, "available", lambda: True)
    assert optimizers._adam8bit([], {"lr": 0.1}) == ([], 0.1)


def test_flash_attention_is_taken_where_it_is_installed_and_weights_are_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(device, "available", lambda: True)
    config = SimpleNamespace(model_type="llama")
    assert attention.implementation(config, torch.bfloat16) == attention.FLASH
    assert attention.implementation(config, torch.float32) == attention.VARLEN


def test_a_rollout_engine_is_built_for_the_device_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(device, "available", lambda there=there: there)
        assert start.current_device() == name


def test_a_thread_that_stages_weights_is_on_the_gpu_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setattr(worker.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    staging: Any = object.__new__(worker.Staging)
    staging._size = 1
    for name in ("cuda:3", "cpu"):
        with pytest.raises(RlhfsimError, match="host memory"):
            staging._receive(1, name)
    assert used == [torch.device("cuda", 3)]
