"""Gradients that the installed FSDP keeps while it reduces nothing: both versions run on two ranks, by gloo."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

from rlhfsim.memory import states
from rlhfsim.memory.states import Shard

WIDE, LAYERS = 64, 3
ELEMENTS = WIDE * WIDE * LAYERS
WIDTHS = {"4": torch.float32, "2": torch.bfloat16}
"""Bytes of a gradient that is reduced."""


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _kept(rank: int, folder: str) -> None:
    """Bytes of gradients after a backward pass that reduces nothing: FSDP1, FSDP2."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    kept = {}
    for reduced in WIDTHS:
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": WIDTHS[reduced]}
        one = FSDP(
            _model(), device_mesh=mesh, device_id=torch.device("cpu"), mixed_precision=MixedPrecision(**types)
        )
        with one.no_sync():
            one(torch.randn(4, WIDE)).sum().backward()
        two = _model()
        for part in (*two, two):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**types))
        two.set_requires_gradient_sync(False)
        two(torch.randn(4, WIDE)).sum().backward()
        groups = [layer._get_fsdp_state()._fsdp_param_group for layer in two]
        parameters = [p for group in groups for p in group.fsdp_params]
        summed = [(p.unsharded_accumulated_grad, p._unsharded_param.grad) for p in parameters]
        whole = [own if cast is None else cast for cast, own in summed]
        kept[f"flat, {reduced}"] = _size([one._handle.flat_param.grad])
        kept[f"by parameter, {reduced}"] = _size(whole)
    if rank == 0:
        Path(folder, "kept.json").write_text(json.dumps(kept), encoding="utf-8")
    dist.destroy_process_group()
    os._exit(0)  # an interpreter that goes down aborts if a thread of gloo wants it once more


def test_fsdp_keeps_whole_gradients_until_it_reduces_them(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_kept, args=(os.fspath(tmp_path),), nprocs=2)
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    part = Shard(
        dense=ELEMENTS,
        expert=0,
        dense_ranks=2,
        expert_ranks=1,
        layer=WIDE * WIDE,
        root=0,
        matrix=WIDE * WIDE,
        num_layers=LAYERS,
    )
    for name, reduced in itertools.product(("flat", "by parameter"), WIDTHS):
        width = states.BF16 if name == "flat" else float(reduced)
        assert states.summed_whole(part, 0.0, width) == pytest.approx(kept[f"{name}, {reduced}"])
