"""What the installed torch keeps beside FP32 weights under DDP and autocast, run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.oracle.live_bytes import LiveBytes
from rlhfsim.memory import states
from rlhfsim.memory.states import Shard
from rlhfsim.specs.placement.layout import Layout

WIDE, LAYERS = 256, 8
ELEMENTS = WIDE * WIDE * LAYERS
PART = Shard(
    dense=ELEMENTS,
    expert=0,
    dense_ranks=1,
    expert_ranks=1,
    layer=WIDE * WIDE,
    root=0,
    matrix=WIDE * WIDE,
    num_layers=LAYERS,
)


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))).to(dtype)


@pytest.mark.parametrize(
    ("trains", "gradients", "copies"), [(True, True, 1), (True, False, 1), (False, False, 0)]
)
def test_autocast_keeps_bf16_copies_of_weights_that_could_train(
    trains: bool, gradients: bool, copies: int
) -> None:
    model = _model().requires_grad_(trains)
    with LiveBytes() as live, torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, WIDE))
        kept = live.live
    assert kept == pytest.approx(copies * states.cast_bytes(PART, states.FP32), abs=0.1 * ELEMENTS)
    assert states.cast_bytes(PART, states.BF16) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ddp_and_adam_keep_what_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(_model(dtype))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # buckets are built anew after the first
            model(torch.randn(2, WIDE, dtype=dtype)).sum().backward()
        told = model._get_ddp_logging_data()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    buckets = sum(map(int, str(told["bucket_sizes"]).split(",")))
    gradients = sum(p.grad.nbytes for p in model.parameters())
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
    assert not told["gradient_as_bucket_view"]
    width = dtype.itemsize
    counted = states.plain_states(PART, Layout(dp=2, zero=0), width)
    assert (counted.weights, counted.optimizer) == (width * ELEMENTS, moments)
    assert (counted.gradients, counted.between) == (gradients + buckets, buckets)
    assert states.plain_states(PART, Layout(dp=1, zero=0), width).gradients == gradients
