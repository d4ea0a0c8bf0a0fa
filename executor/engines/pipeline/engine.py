"""Training and scoring with pipeline parallelism: DeepSpeed's pipeline engine over the layers of a model.

Stages hold about equal numbers of parameters; shards inside a stage are our own (pipeline_shards.py). Which rank
is which: mesh.py. Legend: B rows of a micro-batch, L tokens of a row, H hidden size, N response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from executor.algorithms import losses, metrics
from executor.engines import checkpoints, states
from executor.engines.deepspeed.config import clips_itself
from executor.engines.learning_rate import learning_rate
from executor.engines.mesh import coordinates, rank_at
from executor.engines.packing import MicroBatch, Select, filler, micro_batches
from executor.engines.pipeline import build
from executor.engines.pipeline.layers import decoder
from executor.engines.pipeline.relay import Relay
from executor.engines.pipeline.weights import catalogue, split, to_rank_0
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.scoring import Scorer, trim
from executor.engines.transformers.heads import DTYPES
from executor.samples import LossSpec, Sample
from rlhfsim.errors import RlhfsimError


@dataclass(slots=True, kw_only=True)
class _Step:
    """What the loss of the step in progress reads and leaves."""

    batch: MiniBatch
    loss: LossSpec
    micro: list[MicroBatch]
    found: metrics.Metrics = field(default_factory=dict)
    norm: float | None = None
    """Of the gradient before clipping, where the engine clips itself."""


class PipelineEngine(states.Movable, Scorer):
    """One rank of a model cut into stages (and shards); all ranks call the same methods in the same order.

    Results of `logprobs`, `values` and `scores` are those of the replica's samples, on all of its ranks.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Every rank reads its own stage; a collective over the default group, one rank a process."""
        self.rank = dist.get_rank()
        self.place = coordinates(self.rank, spec.layout)
        self.dtype = DTYPES[spec.precision]
        source = decoder(spec.model, self.dtype)
        build.check(spec, source)
        with build.owned(None):
            module = build.stages(spec, source, self.rank, self._loss)
        super().__init__(spec, module, module)
        self.stage: Any = module
        module.config = source.config  # for the copy of the model in a checkpoint
        self.weights = build.own_weights(module)
        build.fill(spec, source, self.weights)
        self.grid = module.mpu()
        self._relay = Relay(
            module=module,
            layout=spec.layout,
            rank=self.rank,
            group=self.grid.get_pipe_parallel_group(),
            hidden=source.config.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._owner = rank_at(spec.layout, pp=self.place.pp)
        self._catalogue = catalogue(self.weights if self._owner == self.rank else [], self.rank)
        self._head = build.reader(spec, source, self.weights) if self._last else None
        self.engine = build.engine(spec, module, self._apply) if spec.optimizer else None
        self.steps = 0
        """Optimizer steps taken."""
        self._step: _Step | None = None

    @property
    def _last(self) -> bool:
        """Whether this rank holds the head."""
        return self.place.pp == self.spec.layout.pp - 1

    # --- scoring ------------------------------------------------------------------------------

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        layout = self.spec.layout
        batches = micro_batches(
            samples, layout.micro_batch, packed=self.spec.packing, select=select, device=self.device
        )
        return self._relay.run(batches, lambda hidden, micro: self._read(hidden, micro)[0])

    def _read(self, hidden: Tensor, micro: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(outputs (N,), entropies) of the head from hidden states (B, L, H), on the last stage.

        The head sees the places that count only: logits of prompts and padding are never made.
        """
        assert self._head is not None
        index = micro.index.to(hidden.device)
        found: tuple[Tensor, Tensor] = self._head(hidden.flatten(0, 1)[index], micro.targets, entropy)
        return found

    # --- learning -----------------------------------------------------------------------------

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """One optimizer step, 1F1B over the micro-batches; metrics (those of DeepSpeedEngine) equal on all ranks.

        Replicas may have different numbers of micro-batches, and these different shapes.
        """
        engine, layout = self.learning(), self.spec.layout
        micro = micro_batches(
            batch.samples,
            layout.micro_batch,
            packed=self.spec.packing,
            paired=loss.name == "dpo",
            device=self.device,
        )
        step = self._step = _Step(batch=batch, loss=loss, micro=micro or [filler(self.device)])
        rate = self._set_rate(engine)
        with build.owned(self.grid):
            engine.set_train_batch_size(len(step.micro) * layout.micro_batch * layout.dp)
            engine.train_batch(
                ((one.tokens, one.positions), torch.tensor(number)) for number, one in enumerate(step.micro)
            )
        self.steps += 1
        self._step = None
        norm = self._norm(engine, step)
        skipped = float(not torch.isfinite(torch.tensor(norm)))
        total = metrics.finish(self._reduced(step.found))
        return total | {"grad_norm": norm, "learning_rate": rate, "skipped": skipped}

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """Loss of micro-batch `number` from hidden states (B, L, H), on the last stage.

        DeepSpeed divides by the micro-batches of this replica and averages over replicas. Both are multiplied in,
        which leaves the sum of losses that are normalised over the whole step.
        """
        step = self._step
        assert step is not None
        micro = step.micro[int(number)]
        wants_entropy = bool(step.loss.settings.get("entropy_coefficient"))
        outputs, entropy = self._read(hidden, micro, wants_entropy)
        if micro.empty:  # gradients of zero, so that every replica reduces the same tensors
            return outputs.sum() * 0.0
        rows = {"values" if self.spec.head == "value" else "logprobs": micro.rows(outputs)}
        if entropy.numel():
            rows["entropy"] = micro.rows(entropy)
        tokens, sequences = step.batch.global_tokens, step.batch.global_sequences
        batch = losses.collate(
            micro.samples, num_tokens=tokens, num_sequences=sequences, device=hidden.device, **rows
        )
        value, found = losses.compute(step.loss, batch)
        step.found = metrics.merge(step.found, found | {"loss": value.detach().double()})
        return value * (len(step.micro) * self.spec.layout.dp)

    def _apply(self, update: Any) -> None:
        """Clip where DeepSpeed would not tell the norm, then `update`; not at all where it is not finite."""
        assert self.spec.optimizer is not None
        if not clips_itself(self.spec.layout, self.spec.precision):
            return update()  # type: ignore[no-any-return]
        from deepspeed.runtime.utils import clip_grad_norm_

        assert self._step is not None
        limit = self.spec.optimizer.max_grad_norm
        self._step.norm = float(clip_grad_norm_(self.stage.parameters(), limit, mpu=self.grid))
        if torch.isfinite(torch.tensor(self._step.norm)):
            return update()  # type: ignore[no-any-return]
        self.learning().zero_grad()
        return None

    def _norm(self, engine: Any, step: _Step) -> float:
        """Of the gradient before clipping; inf where it is not finite and the step was skipped."""
        if getattr(engine.optimizer, "overflow", False):
            return float("inf")
        return float(engine.get_global_grad_norm() if step.norm is None else step.norm)

    def _set_rate(self, engine: Any) -> float:
        assert self.spec.optimizer is not None
        rate = learning_rate(self.spec.optimizer, self.steps, self.spec.total_steps)
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _reduced(self, mine: metrics.Metrics) -> metrics.Metrics:
        """Metrics of all replicas, from their last stages; of shards only the first counts."""
        counts = self._last and self.place.tp == 0
        everyone: list[metrics.Metrics] = [{}] * dist.get_world_size()
        own = {name: value.cpu() for name, value in mine.items()} if counts else {}
        dist.all_gather_object(everyone, own)
        total: metrics.Metrics = {}
        for found in everyone:
            total = metrics.merge(total, found)
        return total

    def learning(self) -> Any:
        """DeepSpeed's engine.

        Raises:
            RlhfsimError: an engine that only infers.
        """
        if self.engine is None:
            raise RlhfsimError(
                "engine-only-infers",
                f"the engine of {self.spec.role} has no optimizer",
                help="give EngineSpec.optimizer",
            )
        return self.engine

    # --- weights and state --------------------------------------------------------------------

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights by Hugging Face name on rank 0, empty lists elsewhere; a collective over all ranks.

        Stage after stage; shards of a stage are gathered, and its first rank sends to rank 0.
        """
        return to_rank_0(
            split(self._catalogue, self.dtype.itemsize, bucket_bytes),
            self.weights if self.place.dp == 0 else [],
            rank=self.rank,
            owner=self._owner,
            group=self.grid.get_slice_parallel_group(),
            dtype=self.dtype,
            device=self.device,
        )

    def adapters(self) -> list[tuple[str, Tensor]]:
        """Refused: LoRA does not run with pipeline parallelism."""
        raise RlhfsimError("pipeline-lora", "LoRA does not run with pipeline parallelism", help="use pp: 1")

    def save(self, folder: Path) -> None:
        """One file a rank with everything, and a safetensors copy by rank 0; a collective."""
        checkpoints.save(self, folder)

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        checkpoints.load(self, folder)

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        if self.engine is None:
            tensors = states.module_tensors(self.stage) if weights else iter(())
        else:
            self.engine.reset_activation_shape()  # its buffers are made again when needed
            tensors = states.engine_tensors(self.engine, weights=weights)
        return (t for t in tensors if not t.is_meta)

    def close(self) -> None:
        """Free everything."""
        self._forget()
        if self.engine is not None:
            self.engine.destroy()
        build.leave(self.stage)
        del (
            self.engine,
            self.stage,
            self.module,
            self.model,
            self.weights,
            self.grid,
            self._relay,
            self._head,
        )
        trim()
