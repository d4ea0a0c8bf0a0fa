"""Training engines on a CUDA device of the host's memory (device.py), against plain PyTorch on the CPU."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

HERE = Path(__file__).parent
EXACT = 2e-6
STAGES = ("zero1 packed", "zero2 recompute", "zero3 packed recompute")
HALF = ("bf16 zero3 fp32 sums", "bf16 zero3 offload")
FSDP2 = ("zero2 packed", "zero3 packed recompute", "zero3 offload")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rehearsal")
    path = HERE.parent / "executor" / "test_deepspeed.py"
    spec: Any = importlib.util.spec_from_file_location("models_of_deepspeed", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.write_models(made)
    return made


def _ranks(folder: Path, part: str, world: int = 2) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = str(HERE / "ranks.py")
    programs.run(
        folder, *([program, str(rank), port, part, str(folder)] for rank in range(world)), RANKS=str(world)
    )
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return found


@pytest.fixture(scope="module")
def deepspeed(folder: Path) -> dict[str, Any]:
    return _ranks(folder, "deepspeed")


@pytest.fixture(scope="module")
def fsdp2(folder: Path) -> dict[str, Any]:
    return _ranks(folder, "fsdp2")


def _check_stages(found: dict[str, Any], exact: tuple[str, ...], half: tuple[str, ...] = ()) -> None:
    for name in (*exact, *half):
        if name in exact:
            assert max(found[name]["weights"], found[name]["norms"]) < EXACT, name
        assert found[name]["kept"], f"{name}: other weights came back from files"
        assert (found[name]["skipped"], found[name]["unharmed"]) == (1.0, True), name
        assert found[f"{name} resumed"]["digest"] == found[name]["digest"], name


def test_deepspeed_trains_sleeps_and_resumes_on_the_device_as_plain_torch_does(
    deepspeed: dict[str, Any],
) -> None:
    _check_stages(deepspeed, STAGES, HALF)
    assert deepspeed["tp"]["weights"] < EXACT
    assert max(deepspeed["lora"][key] for key in ("merged", "reference")) < 1e-5
    assert deepspeed["value"]["weights"] < EXACT
    assert max(deepspeed["scoring"][key] for key in ("logprobs", "loaded", "reloaded")) < 1e-5


def test_fsdp2_trains_sleeps_and_resumes_on_the_device_as_plain_torch_does(fsdp2: dict[str, Any]) -> None:
    _check_stages(fsdp2, FSDP2)
    assert max(fsdp2["lora"][key] for key in ("merged", "reference")) < 1e-5
    assert max(fsdp2["scoring"][key] for key in ("logprobs", "reloaded")) < 1e-5


def test_engines_leave_the_device_by_pinned_memory_and_wait_for_every_copy(
    deepspeed: dict[str, Any], fsdp2: dict[str, Any]
) -> None:
    for moves in (deepspeed["moves zero1"], deepspeed["moves zero3"], fsdp2["moves zero3"]):
        assert moves["kept"], "a copy was read before it had arrived"
        assert moves["late"] > 0
        assert moves["pageable"] == 0
        assert moves["asleep"] < 0.02 * moves["peak"]
        assert moves["device"] == "cuda:0"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    programs.run(
        folder,
        [str(HERE / "faults.py"), str(folder)],
        REHEARSAL_BYTES=str(2**30),
        REHEARSAL_PINNED_BYTES=str(2**26),
    )
    found: dict[str, Any] = json.loads((folder / "faults.json").read_text())
    return found


def test_memory_in_pieces_runs_out_in_the_third_iteration_with_cause_call_and_remedy(
    faults: dict[str, Any],
) -> None:
    told = faults["fragments"]
    assert (told["failures"], told["iteration"], told["code"]) == (1, 2, "out-of-memory")
    assert "reference rank 0 ran out of memory in reference.logprob" in told["message"]
    assert "in smaller pieces (fragmentation)" in told["message"]
    assert "max_split_size_mb" in told["help"]


def test_late_bytes_are_not_there_before_it_is_waited_for(faults: dict[str, Any]) -> None:
    assert faults["late"] == {"before": 0.0, "after": 1000.0, "moved": True}


def test_host_memory_that_cannot_be_pinned_ends_the_call_with_its_remedy(faults: dict[str, Any]) -> None:
    told = faults["no_pinned_memory"]
    assert told["code"] == "host-memory-not-pinned"
    assert told["message"].startswith("actor rank 1 in actor.train.unload: ")
    assert "check-machine" in told["help"]


def test_memory_that_another_stream_writes_is_kept_by_recording_it(faults: dict[str, Any]) -> None:
    assert faults["streams"] == {"kept": 0.0, "overwritten": 4096.0}


def test_readings_tell_a_call_s_peak_from_what_a_neighbour_holds(faults: dict[str, Any]) -> None:
    found = faults["readings"]
    assert found["allocated"] == found["held"] == 2**20
    assert found["peak"] == 2**20 + 2**22
    assert found["device"] >= 2**20 + 2**23


def test_random_numbers_checksums_and_micro_benchmarks_are_the_device_s(faults: dict[str, Any]) -> None:
    assert faults["random_numbers"]
    assert faults["digests"]
    assert all(faults["probes"].values())
    assert faults["transformer"]["ordinal"] == "CUDA error: invalid device ordinal"


@pytest.mark.parametrize("kind", ["latent", "odd"])
def test_packs_whose_heads_flash_attention_refuses_as_they_are_are_attended(
    faults: dict[str, Any], kind: str
) -> None:
    assert faults["latent_attention"][kind] < 0.02, "bf16"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("launched")
    command = [sys.executable, str(HERE / "launched.py"), str(folder)]
    own = programs.environment()
    ran = subprocess.run(command, env=own, capture_output=True, text=True, timeout=1200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "launched.json").read_text())
    return found


def test_a_launch_on_gpus_of_ray_learns_sleeps_saves_and_resumes(launched: dict[str, Any]) -> None:
    assert launched["steps"] == [0, 1]
    assert launched["losses"][1] < launched["losses"][0]
    assert {"actor.train.unload", "actor.save.load", "reference.logprob.load"} <= set(launched["spans"])


def test_a_launch_on_a_device_that_is_too_small_ends_with_part_phase_and_remedy(
    launched: dict[str, Any],
) -> None:
    assert launched["code"] == "out-of-memory"
    assert "ran out of memory in" in launched["message"]
    assert launched["help"]
