"""What engines that learn share, whatever library updates their weights: the optimizer step and its metrics.

Legend: N response tokens of a micro-batch, T of its longest response.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.algorithms import losses, metrics
from executor.engines import checkpoints, lora, states, weights
from executor.engines.optimizers import learning_rate
from executor.engines.packing import MicroBatch, filler
from executor.engines.protocols import LaterWrites, MiniBatch
from executor.engines.transformers.heads import named_tensors
from executor.samples import PAIRED, Floats, LossSpec, Sample
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.roles import Head

OUTPUTS: Mapping[Head, str] = {"causal": "logprobs", "value": "values", "score": "scores"}
"""Head -> what a loss calls its outputs."""


class Learner(states.Movable):
    """A model that learns, or only infers where its spec has no optimizer.

    A step has as many micro-batches as the rank with the most of them, the others run empty ones, so that
    collectives match.
    """

    steps: int = 0
    """Optimizer steps taken."""
    _norm: float
    """Norm of the last step's gradient, before clipping; inf where the step was skipped as not finite."""

    sent_as: torch.dtype | None = None
    """Precision to which shards are rounded before they are gathered; None: as they are."""

    def buckets(self, bucket_bytes: int, senders: Collection[int] = (0,)) -> Iterator[list[Named]]:
        """Full weights by Hugging Face name on `senders`, empty lists on other ranks; a collective."""
        here = dist.get_rank() in senders
        if self.spec.lora_rank is not None:
            return self.model.stored.of(lora.merged(self.model, bucket_bytes, here=here))
        named = named_tensors(self.model)
        full = weights.buckets(named, bucket_bytes, here=here, dtype=self.sent_as, whole=self._whole)
        return self.model.stored.of(full)

    def _whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """All of a parameter, of which `tensor` was gathered over data-parallel ranks."""
        return tensor

    @abstractmethod
    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW of some kind, whose rate is set before every step."""

    @abstractmethod
    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Gradients of one micro-batch, whose loss is a share of a sum over all ranks; `last` of the step."""

    @abstractmethod
    def _update(self) -> None:
        """Clip, remember the norm and update the weights; not at all where the gradient is not finite."""

    def save(self, folder: Path, background: LaterWrites | None = None) -> None:
        """Everything that `load` needs, and a safetensors copy by rank 0; a collective.

        `background` writes what it has memory for when this has returned.
        """
        checkpoints.write(self, folder, self._saved(folder), background)

    def load(self, folder: Path) -> None:
        """Undo `save`.

        Raises:
            RlhfsimError: no file of a rank, or one of another layout, precision or head.
        """
        others = checkpoints.read_all(self, folder)
        self._put_back(folder, others, {} if others else checkpoints.read(self, folder))
        dist.barrier()

    @abstractmethod
    def _saved(self, folder: Path) -> Mapping[str, Any]:
        """The states that go into this rank's file; what has files of its own is written into `folder`."""

    @abstractmethod
    def _put_back(self, folder: Path, others: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> None:
        """Take the states of this rank's file over, or of the files of `others` where not as many saved."""

    def _owned(self) -> AbstractContextManager[None]:
        """Inside, module variables of the library are this engine's."""
        return nullcontext()

    def _counts(self) -> bool:
        """Whether metrics of this rank count: those of ranks that share samples do once."""
        return True

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
        for group in self._optimizer().param_groups:
            group["lr"] = rate
        with self._owned():
            micro = self.micro_batches(
                batch.samples,
                select="last" if self.spec.head == "score" else "tokens",
                paired=loss.name in PAIRED,
            )
            sums = self._accumulate(micro, batch, loss)
            self.steps += 1
            total = metrics.finish(self._reduced(sums))
        skipped = float(not math.isfinite(self._norm))
        return total | {"grad_norm": self._norm, "learning_rate": rate, "skipped": skipped}

    def parts_s(self) -> Mapping[str, float]:
        """Seconds of the steps since they were asked for last, by `forward`, `loss`, `backward` and `update`.

        Nothing on a GPU, which computes a part when its call has long returned.
        """
        parts, self._parts = self._parts, {}
        return parts

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cpu":
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - begin

    def _accumulate(self, micro: list[MicroBatch], batch: MiniBatch, loss: LossSpec) -> metrics.Metrics:
        """Gradients of all micro-batches, then the update; this rank's metrics."""
        rounds = self._largest(len(micro))
        micro += [filler(self.device)] * (rounds - len(micro))
        sums: metrics.Metrics = {}
        for number, one in enumerate(micro):
            with self._part("forward"):
                outputs, entropy = self.call(one, bool(loss.settings.get("entropy_coefficient")))
            value, counts = self._loss(outputs, entropy, one, batch, loss)
            with self._part("backward"):
                self._backward(value, last=number == rounds - 1)
            sums = metrics.merge(sums, counts)
        with self._part("update"):
            self._update()
        return sums

    def _largest(self, mine: int) -> int:
        """Over all ranks."""
        count = torch.tensor(mine, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return int(count)

    def _loss(
        self, outputs: Tensor, entropy: Tensor, micro: MicroBatch, batch: MiniBatch, loss: LossSpec
    ) -> tuple[Tensor, metrics.Metrics]:
        """Loss and metrics of a micro-batch from the head's outputs (N,) and entropies."""
        if micro.empty:
            # both outputs, as in other ranks: ZeRO-3 fetches weights in the order of the backward pass
            return (outputs.sum() + entropy.sum()) * 0.0, {}
        rows = {OUTPUTS[self.spec.head]: outputs if self.spec.head == "score" else micro.rows(outputs)}
        if entropy.numel():
            rows["entropy"] = micro.rows(entropy)
        tokens, sequences = batch.global_tokens, batch.global_sequences
        collated = losses.collate(
            micro.samples, num_tokens=tokens, num_sequences=sequences, device=outputs.device, **rows
        )
        with self._part("loss"):
            value, sums = losses.compute(loss, collated)
        return value, sums | {"loss": value.detach().double()}

    def _reduced(self, mine: metrics.Metrics) -> metrics.Metrics:
        """Metrics of all ranks that count."""
        everyone: list[metrics.Metrics] = [{}] * dist.get_world_size()
        dist.all_gather_object(
            everyone, {name: value.cpu() for name, value in mine.items()} if self._counts() else {}
        )
        total: metrics.Metrics = {}
        for sums in everyone:
            total = metrics.merge(total, sums)
        bad = [rank for rank, sums in enumerate(everyone) if not metrics.finite(sums)]
        return total | ({metrics.NOT_FINITE: torch.tensor(float(bad[0]))} if bad else {})

    def adapters(self, senders: Collection[int] = (0,)) -> list[Named]:
        """LoRA matrices as `<weight>.lora_A` and `.lora_B` on `senders`, nothing elsewhere; a collective."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        return lora.matrices(self.model, here=dist.get_rank() in senders)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probs of the frozen base, its adapters off."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        with lora.without(self.model):
            return self.logprobs(samples)
