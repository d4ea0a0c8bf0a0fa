"""Which devices a run has, what a process of it may use, and what it is told of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.coordination import cluster
from executor.coordination.tracing import Reply, RunRecorder
from executor.engines import device, memory, training
from executor.engines.memory import Meter
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import MB

SLOTS = 40 * MB


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 8), ("0,3", 2), ("GPU-1f2e,GPU-aa00", 2), ("", 0), ("NoDevFiles", 0)]
)
def test_gpus_are_those_of_nvml_that_this_process_may_use(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container or a Slurm step sees a part of the machine's GPUs."""
    from ray._private.thirdparty import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cluster.local_gpus() == expected


@pytest.mark.parametrize(("offers", "gpu"), [({"GPU": 8.0}, True), ({"slot": 8.0}, False)])
def test_a_head_node_without_gpus_runs_a_plan_on_the_gpus_of_its_cluster(
    offers: dict[str, float], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "local_gpus", lambda: 0 if gpu else 8)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(cluster.ray, name, lambda **_: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: offers)
    assert cluster.has_gpus("10.0.0.1:6399", {}) is gpu


def test_a_gpu_that_torch_cannot_use_stops_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update")

    monkeypatch.setattr(device, "available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(
        RlhfsimError, match=r"driver on your system is too old \(found version 12040\)"
    ) as told:
        training.check_device(gpu=True)
    assert told.value.code == "gpu-not-usable"
    assert "580" in str(told.value.help)


def test_a_worker_on_a_gpu_does_not_inherit_the_cpu_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(device, "available", lambda: True)
    assert training.check_device(gpu=True)
    assert "DS_ACCELERATOR" not in os.environ
    monkeypatch.setattr(device, "available", lambda: False)
    assert not training.check_device(gpu=False)
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_making_a_tiny_model_tells_other_processes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    tiny.build(tmp_path / "model", layers=1)
    assert "DS_ACCELERATOR" not in os.environ


def test_a_group_meets_on_a_port_that_nobody_can_take_in_between() -> None:
    import torch.distributed as dist

    store = training.rendezvous("127.0.0.1", 1)
    with pytest.raises(dist.DistNetworkError, match=r"EADDRINUSE|address already in use"):
        dist.TCPStore("127.0.0.1", store.port, 1, is_master=True)
    joined, rank, ranks = next(dist.rendezvous(f"tcp://127.0.0.1:{store.port}?rank=0&world_size=1"))
    joined.set("word", "given")
    assert (store.get("word"), rank, ranks) == (b"given", 0, 1)


def test_what_a_call_takes_for_a_while_is_its_peak_and_not_the_next_one_s() -> None:
    meter = Meter()
    meter.start()
    before = meter.read()["host"]
    del (block := {"held": np.ones(int(SLOTS / 8))})["held"]
    taken = meter.read()
    assert taken["host_peak"] >= before + 0.9 * SLOTS
    assert taken["host"] < before + 0.5 * SLOTS
    meter.start()
    assert meter.read()["host_peak"] < before + 0.5 * SLOTS, block


class Cuda:
    """A GPU of 80 GB: `others` used by other processes, and this one's tensors."""

    def __init__(self) -> None:
        self.others, self.reserved, self.peak = 10e9, 20e9, 20e9

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.reserved

    def get_memory_info(self) -> tuple[float, float]:
        return 80e9 - self.others - self.reserved, 80e9

    memory_allocated = memory_reserved = lambda self: self.reserved
    max_memory_allocated = max_memory_reserved = lambda self: self.peak


def test_the_peak_of_a_gpu_is_the_driver_s_count_with_what_torch_held_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, meter = Cuda(), Meter()
    monkeypatch.setattr(memory, "_accelerator", lambda: cuda)
    meter.start()
    cuda.peak = 50e9  # in the call
    assert {k: meter.read()[k] for k in ("peak", "device", "device_peak")} == {
        "peak": 50e9,
        "device": 30e9,
        "device_peak": 60e9,
    }
    meter.start()
    assert meter.read()["device_peak"] == 30e9, "the peak of an earlier call"
    cuda.others = 0.0  # a neighbour left in the call
    assert meter.read()["device_peak"] == 30e9


def test_the_peaks_of_an_iteration_are_kept_until_they_are_read() -> None:
    recorder = RunRecorder()
    for peak, left in ((5.0, 1.0), (3.0, 2.0)):
        recorder.add(Reply(value=None, memory={"device_peak": peak, "device": left}), part="actor rank 0")
    assert recorder.readings() == [("", {"device_peak": 5.0, "device": 2.0})]
    assert not recorder.readings()


@pytest.mark.parametrize("gpu", [True, False])
def test_the_optimizer_on_the_host_is_torch_s_where_deepspeed_s_cannot_be_built(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from executor.engines import optimizers

    adam = pytest.importorskip("deepspeed.ops.adam")
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder")

    def built(*_: Any, **__: Any) -> None:
        builder.assert_no_cuda_mismatch()

    monkeypatch.setattr(device, "available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(builder, "installed_cuda_version", lambda name="": (13, 1))
    monkeypatch.setattr(adam, "DeepSpeedCPUAdam", built)
    made = optimizers._host_adam([torch.nn.Parameter(torch.ones(2))], {"lr": 1e-3})
    assert type(made) is torch.optim.AdamW
    assert ("CUDAMismatchException" if gpu else "no GPU") in caplog.text


def test_a_build_that_was_killed_does_not_hold_up_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import time

    from executor.engines import optimizers

    adam = pytest.importorskip("deepspeed.ops.adam")
    killed, running = (tmp_path / version / "cpu_adam" / "lock" for version in ("py311", "py312"))
    for lock in (killed, running):
        lock.parent.mkdir(parents=True)
        lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(killed, (an_hour_ago, an_hour_ago))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(adam, "DeepSpeedCPUAdam", lambda *_, **__: (killed.exists(), running.exists()))
    assert optimizers._host_adam([], {}) == (False, True)


def test_the_extra_of_8_bit_adam_is_the_one_that_is_asked_for() -> None:
    import tomllib

    from executor.engines import optimizers

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "bitsandbytes" in project["optional-dependencies"]["adam8bit"][0]
    with pytest.raises(RlhfsimError) as told:
        optimizers._adam8bit([], {})
    assert "rlhfsim[adam8bit]" in str(told.value.help)


def test_a_ray_that_does_not_start_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # of Ray's token
    plan: Any = None  # with GPUs the machine is not compared here

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...\nmore")

    monkeypatch.setattr(cluster, "local_gpus", lambda: 8)
    monkeypatch.setattr(cluster.ray, "init", late)
    with pytest.raises(RlhfsimError, match="timed out during startup") as error:
        cluster.connect(plan, None, {})
    assert "\n" not in error.value.message
    assert "(3 starts)" in error.value.message
    assert "try again" in str(error.value.help)


def test_a_ray_that_answers_too_late_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    plan: Any = None
    starts = list[str]()

    def late_at_first(**_: object) -> None:
        starts.append("start")
        if len(starts) < 2:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster, "local_gpus", lambda: 8)
    monkeypatch.setattr(cluster.ray, "init", late_at_first)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: starts.append("end"))
    assert cluster.connect(plan, None, {}) == "GPU"
    assert starts == ["start", "end", "start"]
