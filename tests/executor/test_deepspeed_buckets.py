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
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
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


def test_zero_1_and_2_reduce_a_bucket_of_several_owners_on_all_ranks() -> None:
    optimizer = SimpleNamespace(
        dp_process_group=None,
        sequence_parallel_size=1,
        overlap_comm=False,
        flatten=torch._utils._flatten_dense_tensors,
        unflatten=torch._utils._unflatten_dense_tensors,
        _add_to_grad_partition_buffer=lambda *_: None,
    )
    for name in ("allreduce_bucket", "allreduce_and_copy_with_multiple_ranks"):
        setattr(optimizer, name, getattr(DeepSpeedZeroOptimizer, name).__get__(optimizer))
    gradients = torch.zeros(BUCKET, dtype=torch.bfloat16)
    slices = [(rank, gradients.narrow(0, rank * BUCKET // 4, BUCKET // 4), None) for rank in range(4)]
    with mock.patch.object(stage_1_and_2, "dist") as dist:
        dist.get_rank.return_value = 0
        DeepSpeedZeroOptimizer.allreduce_and_scatter(
            optimizer, slices, torch.bfloat16, numel_per_bucket=BUCKET, divide=False
        )
    assert [call.args[0].numel() for call in dist.all_reduce.call_args_list] == [BUCKET]
    assert not dist.reduce.called
    assert not dist.reduce_scatter.called


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_deepspeed_overlaps_reductions_under_zero_3_alone_unless_it_is_told(
    stage: int, overlaps: bool
) -> None:
    assert DeepSpeedZeroConfig(stage=stage).overlap_comm == overlaps
    assert DeepSpeedZeroConfig(stage=stage).reduce_scatter
    assert DeepSpeedZeroConfig(stage=stage).use_multi_rank_bucket_allreduce
