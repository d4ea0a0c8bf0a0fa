"""What a rank gives `torch.save`: nothing that is whole is copied, nothing that is a part is written whole.

What it reads back is data: nothing in a file is executed.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor.engines import checkpoints
from executor.engines.deepspeed.learner import compact
from rlhfsim.errors import RlhfsimError


def test_a_tensor_that_fills_its_storage_is_not_copied() -> None:
    for whole in (torch.arange(8.0), torch.arange(8.0).view(2, 4).t(), torch.tensor(3)):
        assert compact(whole).data_ptr() == whole.data_ptr()
    assert compact(7) == 7


def test_of_a_flat_buffer_a_view_is_written_alone() -> None:
    flat = torch.arange(10_000.0)
    given = compact(flat[100:110])
    assert torch.equal(given, flat[100:110])
    written = io.BytesIO()
    torch.save(given, written)
    assert written.tell() < 4_000


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_planted_file_of_a_rank_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0-of-1.pt"
    monkeypatch.setattr(checkpoints, "_path", lambda folder: path)
    monkeypatch.setattr(checkpoints, "_identity", lambda spec: {})
    torch.save({"identity": {}, "steps": Planted(tmp_path / "owned")}, path)
    with pytest.raises(
        RlhfsimError, match=r"rank-0-of-1\.pt is not what a run of this version saved"
    ) as caught:
        checkpoints.read(SimpleNamespace(spec=None), tmp_path)
    assert caught.value.code == "checkpoint-unreadable"
    assert not (tmp_path / "owned").exists()


def test_random_streams_are_plain_data_and_go_on_where_they_stood() -> None:
    file = io.BytesIO()
    torch.save(checkpoints._random(), file)
    drawn = np.random.random(3)  # noqa: NPY002  the stream that libraries draw from
    checkpoints._put_random(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert np.array_equal(np.random.random(3), drawn)  # noqa: NPY002
