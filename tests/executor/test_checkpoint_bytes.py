"""What a rank gives `torch.save`: nothing that is whole is copied, nothing that is a part is written whole."""

from __future__ import annotations

import io

import torch

from executor.engines.deepspeed.checkpoints import compact


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
