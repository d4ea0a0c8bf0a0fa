"""What a failure is called: who, how, doing what; and what is worth another attempt."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from ray.exceptions import RayActorError, RayTaskError

from executor.coordination import failures, others
from executor.coordination.failures import PartFailed, collect, died
from executor.coordination.others import Held, held_by_others, summary
from executor.coordination.out_of_memory import is_out_of_memory, out_of_memory
from rlhfsim.errors import RlhfsimError

PROCESS = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tpid: 4711
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits with a connection error code 2. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."""
NODE = """The actor died unexpectedly before finishing this task.
\tpid: 4711
\tip: 10.0.0.2
The actor died because its node has died. Node Id: 0123456789abcdef"""


class _Ray:
    """Stands for Ray: refs are results, errors, or None for calls that go on."""

    def is_initialized(self) -> bool:
        return True

    looks = 0

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.looks += 1
        done = [ref for ref in refs if ref[1] is not None][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref, list):
            return [self.get(one, timeout) for one in ref]
        if isinstance(ref[1], Exception):
            raise ref[1]
        return ref[1]


@pytest.fixture(autouse=True)
def ray_stub(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    stand_in = _Ray()
    monkeypatch.setattr(failures, "ray", stand_in)
    return stand_in


def _raised(error: Exception) -> RayTaskError:
    return RayTaskError("train", "Traceback\n  line\nValueError: no", error)


def test_results_come_in_the_order_of_the_calls() -> None:
    assert collect([("a", 1), ("b", 2)], ["rank 0", "rank 1"], "train", 1.0) == [1, 2]


def test_one_look_takes_the_results_of_hundreds_of_calls(ray_stub: _Ray) -> None:
    refs = [(str(i), i) for i in range(512)]
    assert collect(refs, [f"rank {i}" for i in range(512)], "train", 60.0) == list(range(512))
    assert ray_stub.looks == 1


def test_dead_process_is_named_with_its_host_and_is_not_taken_for_out_of_memory() -> None:
    error = RayActorError(error_msg=PROCESS)
    with pytest.raises(
        PartFailed, match=r"rank 1 died in train: its process 4711 on 10.0.0.2 ended"
    ) as failure:
        collect([("a", None), ("b", error)], ["rank 0", "rank 1"], "train", 5.0)
    assert not is_out_of_memory(failure.value)


def test_lost_node_is_named() -> None:
    failure = died("rank 1", RayActorError(error_msg=NODE))
    assert str(failure) == "rank 1 died: its Ray node 01234567 on 10.0.0.2 is gone"


def test_all_parts_that_are_late_are_named() -> None:
    with pytest.raises(PartFailed, match=r"rank 0, rank 1 timed out in train: train took longer than 0 s"):
        collect([("a", None), ("b", None)], ["rank 0", "rank 1"], "train", 0.0)


def test_refused_input_stops_a_run_and_a_lost_partner_ends_only_a_life() -> None:
    refused = RlhfsimError("request-too-long", "too long")
    with pytest.raises(RlhfsimError, match="too long"):
        collect([("a", _raised(refused))], ["rank 0"], "train", 1.0)
    lost = RlhfsimError("weight-sync-failed", "connection lost")
    with pytest.raises(PartFailed, match="rank 0 raised in send: connection lost"):
        collect([("a", _raised(lost))], ["rank 0"], "send", 1.0)


def test_the_rank_that_failed_is_named_before_those_that_lost_it() -> None:
    """Gloo's error of rank 0 is seen first, or in the same look."""
    lost = RayTaskError("train", "Traceback\n[gloo] Connection closed by peer [10.0.0.2]:5", ValueError("no"))
    with pytest.raises(PartFailed, match="rank 1 raised in train: ValueError: no"):
        collect([("a", lost), ("b", _raised(ValueError("no")))], ["rank 0", "rank 1"], "train", 5.0)
    only = [("a", lost), ("b", None)]
    with pytest.raises(PartFailed, match=r"rank 0 raised in train: .gloo. Connection"):
        collect(only, ["rank 0", "rank 1"], "train", 5.0)


def test_a_dead_process_says_why_before_the_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    log = tmp_path / "worker-0a1b-01000000-4711.err"
    log.write_text("loading\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File x\n")
    error = RayActorError(error_msg=PROCESS)
    wanted = "its process 4711 on 10.0.0.2 ended: Fatal Python error: Segmentation fault"
    assert died("rank 1", error).detail == wanted
    log.write_text("nothing of note\n")
    assert died("rank 1", error).detail == "its process 4711 on 10.0.0.2 ended"
    start = "The actor died because of an error raised in its creation task, pid: 4711\nImportError: no torch"
    assert died("rank 1", RayActorError(error_msg=start)).detail.endswith(
        "did not start: ImportError: no torch"
    )


def test_memory_of_others_is_measured_said_and_not_blamed_on_the_plan(tiny_model: Path) -> None:
    here = held_by_others(gpu=False)
    assert 0 < here.bytes < here.total
    assert os.getpid() not in [pid for _, pid, _ in here.holders]
    plan = runs.plan("hybrid", "grpo", tiny_model)
    held = Held(where="GPU 3 of node-a", bytes=31e9, total=80e9, holders=(("python", 99, 30e9), ("", 7, 1e9)))
    text = "others hold 31 GB of 80 GB on GPU 3 of node-a (python 99 30 GB, process 7 1 GB)"
    assert summary({"actor rank 0": held, "rollout replica 0": held}) == [text]
    asked = list[str]()
    change = lambda: asked.append("planner") or "halve"  # noqa: E731
    found = out_of_memory(plan, "actor.train", "actor rank 0", change, held)
    assert f"ran out of memory in actor.train; before the run {text}; the plan" in found.what
    assert found.advice.startswith("end those processes")
    assert not asked
    little = replace(held, bytes=1e9)
    assert summary({"actor rank 0": little}) == []
    assert out_of_memory(plan, "actor.train", "actor rank 0", change, little).advice == "halve"


@pytest.mark.parametrize("visible", ["0,GPU-b", "GPU-b"])
def test_the_fullest_gpu_of_a_process_is_read_by_number_or_uuid(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"GPU-a": 10e9, "GPU-b": 30e9}
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: list(sizes)[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=sizes[gpu], total=80e9),
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=sizes[gpu])
        ],
    )
    monkeypatch.setattr(others, "_nvml", lambda: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = held_by_others(gpu=True)
    assert found.where.startswith("GPU GPU-b of ")
    assert (found.bytes, found.total, found.counts) == (30e9, 80e9, True)
    assert [(pid, size) for _, pid, size in found.holders] == [(os.getpid(), 30e9)]
