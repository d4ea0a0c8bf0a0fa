"""PyTorch FSDP2 behind the contract of training engines: ZeRO 0, 2 and 3, host offload, LoRA; no compiler.

Ranks are data-parallel all. Which stage means what: build.py. A checkpoint has shards of weights and
optimizer in torch's distributed format, whose metadata is written last and under a name of its own: a folder
with metadata is whole. Beside it lies a rank's file (engines/checkpoints.py) with step counter and random
streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule

from executor.engines import device, states
from executor.engines.fsdp2 import build
from executor.engines.fsdp2.config import check, shards_of
from executor.engines.learner import Learner
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import heads
from executor.samples import Sample

SHARDS = "shards"


class Fsdp2Engine(Learner):
    """A model whose weights are sharded, with its gradients and optimizer states where it learns."""

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, spec: EngineSpec) -> None:
        """Read this rank's parts; a collective over the default process group."""
        check(spec)
        model = build.sharded(spec, device.own())
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
        for module in build.sharded_modules(self.model):
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
