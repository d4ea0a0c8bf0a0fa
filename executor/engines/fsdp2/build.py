"""How a model is sharded: made without storage, cut by `fully_shard`, then each rank reads its own parts.

    ZeRO-3  shards; a layer's weights are freed after its forward pass, gathered again for the backward pass
    ZeRO-2  shards; weights stay gathered from the first forward pass of a step to its last backward pass
    HSDP    the same in groups of `shards` ranks, a copy each, which sum their gradients once a step
    ZeRO-0  a mesh of replicas of one shard each: whole FP32 weights, gradients are summed once a step

What a trained role shards are FP32 weights, masters at once; layers compute in a BF16 copy that is gathered.
Source: PyTorch `fully_shard`; the settings are those of verl and torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from executor.engines import lora
from executor.engines.fsdp2.config import fsdp2_config
from executor.engines.protocols import EngineSpec
from executor.engines.states import own_part
from executor.engines.transformers import heads
from executor.engines.transformers.shards import EmptyParameters


def sharded(spec: EngineSpec, device: torch.device) -> heads.HeadedModel:
    """The model with this rank's parts of its weights; a collective."""
    trained, config = spec.optimizer is not None, fsdp2_config(spec, cuda=device.type == "cuda")
    model, unread = heads.outline(
        spec.model, spec.head, config["weights"], temperature=spec.temperature, seed=spec.seed
    )
    if trained and spec.lora_rank is not None:
        lora.attach(model, spec.lora_rank, spec.seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    model.requires_grad_(False) if not trained else model.train()
    if config["recompute"]:
        cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": mesh(device.type, shards=config["mesh"]["shard"]),
        "reshard_after_forward": config["reshard_after_forward"],
    }
    if mixed := config["mixed_precision"]:
        dtypes: dict[str, Any] = {name: heads.DTYPES[dtype] for name, dtype in mixed.items()}
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    if config["offload"]:
        options["offload_policy"] = CPUOffloadPolicy(**config["offload"])
    for layer in cast(Any, model.backbone).layers:
        fully_shard(layer, **options)
    fully_shard(model, **options | {"reshard_after_forward": False})
    for module in sharded_modules(model):  # the loss is a sum over ranks
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    _fill(model, unread, spec.seed, torch.device("cpu") if config["offload"] else device)
    return model


@lru_cache(maxsize=8)
def mesh(device: str, *, shards: int) -> DeviceMesh:
    """All ranks of the process group, `shards` of them to a replica; a collective the first time."""
    world = dist.get_world_size()
    if shards == world:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def forget() -> None:
    """Drop all meshes: the process group is about to end."""
    mesh.cache_clear()


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Modules that gather their weights together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _fill(model: heads.HeadedModel, unread: EmptyParameters | None, seed: int, device: torch.device) -> None:
    """Give parameters storage, and this rank's part of what the files have or `seed` draws (adapters)."""
    generator = torch.Generator().manual_seed(seed)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        filled[parameter] = own = nn.Parameter(
            torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
        )
        start, part = _start(own), own_part(own.detach())
        if ".lora_" in name:
            part.copy_(lora.drawn(name, own.shape, generator)[start : start + part.shape[0]])
        elif part.numel():
            assert unread is not None
            unread.files.read(unread.names[name.replace(".base_layer.", ".")], part, start=start)
    for module in model.modules():  # a tied matrix stands in two
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:
                setattr(module, name, filled[parameter])


def _start(parameter: nn.Parameter) -> int:
    """The first row that this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0
    spread = parameter.device_mesh, parameter.placements
    return int(compute_local_shape_and_global_offset(parameter.shape, *spread)[1][0])
