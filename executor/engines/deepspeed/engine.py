"""DeepSpeed behind the contract of training engines: ZeRO 0-3, AutoTP, host offload, LoRA.

All ranks of the process group build one engine together; ranks that share a tensor-parallel group get the same
samples (see mesh.py). The engine sets the accumulation boundary itself: a step has as many micro-batches as the
rank with the most of them, the others run empty ones, so that collectives match.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from executor.algorithms import losses, metrics
from executor.engines import checkpoints, states, weights
from executor.engines.deepspeed.config import clips_itself, ds_config
from executor.engines.deepspeed.process_groups import Groups
from executor.engines.learning_rate import learning_rate
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select, filler, micro_batches
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.scoring import Scorer, trim
from executor.engines.transformers import heads, lora
from executor.samples import Floats, LossSpec, Sample
from rlhfsim.errors import RlhfsimError

logger = logging.getLogger(__name__)


class DeepSpeedScorer(states.Movable, Scorer):
    """Forward passes of a model whose weights are sharded: ZeRO-3 over data-parallel ranks, or AutoTP."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model, shard it; a collective."""
        self._groups = Groups(spec.layout.tp)
        model = heads.load(
            spec.model, spec.head, spec.precision, temperature=spec.temperature, seed=spec.seed
        )
        with self._groups:
            engine = self._initialize(spec, model)
        super().__init__(spec, model, engine)
        self.engine = engine
        self._shards = weights.shards(model) if spec.layout.tp > 1 else {}

    def _initialize(self, spec: EngineSpec, model: heads.Model) -> Any:
        config = ds_config(spec.layout, None, spec.precision, cuda=torch.cuda.is_available())
        engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
        model.requires_grad_(False)  # not before: AutoTP hooks gradients
        return engine

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        with self._groups:
            return super()._outputs(samples, select)

    def _rounds(self, mine: int) -> int:
        """Under ZeRO-3 a forward is a collective, so all ranks run as many as the busiest."""
        return self._most(mine) if self.spec.layout.zero == 3 else mine

    def _most(self, mine: int) -> int:
        count = torch.tensor(mine, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return int(count)

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        return states.engine_tensors(self.engine, weights=weights)

    def close(self) -> None:
        """Free everything."""
        self._forget()
        self.engine.destroy()
        del self.engine, self.module, self.model
        trim()


class DeepSpeedEngine(DeepSpeedScorer):
    """A model that learns."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model, shard it and its optimizer states; a collective."""
        super().__init__(spec)
        self.steps = 0
        """Optimizer steps taken."""

    def _initialize(self, spec: EngineSpec, model: heads.Model) -> Any:
        if spec.lora_rank is not None and spec.layout.tp > 1:
            raise RlhfsimError(
                "lora-tensor-parallel",
                f"LoRA does not run with tensor parallelism, the layout of {spec.role} has tp={spec.layout.tp}",
                help="use tp: 1 with more dp, or train all weights",
            )
        if spec.lora_rank is not None:
            lora.attach(model, spec.lora_rank, spec.seed)
        if spec.layout.recompute == "full":
            cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
        config = ds_config(spec.layout, spec.optimizer, spec.precision, cuda=torch.cuda.is_available())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return deepspeed.initialize(
            model=model,
            optimizer=adam(spec, trained),
            model_parameters=trained,
            config=config,
            dist_init_required=False,
        )[0]

    # --- learning -----------------------------------------------------------------------------

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """One optimizer step on all ranks' samples; metrics equal on all ranks.

        `loss` is the loss of the whole step, `grad_norm` the norm before clipping; a step whose gradient is not
        finite is skipped: `skipped` is then 1 and the caller decides.
        """
        with self._groups:
            rate = self._set_rate()
            sums = self._accumulate(batch, loss)
            norm = self._step()
            self.steps += 1
            total = metrics.finish(self._reduced(sums))
        skipped = float(not torch.isfinite(torch.tensor(norm)))
        return total | {"grad_norm": norm, "learning_rate": rate, "skipped": skipped}

    def _accumulate(self, batch: MiniBatch, loss: LossSpec) -> metrics.Metrics:
        """Gradients of every micro-batch; metrics of this rank."""
        layout = self.spec.layout
        mine = micro_batches(
            batch.samples,
            layout.micro_batch,
            packed=self.spec.packing,
            paired=loss.name == "dpo",
            device=self.device,
        )
        rounds = self._most(len(mine))
        mine += [filler(self.device)] * (rounds - len(mine))
        sums: metrics.Metrics = {}
        for number, micro in enumerate(mine):
            self.engine.set_gradient_accumulation_boundary(number == rounds - 1)
            value, found = self._loss(micro, batch, loss)
            # DeepSpeed averages over data-parallel ranks, the loss is a sum over them
            self.engine.backward(value * layout.dp)
            sums = metrics.merge(sums, found)
        return sums

    def _loss(self, micro: MicroBatch, batch: MiniBatch, loss: LossSpec) -> tuple[Tensor, metrics.Metrics]:
        outputs, entropy = self.call(micro, bool(loss.settings.get("entropy_coefficient")))
        if micro.empty:
            # both outputs, as in other ranks: ZeRO-3 fetches weights in the order of the backward pass
            return (outputs.sum() + entropy.sum()) * 0.0, {}
        rows = {"values" if self.spec.head == "value" else "logprobs": micro.rows(outputs)}
        if entropy.numel():
            rows["entropy"] = micro.rows(entropy)
        value, found = losses.compute(
            loss,
            losses.collate(
                micro.samples,
                num_tokens=batch.global_tokens,
                num_sequences=batch.global_sequences,
                device=self.device,
                **rows,
            ),
        )
        return value, found | {"loss": value.detach().double()}

    def _step(self) -> float:
        """Apply the gradient; its norm, inf where it is not finite and the step was skipped."""
        assert self.spec.optimizer is not None
        if clips_itself(self.spec.layout, self.spec.precision):
            norm = self._clip(self.spec.optimizer.max_grad_norm)
            if not torch.isfinite(torch.tensor(norm)):
                self.engine.optimizer.zero_grad()
                return float("inf")
            self.engine.step()
            return norm
        self.engine.step()
        if getattr(self.engine.optimizer, "overflow", False):
            return float("inf")
        return float(self.engine.get_global_grad_norm())

    def _clip(self, limit: float) -> float:
        from deepspeed.runtime.utils import clip_grad_norm_

        return float(clip_grad_norm_(self.model.parameters(), limit, mpu=self.engine.mpu))

    def _set_rate(self) -> float:
        assert self.spec.optimizer is not None
        rate = learning_rate(self.spec.optimizer, self.steps, self.spec.total_steps)
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _reduced(self, mine: metrics.Metrics) -> metrics.Metrics:
        """Metrics of all ranks; of those that share samples only the first counts."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {name: value.cpu() for name, value in mine.items()})
        total: metrics.Metrics = {}
        for found in everyone[:: self.spec.layout.tp]:
            total = metrics.merge(total, found)
        return total

    # --- weights and state --------------------------------------------------------------------

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights by Hugging Face name on rank 0, empty lists elsewhere; a collective."""
        first = dist.get_rank() == 0
        if self.spec.lora_rank is not None:
            return lora.merged(self.model, bucket_bytes, first=first)
        named = heads.named_parameters(self.model)
        return weights.buckets(named, self._shards, bucket_bytes, first=first)

    def adapters(self) -> list[tuple[str, Tensor]]:
        """LoRA matrices as `<weight>.lora_A` and `.lora_B` on rank 0, nothing elsewhere; a collective."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        return lora.matrices(self.model, first=dist.get_rank() == 0)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probs of the frozen base, its adapters off."""
        assert self.spec.lora_rank is not None, "the engine has no adapters"
        with lora.without(self.model):
            return self.logprobs(samples)

    def save(self, folder: Path) -> None:
        """One file a rank with everything, and a safetensors copy by rank 0; a collective."""
        checkpoints.save(self, folder)

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        checkpoints.load(self, folder)
