"""Parts of stored tensors are the same bits as slices of the whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.engines.transformers import shards
from executor.engines.transformers.shards import ModelFiles
from rlhfsim.errors import RlhfsimError

SHAPES = {"vector": (37,), "matrix": (13, 7), "cube": (5, 4, 3), "scalar": ()}


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


@pytest.fixture(params=["one block", "blocks of a row"])
def files(
    whole: dict[str, torch.Tensor],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> ModelFiles:
    from safetensors.torch import save_file

    save_file(whole, tmp_path / "model.safetensors")
    if request.param != "one block":
        monkeypatch.setattr(shards, "BLOCK_BYTES", 1)
    return ModelFiles(tmp_path)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_flat_partitions_with_padding_make_the_tensor(
    files: ModelFiles, whole: dict[str, torch.Tensor], name: str, ranks: int
) -> None:
    size = -(-whole[name].numel() // ranks)
    parts = [torch.zeros(size) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        files.read_flat(name, part, rank * size)
    assert torch.equal(torch.cat(parts)[: whole[name].numel()], whole[name].reshape(-1))


PARTS = [("vector", 0, 5, 20), ("matrix", 0, 3, 6), ("matrix", 1, 2, 4), ("cube", 0, 1, 3), ("cube", 2, 1, 2)]
"""Tensor, dimension, start, length."""


@pytest.mark.parametrize(("name", "dim", "start", "length"), PARTS)
def test_a_part_along_a_dimension_is_a_slice(
    files: ModelFiles, whole: dict[str, torch.Tensor], name: str, dim: int, start: int, length: int
) -> None:
    wanted = whole[name].narrow(dim, start, length)
    target = torch.empty_like(wanted, memory_format=torch.contiguous_format)
    files.read(name, target, dim=dim, start=start)
    assert torch.equal(target, wanted)


def test_precision_is_that_of_the_target(files: ModelFiles, whole: dict[str, torch.Tensor]) -> None:
    target = torch.empty(SHAPES["matrix"], dtype=torch.bfloat16)
    files.read("matrix", target)
    assert torch.equal(target, whole["matrix"].to(torch.bfloat16))


def test_names_and_shapes_come_from_the_files(files: ModelFiles) -> None:
    assert files.shape("cube") == (5, 4, 3)
    assert files.stored("model.cube", "cube") == "cube"
    assert files.stored("lm_head.weight") is None


def test_another_shape_than_configured_is_refused(files: ModelFiles) -> None:
    files.expect("vector", (1, 37))
    with pytest.raises(RlhfsimError, match="has the shape"):
        files.expect("matrix", (14, 7))
