"""PyTorch FSDP2 behind the contract of training engines: ZeRO 0, 2 and 3, host offload, LoRA; no compiler.

Ranks are data-parallel all. A model is made without storage, cut by `fully_shard`, then each rank reads its
own parts.

    ZeRO-3  shards; a layer's weights are freed after its forward pass, gathered again for the backward pass
    ZeRO-2  shards; weights stay gathered from the first forward pass of a step to its last backward pass
    HSDP    the same in groups of `shards` ranks, a copy each, which sum their gradients once a step
    ZeRO-0  a mesh of replicas of one shard each: whole FP32 weights, gradients are summed once a step

What a trained role shards are FP32 weights, masters at once; layers compute in a BF16 copy that is gathered.
Source: PyTorch `fully_shard`; the settings are those of verl and torchtitan.

A checkpoint has shards of weights and optimizer in torch's distributed format, whose metadata is written last
and under a name of its own: a folder with metadata is whole. Next to it lies a rank's file
(engines/checkpoints.py) with step counter and random streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from executor.engines import device, lora, states
from executor.engines.fsdp2.config import check, fsdp2_config, shards_of
from executor.engines.learner import Learner
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import heads
from executor.engines.transformers.shards import EmptyParameters
from executor.samples import Sample

SHARDS = "shards"


class Fsdp2Engine(Learner):
    """A model whose weights are sharded, with its gradients and optimizer states where it learns."""

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, spec: EngineSpec) -> None:
        """Read this rank's parts; a collective over the default process group."""
        check(spec)
        model = sharded(spec, device.own())
        super().__init__(spec, model, model)
        self.sent_as = heads.DTYPES[spec.precision]
        self.root: FSDPModule = model  # type: ignore[assignment]  # fully_shard changes its class
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if spec.optimizer is not None:
            self.optimizer = adam(spec, self.trained)

    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        outputs = super()._outputs(samples, select)
        for module in sharded_modules(self.model):
            module.reshard()  # what stays gathered for a backward pass that does not come
        return outputs

    def _rounds(self, mine: int) -> int:
        """A forward pass of shards is a collective, so all ranks run as many as the busiest."""
        return self._largest(mine) if self.spec.layout.zero else mine

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Shards: gradients are reduced every time, so that no rank holds whole ones; replicas: once."""
        zero = self.spec.layout.zero
        self.root.set_requires_gradient_sync(last or zero > 0)
        if self.spec.layout.shards:  # copies add up once
            self.root.set_requires_all_reduce(last)
        self.root.set_reshard_after_backward(last or zero == 3)
        loss.backward()

    def _update(self) -> None:
        assert self.spec.optimizer is not None
        gradients = [states.own_part(p.grad) for p in self.trained if p.grad is not None]
        self._norm = self._global_norm(gradients)
        if math.isfinite(self._norm):
            torch._foreach_mul_(gradients, min(1.0, self.spec.optimizer.max_grad_norm / (self._norm + 1e-6)))
            self._optimizer().step()
        else:
            self._norm = math.inf
        self._optimizer().zero_grad()

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Norm of the gradient that is spread over the ranks of a copy: L2 of the shards' norms."""
        square = torch.stack(torch._foreach_norm(gradients)).square().sum().to(self.device)
        if self.spec.layout.zero:
            dist.all_reduce(square)
            square *= shards_of(self.spec.layout) / dist.get_world_size()
        return math.sqrt(float(square))

    def _saved(self, folder: Path) -> Mapping[str, Any]:
        save_shards(self._tensors(), checkpoint_id=folder / SHARDS)
        return {}

    def _put_back(self, folder: Path, others: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> None:
        reader = FileSystemReader(folder / SHARDS)
        self._make_states(set(reader.read_metadata().state_dict_metadata))
        load_shards(self._tensors(), storage_reader=reader)

    def _tensors(self) -> dict[str, Any]:
        """Weights and optimizer states by name, as they lie in memory: loading fills them."""
        named: dict[str, Any] = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        states: dict[Tensor, Any] = {} if self.optimizer is None else dict(self.optimizer.state)
        for name, parameter in self.model.named_parameters():
            for key, value in states.get(parameter, {}).items():
                named[f"optimizer.{key}.{name}"] = value
        return named

    def _make_states(self, stored: set[str]) -> None:
        """Optimizer states that a step would make, for those that are stored; none where there are none."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        fused = self.optimizer.defaults["fused"]
        for name, parameter in self.model.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"optimizer.{key}.{name}" not in stored:
                    continue
                empty = torch.zeros_like(parameter).detach()
                counter = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
                self.optimizer.state[parameter][key] = counter if key == "step" else empty

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        if weights:
            yield from states.module_tensors(self.model)
        if self.optimizer is not None:
            yield from states.nested_tensors(list(self.optimizer.state.values()))

    def close(self) -> None:
        """Free everything."""
        self.optimizer, self.trained = None, []
        del self.root
        super().close()


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
        start, part = _start(own), states.own_part(own.detach())
        if ".lora_" in name:
            part.copy_(lora.drawn(name, own.shape, generator)[start : start + part.shape[0]])
        elif part.numel():
            assert unread is not None
            unread.files.read(unread.names[name.replace(".base_layer.", ".")], part, start=start)
    for module in model.modules():  # a tied matrix is in two
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:
                setattr(module, name, filled[parameter])


def _start(parameter: nn.Parameter) -> int:
    """The first row that this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0
    spread = parameter.device_mesh, parameter.placements
    return int(compute_local_shape_and_global_offset(parameter.shape, *spread)[1][0])
