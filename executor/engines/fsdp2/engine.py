"""PyTorch FSDP2 behind the contract of training engines: ZeRO 0, 2 and 3, host offload, LoRA; no compiler.

Ranks are data-parallel all. Which stage means what: build.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from executor.engines import device, lora, states, weights
from executor.engines.fsdp2 import build, checkpoints, limits
from executor.engines.fsdp2.config import shards_of
from executor.engines.learner import Learner
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select
from executor.engines.protocols import EngineSpec, LaterWrites
from executor.engines.scoring import trim
from executor.engines.transformers import heads
from executor.samples import Sample
from executor.weight_transfer.packing import Named


class Fsdp2Engine(Learner):
    """A model whose weights are sharded, with its gradients and optimizer states where it learns."""

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, spec: EngineSpec) -> None:
        """Read this rank's parts; a collective over the default process group."""
        limits.check(spec)
        model = build.sharded(spec, device.own())
        super().__init__(spec, model, model)
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

    def buckets(self, bucket_bytes: int, senders: Collection[int] = (0,)) -> Iterator[list[Named]]:
        """Full weights by Hugging Face name on `senders`, empty lists on other ranks; a collective.

        In the precision of the forward passes, to which shards are rounded before they are gathered.
        """
        here = dist.get_rank() in senders
        if self.spec.lora_rank is not None:
            return self.model.stored.of(lora.merged(self.model, bucket_bytes, here=here))
        dtype = heads.DTYPES[self.spec.precision]
        named = heads.named_tensors(self.model)
        return self.model.stored.of(weights.buckets(named, bucket_bytes, here=here, dtype=dtype))

    def save(self, folder: Path, background: LaterWrites | None = None) -> None:
        """Shards as torch's distributed checkpoint, a file a rank, and a safetensors copy; a collective."""
        assert background is None, "refused by name (executor/refusals.py)"
        checkpoints.save(self, folder)

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        checkpoints.load(self, folder)

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        if weights:
            yield from states.module_tensors(self.model)
        if self.optimizer is not None:
            yield from states.nested_tensors(list(self.optimizer.state.values()))

    def close(self) -> None:
        """Free everything."""
        self._forget()
        self.optimizer = None
        self.trained = []
        del self.root, self.module, self.model
        trim()
