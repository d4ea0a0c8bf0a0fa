"""What engines on DeepSpeed share, with a pipeline and without: the optimizer step, its metrics, checkpoints.

Legend: N response tokens of a micro-batch, T of its longest response.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from executor.algorithms import losses, metrics
from executor.engines import states
from executor.engines.deepspeed import checkpoints
from executor.engines.deepspeed.config import clips_itself
from executor.engines.deepspeed.optimizers import learning_rate
from executor.engines.packing import MicroBatch
from executor.engines.protocols import MiniBatch
from executor.engines.scoring import ForwardPasses, trim
from executor.samples import LossSpec
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError


class Learner(states.Movable, ForwardPasses):
    """A model behind DeepSpeed that learns, or only infers where its spec has no optimizer."""

    engine: Any
    """DeepSpeed's; None: a pipeline that only infers."""
    steps: int = 0
    """Optimizer steps taken."""
    _norm: float
    """Of the last step's gradient, before clipping; inf where it is not finite and the step was skipped."""

    @abstractmethod
    def buckets(self, bucket_bytes: int) -> Iterator[list[Named]]:
        """Full weights by Hugging Face name on rank 0, empty lists elsewhere; a collective."""

    @abstractmethod
    def _owned(self) -> AbstractContextManager[None]:
        """Inside, DeepSpeed's module variables are this engine's."""

    @abstractmethod
    def _accumulate(self, micro: list[MicroBatch], batch: MiniBatch, loss: LossSpec) -> metrics.Metrics:
        """Gradients of all micro-batches, then `_apply`; this rank's metrics."""

    @abstractmethod
    def _counts(self) -> bool:
        """Whether metrics of this rank count: those of ranks that share samples do once."""

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """One optimizer step on all ranks' samples; metrics equal on all ranks.

        `loss` is the loss of the whole step, `grad_norm` the norm before clipping; a step whose gradient is
        not finite is skipped: `skipped` is then 1 and the caller decides.

        Raises:
            RlhfsimError: an engine that only infers.
        """
        if self.spec.optimizer is None:
            raise RlhfsimError(
                "engine-only-infers",
                f"the engine of {self.spec.role} has no optimizer",
                help="give EngineSpec.optimizer",
            )
        rate = learning_rate(self.spec.optimizer, self.steps, self.spec.total_steps)
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = rate
        with self._owned():
            micro = self.micro_batches(batch.samples, paired=loss.name == "dpo")
            sums = self._accumulate(micro, batch, loss)
            self.steps += 1
            total = metrics.finish(self._reduced(sums))
        skipped = float(not math.isfinite(self._norm))
        return total | {"grad_norm": self._norm, "learning_rate": rate, "skipped": skipped}

    def _loss(
        self, outputs: Tensor, entropy: Tensor, micro: MicroBatch, batch: MiniBatch, loss: LossSpec
    ) -> tuple[Tensor, metrics.Metrics]:
        """Loss and metrics of a micro-batch from the head's outputs (N,) and entropies."""
        if micro.empty:
            # both outputs, as in other ranks: ZeRO-3 fetches weights in the order of the backward pass
            return (outputs.sum() + entropy.sum()) * 0.0, {}
        rows = {"values" if self.spec.head == "value" else "logprobs": micro.rows(outputs)}
        if entropy.numel():
            rows["entropy"] = micro.rows(entropy)
        tokens, sequences = batch.global_tokens, batch.global_sequences
        collated = losses.collate(
            micro.samples, num_tokens=tokens, num_sequences=sequences, device=outputs.device, **rows
        )
        value, sums = losses.compute(loss, collated)
        return value, sums | {"loss": value.detach().double()}

    def _apply(self, update: Callable[[], object]) -> None:
        """Clip where DeepSpeed would not tell the norm, then `update`; not at all where it is not finite."""
        assert self.spec.optimizer is not None
        if not clips_itself(self.spec.layout, self.spec.precision):
            update()
            overflow = getattr(self.engine.optimizer, "overflow", False)
            self._norm = math.inf if overflow else float(self.engine.get_global_grad_norm())
            return
        from deepspeed.runtime.utils import clip_grad_norm_

        limit = self.spec.optimizer.max_grad_norm
        self._norm = float(clip_grad_norm_(self.model.parameters(), limit, mpu=self.engine.mpu))
        if math.isfinite(self._norm):
            update()
        else:
            self._norm = math.inf
            self.engine.zero_grad()

    def _reduced(self, mine: metrics.Metrics) -> metrics.Metrics:
        """Metrics of all ranks that count."""
        everyone: list[metrics.Metrics] = [{}] * dist.get_world_size()
        dist.all_gather_object(
            everyone, {name: value.cpu() for name, value in mine.items()} if self._counts() else {}
        )
        total: metrics.Metrics = {}
        for sums in everyone:
            total = metrics.merge(total, sums)
        return total

    def save(self, folder: Path) -> None:
        """One file a rank with everything, and a safetensors copy by rank 0; a collective."""
        checkpoints.save(self, folder)

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        checkpoints.load(self, folder)

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        return states.engine_tensors(self.engine, weights=weights)

    def close(self) -> None:
        """Free everything."""
        self._forget()
        if self.engine is not None:
            self.engine.destroy()
        del self.engine, self.module, self.model
        trim()
