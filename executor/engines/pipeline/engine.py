"""Training and scoring with pipeline parallelism: DeepSpeed's pipeline engine over the layers of a model.

Stages hold about equal numbers of parameters; shards inside a stage are our own (shards.py). Which rank is
which: mesh.py. Legend: B rows of a micro-batch, L tokens of a row, H hidden size, N response tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from executor.algorithms import metrics
from executor.engines import states
from executor.engines.deepspeed import process_groups
from executor.engines.deepspeed.learner import DeepSpeedLearner
from executor.engines.mesh import coordinates, rank_at
from executor.engines.packing import MicroBatch, Select, filler
from executor.engines.pipeline import build
from executor.engines.pipeline.layers import decoder
from executor.engines.pipeline.shards import gathered
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.scoring import evaluated, trim
from executor.engines.transformers.heads import DTYPES
from executor.engines.weights import grouped
from executor.samples import LossSpec, Sample
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError


@dataclass(slots=True, kw_only=True)
class _RunningStep:
    """What the loss of the step in progress reads and leaves."""

    batch: MiniBatch
    loss: LossSpec
    micro: list[MicroBatch]
    sums: metrics.Metrics = field(default_factory=dict)


class PipelineEngine(DeepSpeedLearner):
    """One rank of a model cut into stages (and shards); all ranks call the same methods in the same order.

    Results of `logprobs`, `values` and `scores` are those of the replica's samples, on all of its ranks.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Every rank reads its own stage; a collective over the default group, one rank a process."""
        process_groups.join()
        self.rank = dist.get_rank()
        self.place = coordinates(self.rank, spec.layout)
        self.dtype = DTYPES[spec.precision]
        source = decoder(spec.model, self.dtype)
        build.check(spec, source)
        with process_groups.of_pipeline(None):
            module = build.stages(spec, source, self.rank, self._stage_loss)
        super().__init__(spec, module, module)
        module.config = source.config  # for the copy of the model in a checkpoint
        self.weights = build.own_weights(module)
        build.fill(spec, source, self.weights)
        self.grid = module.mpu()
        self._hidden = source.config.hidden_size
        self._owner = rank_at(spec.layout, pp=self.place.pp)
        self._catalogue = build.catalogue(self.weights if self._owner == self.rank else [], self.rank)
        self._head = build.reader(spec, source, self.weights) if self._last else None
        self.engine = build.engine(spec, module, self._apply) if spec.optimizer else None
        self._step: _RunningStep | None = None

    def _owned(self) -> AbstractContextManager[None]:
        return process_groups.of_pipeline(self.grid)

    @property
    def _last(self) -> bool:
        """Whether this rank holds the head."""
        return self.place.pp == self.spec.layout.pp - 1

    def _counts(self) -> bool:
        return self._last and self.place.tp == 0

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        """Every micro-batch with its results, (N,) fp32 of its N places, on every rank of the pipeline.

        DeepSpeed's eval_batch needs as many micro-batches on every replica and a loss, and keeps all logits.
        Here each stage takes a micro-batch when the one before hands it over and goes on to the next.
        """
        batches = self.micro_batches(samples, select=select, tokens=self.spec.score_tokens)
        outputs = []
        with evaluated(self.model), torch.no_grad():
            for micro in batches:
                hidden = self._stage_output(micro)
                if hidden is not None:
                    outputs.append(self._read(hidden, micro)[0])
        sizes = [len(micro.index) for micro in batches]
        whole = torch.cat(outputs).float() if outputs else torch.empty(sum(sizes), device=self.device)
        if sum(sizes):
            last = self._rank_of_stage(self.spec.layout.pp - 1)
            dist.broadcast(whole, src=last, group=self.grid.get_pipe_parallel_group())
        return list(zip(batches, whole.split(sizes), strict=True))

    def _stage_output(self, micro: MicroBatch) -> Tensor | None:
        """Hidden states (B, L, H) on the last stage, else None."""
        if self.place.pp == 0:
            received = micro.tokens.to(self.device)
        else:
            shape = (*micro.tokens.shape, self._hidden)
            received = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.recv(received, src=self._rank_of_stage(self.place.pp - 1))
        output: Any = cast(Any, self.model).forward((received, micro.positions.to(self.device)))
        if self._last:
            return cast(Tensor, output)
        dist.send(output[0].contiguous(), dst=self._rank_of_stage(self.place.pp + 1))
        return None

    def _rank_of_stage(self, stage: int) -> int:
        """In this pipeline: same replica, same shard."""
        return rank_at(self.spec.layout, pp=stage, dp=self.place.dp, tp=self.place.tp)

    def _read(self, hidden: Tensor, micro: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(outputs (N,), entropies) of the head from hidden states (B, L, H), on the last stage.

        The head sees the places that count only: logits of prompts and padding are never made.
        """
        assert self._head is not None
        index = micro.index.to(hidden.device)
        outputs: tuple[Tensor, Tensor] = self._head(hidden.flatten(0, 1)[index], micro.targets, entropy)
        return outputs

    def _accumulate(self, micro: list[MicroBatch], batch: MiniBatch, loss: LossSpec) -> metrics.Metrics:
        """1F1B; replicas may have different numbers of micro-batches, and these different shapes."""
        layout = self.spec.layout
        step = self._step = _RunningStep(batch=batch, loss=loss, micro=micro or [filler(self.device)])
        self.engine.set_train_batch_size(len(step.micro) * layout.micro_batch * layout.dp)
        self.engine.train_batch(
            ((one.tokens, one.positions), torch.tensor(number)) for number, one in enumerate(step.micro)
        )
        self._step = None
        return step.sums

    def _stage_loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """Loss of micro-batch `number` from hidden states (B, L, H), on the last stage.

        DeepSpeed divides by the micro-batches of this replica and averages over replicas. Both are multiplied
        in, which leaves the sum of losses that are normalised over the whole step.
        """
        step = self._step
        assert step is not None
        micro = step.micro[int(number)]
        outputs, entropy = self._read(hidden, micro, bool(step.loss.settings.get("entropy_coefficient")))
        value, sums = self._loss(outputs, entropy, micro, step.batch, step.loss)
        step.sums = metrics.merge(step.sums, sums)
        return value * (len(step.micro) * self.spec.layout.dp)

    def buckets(self, bucket_bytes: int, senders: Collection[int] = (0,)) -> Iterator[list[Named]]:
        """Full weights by Hugging Face name on `senders`, empty lists on other ranks; a collective.

        Stage after stage; shards of a stage are gathered, and its first rank hands them out. A tensor larger
        than `bucket_bytes` has a bucket of its own.
        """
        held = {weight.name: weight for weight in self.weights if self.place.dp == 0}
        sizes = ((one, self.dtype.itemsize * torch.Size(one.shape).numel()) for one in self._catalogue)
        for bucket in grouped(sizes, bucket_bytes):
            received = []
            for entry in bucket:
                whole = None
                if entry.owner == self._owner and entry.name in held:
                    mine = held[entry.name]
                    whole = gathered(mine.parameter, mine.cut, self.grid.get_slice_parallel_group())
                if self.rank != entry.owner and (self.rank in senders or len(senders) > 1):
                    whole = torch.empty(entry.shape, dtype=self.dtype, device=self.device)
                if whole is not None:
                    build.pass_on(whole, entry.owner, self.rank, senders)
                if whole is not None and self.rank in senders:
                    received.append((entry.name, whole))
            yield received

    def adapters(self, senders: Collection[int] = (0,)) -> list[Named]:
        """Refused: LoRA does not run with pipeline parallelism."""
        raise RlhfsimError("pipeline-lora", "LoRA does not run with pipeline parallelism", help="use pp: 1")

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        if self.engine is None:
            tensors = states.module_tensors(self.model) if weights else iter(())
        else:
            self.engine.reset_activation_shape()  # its buffers are made again when needed
            tensors = super()._movable(weights=weights)
        return (t for t in tensors if not t.is_meta)

    def close(self) -> None:
        """Free everything."""
        stage = self.model
        super().close()
        build.leave(stage)
        del stage, self.weights, self.grid, self._head
        trim()
