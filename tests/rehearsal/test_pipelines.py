"""Pipelines of four ranks on the rehearsal device: they learn and resume as plain PyTorch on the CPU does."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch

from executor.engines.mesh import coordinates
from executor.tasks import tiny
from tests.executor.pipeline_ranks import CASES as ALL
from tests.executor.pipeline_ranks import WORLD, make_samples, shares
from tests.executor.test_pipeline import Reference

CASES = ("pp2 dp2 zero1", "pp2 tp2 zero1", "pp4", "bf16")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipelines")
    for model in {ALL[name][0] for name in CASES}:
        family: Any = model.split("-")[0]
        tiny.build(made / model, family=family, hidden=32, tied=model.endswith("tied"))
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [str(programs.HERE / "pipelines.py"), "{}", port, str(folder), ",".join(CASES)]
    programs.run(folder, *([word.format(rank) for word in words] for rank in range(WORLD)))
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_and_learn_as_the_uncut_model_does(
    found: list[dict[str, Any]], folder: Path, name: str
) -> None:
    reference, layout = Reference(folder, name), ALL[name][1]
    outputs, weights = (0.05, 6e-3) if name == "bf16" else (1e-5, 1e-5)
    for rank, seen in enumerate(found):
        mine = shares(make_samples(), layout)[coordinates(rank, layout).dp]
        for sample, numbers in zip(mine, seen[name]["before"], strict=True):
            wanted = reference.outputs(sample)[0].detach().numpy()
            np.testing.assert_allclose(numbers, wanted, atol=outputs)
    for _ in range(2):
        reference.step(make_samples())
    for key, value in reference.weights().items():
        torch.testing.assert_close(
            found[0][name]["weights"][key].float(), value.detach(), atol=weights, rtol=0
        )


@pytest.mark.parametrize("name", CASES)
def test_they_resume_bit_for_bit_and_skip_what_is_no_number(found: list[dict[str, Any]], name: str) -> None:
    assert [seen[name]["unlike"] for seen in found] == [0] * WORLD
    assert [seen[name]["poisoned"] for seen in found] == [(1.0, 0)] * WORLD
