"""The one module that knows the accelerator: what it asks torch for, with a GPU and without one."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.engines import device

EXECUTOR = Path(__file__).parents[2] / "executor"


def _names_cuda(path: Path) -> bool:
    """Whether a module reads `torch.cuda` or imports it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            return True
        if isinstance(node, ast.Import) and any(a.name.startswith("torch.cuda") for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and f"{node.module}.{node.names[0].name}".startswith(
            "torch.cuda"
        ):
            return True
    return False


def test_no_other_module_of_the_executor_names_torch_cuda() -> None:
    named = [path.relative_to(EXECUTOR).as_posix() for path in EXECUTOR.rglob("*.py") if _names_cuda(path)]
    assert named == ["engines/device.py"]


def test_without_a_gpu_nothing_is_asked_of_one() -> None:
    assert (device.available(), device.own()) == (False, torch.device("cpu"))
    device.settle()
    device.empty_cache()
    device.keep_for_stream(torch.ones(1))
    device.put_random_state(torch.ones(1, dtype=torch.uint8))
    assert device.random_state() is None
    assert device.why_not()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """GPU 1 of a machine; what it is asked for."""
    asked: list[Any] = []
    state = torch.arange(4, dtype=torch.uint8)
    module = SimpleNamespace(
        get_rng_state=lambda: state,
        set_rng_state=lambda value: asked.append(("random", value)),
        get_device_name=lambda index: f"NVIDIA H100 {index}",
    )
    index = [0]
    fakes = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "current_device_index": lambda: index[0],
        "set_device_index": lambda i: index.__setitem__(0, i),
        "synchronize": lambda: asked.append("synchronize"),
        "empty_cache": lambda: asked.append("empty_cache"),
        "current_stream": lambda: "stream",
        "get_memory_info": lambda i: (1.0, 80e9),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return asked


def test_a_gpu_is_used_by_its_index_waited_for_and_trimmed(gpu: list[Any]) -> None:
    assert device.use(1) == device.own() == torch.device("cuda", 1)
    device.settle()
    device.empty_cache()
    state = device.random_state()
    device.put_random_state(state)
    assert gpu == ["synchronize", "empty_cache", ("random", state)]
    assert (device.name(), device.total_bytes()) == ("NVIDIA H100 0", 80e9)


def test_memory_of_a_tensor_on_a_gpu_is_kept_for_the_stream(gpu: list[Any]) -> None:
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), record_stream=gpu.append)
    device.keep_for_stream(tensor)
    assert gpu == ["stream"]
