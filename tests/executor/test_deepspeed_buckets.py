"""Buffers that the installed DeepSpeed allocates for gradients: its own functions, run without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.oracle.live_bytes import LiveBytes

pytest.importorskip("deepspeed")

from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

BUCKET = 5000


@pytest.mark.parametrize(("overlap", "buckets"), [(False, 1), (True, 2)])
def test_zero_1_and_2_allocate_whole_buckets_before_every_backward_pass(overlap: bool, buckets: int) -> None:
    bucket = SimpleNamespace(buffer=[], index=0)
    optimizer = SimpleNamespace(
        ready_for_gradients=False,
        micro_step_id=0,
        contiguous_gradients=True,
        ipg_buckets={torch.bfloat16: bucket},
        reduce_bucket_size=BUCKET,
        overlap_comm=overlap,
        _gradient_reduction_buffer_dtype=lambda: torch.bfloat16,
    )
    with LiveBytes() as live:
        DeepSpeedZeroOptimizer.setup_buckets(optimizer)
    assert live.live == 2 * BUCKET * buckets


def test_zero_3_copies_the_gradients_of_a_bucket_to_scatter_them() -> None:
    with (
        FakeTensorMode(),
        mock.patch.object(coalesced_collectives.dist, "get_rank", return_value=0),
        mock.patch.object(coalesced_collectives.dist, "get_world_size", return_value=4),
        mock.patch.object(coalesced_collectives, "_torch_reduce_scatter_fn"),
    ):
        gradients = [torch.empty(elements, dtype=torch.bfloat16) for elements in (3000, 2000)]
        with LiveBytes() as live:
            coalesced_collectives.reduce_scatter_coalesced(gradients)
    assert live.peak >= 2 * BUCKET  # the interleaved copy; the gradients themselves are not followed


def test_zero_3_builds_one_bucket_and_drops_it_only_when_states_are_offloaded() -> None:
    lines = [line.strip() for line in inspect.getsource(stage3).splitlines() if "bucket.buffer = " in line]
    assert lines.count("bucket.buffer = torch.empty(self.reduce_bucket_size,") == 1
    assert len(lines) == 3  # the others: offload_states and reload_states
