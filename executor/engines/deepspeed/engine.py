"""DeepSpeed behind the contract of training engines: ZeRO 0-3, AutoTP, host offload, LoRA.

All ranks of the process group build one engine together; ranks that share a tensor-parallel group get the
same samples (see mesh.py). The engine sets the accumulation boundary itself: a step has as many micro-batches
as the rank with the most of them, the others run empty ones, so that collectives match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from executor.algorithms import metrics
from executor.engines.deepspeed import lora, process_groups, weights
from executor.engines.deepspeed.config import ds_config
from executor.engines.deepspeed.learner import Learner
from executor.engines.deepspeed.optimizers import adam
from executor.engines.packing import MicroBatch, Select, filler
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.transformers import heads
from executor.samples import Floats, LossSpec, Sample
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError


class DeepSpeedEngine(Learner):
    """A model whose states are sharded; without an optimizer only its weights (ZeRO-3, AutoTP)."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model, shard it and its optimizer states; a collective."""
        model = heads.load(
            spec.model, spec.head, spec.precision, temperature=spec.temperature, seed=spec.seed
        )
        with process_groups.of_degree(spec.layout.tp):
            self.engine = _initialize(spec, model)
        super().__init__(spec, model, self.engine)
        self._shards = weights.shards(model) if spec.layout.tp > 1 else {}

    def _owned(self) -> AbstractContextManager[None]:
        return process_groups.of_degree(self.spec.layout.tp)

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        with self._owned():
            return super()._outputs(samples, select)

    def _rounds(self, mine: int) -> int:
        """Under ZeRO-3 a forward is a collective, so all ranks run as many as the busiest."""
        return self._largest(mine) if self.spec.layout.zero == 3 else mine

    def _largest(self, mine: int) -> int:
        """Over all ranks."""
        count = torch.tensor(mine, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return int(count)

    def _accumulate(self, micro: list[MicroBatch], batch: MiniBatch, loss: LossSpec) -> metrics.Metrics:
        rounds = self._largest(len(micro))
        micro += [filler(self.device)] * (rounds - len(micro))
        sums: metrics.Metrics = {}
        for number, one in enumerate(micro):
            self.engine.set_gradient_accumulation_boundary(number == rounds - 1)
            outputs, entropy = self.call(one, bool(loss.settings.get("entropy_coefficient")))
            value, counts = self._loss(outputs, entropy, one, batch, loss)
            # DeepSpeed averages over data-parallel ranks, the loss is a sum over them
            self.engine.backward(value * self.spec.layout.dp)
            sums = metrics.merge(sums, counts)
        self._apply(self.engine.step)
        return sums

    def _counts(self) -> bool:
        return dist.get_rank() % self.spec.layout.tp == 0

    def buckets(self, bucket_bytes: int) -> Iterator[list[Named]]:
        """Full weights by Hugging Face name on rank 0, empty lists elsewhere; a collective."""
        first = dist.get_rank() == 0
        if self.spec.lora_rank is not None:
            return lora.merged(self.model, bucket_bytes, first=first)
        named = heads.named_parameters(self.model)
        return weights.buckets(named, self._shards, bucket_bytes, first=first)

    def adapters(self) -> list[Named]:
        """LoRA matrices as `<weight>.lora_A` and `.lora_B` on rank 0, nothing elsewhere; a collective."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        return lora.matrices(self.model, first=dist.get_rank() == 0)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probs of the frozen base, its adapters off."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        with lora.without(self.model):
            return self.logprobs(samples)


def _initialize(spec: EngineSpec, model: heads.HeadedModel) -> Any:
    """DeepSpeed's engine over the model; a collective."""
    config = ds_config(spec.layout, spec.optimizer, spec.precision, cuda=torch.cuda.is_available())
    if spec.optimizer is None:
        engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
        model.requires_grad_(False)  # not before: AutoTP hooks gradients
        return engine
    if spec.lora_rank is not None:
        if spec.layout.tp > 1:
            raise RlhfsimError(
                "lora-tensor-parallel",
                "LoRA does not run with tensor parallelism, "
                f"the layout of {spec.role} has tp={spec.layout.tp}",
                help="use tp: 1 with more dp, or train all weights",
            )
        lora.attach(model, spec.lora_rank, spec.seed)
    if spec.layout.recompute == "full":
        cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(
        model=model,
        optimizer=adam(spec, trained),
        model_parameters=trained,
        config=config,
        dist_init_required=False,
    )[0]
