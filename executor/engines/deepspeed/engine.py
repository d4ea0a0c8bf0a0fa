"""DeepSpeed behind the contract of training engines: ZeRO 0-3, AutoTP, host offload, LoRA.

All ranks of the process group build one engine together; ranks that share a tensor-parallel group get the
same samples (see mesh.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.engines import device, lora
from executor.engines.deepspeed import experts, process_groups, shards
from executor.engines.deepspeed.config import ds_config
from executor.engines.deepspeed.learner import DeepSpeedLearner
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import heads
from executor.engines.transformers.shards import EmptyParameters
from executor.samples import Sample
from rlhfsim.errors import RlhfsimError


class DeepSpeedEngine(DeepSpeedLearner):
    """A model whose states are sharded; without an optimizer only its weights (ZeRO-3, AutoTP)."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model, shard it and its optimizer states; a collective."""
        process_groups.join()
        model, unread = _loaded(spec)
        with process_groups.of_degree(spec.layout.tp):
            self.engine = _initialize(spec, model, unread)
        self.engine.train(spec.optimizer is not None)  # layers are computed again in training mode only
        super().__init__(spec, model, self.engine)
        self._split = shards.split_parameters(model) if spec.layout.tp > 1 else {}
        if spec.layout.recompute == "none":
            experts.save_places(model)

    def _owned(self) -> AbstractContextManager[None]:
        return process_groups.of_degree(self.spec.layout.tp)

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        with self._owned():
            return super()._outputs(samples, select)

    def _rounds(self, mine: int) -> int:
        """Under ZeRO-3 a forward is a collective, so all ranks run as many as the busiest."""
        return self._largest(mine) if self.spec.layout.zero == 3 else mine

    def _counts(self) -> bool:
        return dist.get_rank() % self.spec.layout.tp == 0

    def _whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        split = self._split.get(id(parameter))
        return split.gather(tensor) if split else tensor


def _loaded(spec: EngineSpec) -> tuple[heads.HeadedModel, EmptyParameters | None]:
    """The model on this rank's device, or, where it will be sharded, what is still to be read into it."""
    what = (spec.model, spec.head, spec.precision)
    how: dict[str, Any] = {"temperature": spec.temperature, "seed": spec.seed}
    if spec.layout.zero == 3 or spec.layout.tp > 1:
        return heads.outline(*what, **how)
    return heads.load(*what, device=device.own(), **how), None


def _initialize(spec: EngineSpec, model: heads.HeadedModel, unread: EmptyParameters | None) -> Any:
    """DeepSpeed's engine over the model, all of its weights read; a collective."""
    settings = partial(
        ds_config,
        spec.layout,
        spec.optimizer,
        spec.precision,
        cuda=device.available(),
        gradients=spec.gradients,
    )
    start = partial(deepspeed.initialize, model=model, dist_init_required=False)
    if unread is not None and spec.layout.zero == 3:
        shards.partition(model, unread, settings())
        unread = None
    elif unread is not None:
        shards.give_all_storage(model, unread)
    if spec.optimizer is None:
        engine = start(config=settings())[0]
        if unread is not None:
            shards.read(model, unread)
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
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Called when AutoTP has cut the model and before ZeRO copies it."""
        if unread is not None:
            shards.read(model, unread)
        return adam(spec, parameters)

    config = settings(trained=elements)
    return start(optimizer=optimizer, model_parameters=trained, config=config)[0]
