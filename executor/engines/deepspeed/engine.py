"""DeepSpeed behind the contract of training engines: ZeRO 0-3, AutoTP, host offload, LoRA.

All ranks of the process group build one engine together; ranks that share a tensor-parallel group get the
same samples (see mesh.py). No rank ever holds a model whole whose parameters are ZeRO-3 partitions or AutoTP
shards: each reads its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.engines import device, lora
from executor.engines.deepspeed import experts, process_groups
from executor.engines.deepspeed.config import ds_config
from executor.engines.deepspeed.learner import DeepSpeedLearner
from executor.engines.optimizers import adam
from executor.engines.packing import MicroBatch, Select
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import heads
from executor.engines.transformers.shards import EmptyParameters, give_storage
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
        self._split = split_parameters(model) if spec.layout.tp > 1 else {}
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
        partition(model, unread, settings())
        unread = None
    elif unread is not None:
        give_all_storage(model, unread)
    if spec.optimizer is None:
        engine = start(config=settings())[0]
        if unread is not None:
            read(model, unread)
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
            read(model, unread)
        return adam(spec, parameters)

    config = settings(trained=elements)
    return start(optimizer=optimizer, model_parameters=trained, config=config)[0]


def partition(model: heads.HeadedModel, unread: EmptyParameters, config: dict[str, Any]) -> None:
    """Make each unread parameter a ZeRO-3 partition and read that; one parameter has storage at a time.

    What has values already (a drawn head, adapters) DeepSpeed partitions when its engine starts.
    """
    dtype = next(model.parameters()).dtype
    zero: Any = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=dict(config), dtype=dtype)
    for name, parameter in unread.parameters(model):
        give_storage(parameter, zero.local_device)
        # what zero.Init(module=...) does before it broadcasts the whole parameter from rank 0
        zero._convert_to_deepspeed_param(parameter)
        ours: Any = parameter
        size = ours.aligned_size() // ours.ds_zero_partition_world_size
        start = ours.ds_zero_partition_rank * size
        unread.files.read_flat(name, ours.data.view(-1)[start : start + size], start)
        ours.partition()
    for buffer in model.buffers():  # DeepSpeed takes them to be where zero.Init built the module
        buffer.data = buffer.data.to(zero.local_device)


def read(model: heads.HeadedModel, unread: EmptyParameters) -> None:
    """Fill each unread parameter: of those that AutoTP split, this rank's shard."""
    split = split_parameters(model)
    for name, parameter in unread.parameters(model):
        cut = split.get(id(parameter))
        dim, start = (cut.dim, cut.start) if cut else (0, 0)
        unread.files.read(name, parameter.data, dim=dim, start=start)


def give_all_storage(model: heads.HeadedModel, unread: EmptyParameters) -> None:
    """Storage on the host that nobody writes, so that it takes no memory, for DeepSpeed to cut."""
    for _, parameter in unread.parameters(model):
        give_storage(parameter, "cpu")


class SplitParameter(NamedTuple):
    """How AutoTP split one parameter."""

    layer: Any
    dim: int
    """0 in a column-parallel layer, 1 in a row-parallel one."""

    @property
    def start(self) -> int:
        """Start of this rank's shard along `dim`."""
        return int(sum(self.layer._partition_sizes[: self.layer.tp_index]))

    def gather(self, shard: Tensor) -> Tensor:
        """The full parameter; a collective over the tensor-parallel group."""
        # DeepSpeed's public GatherReplacedLayerParams replaces param.data, which ZeRO needs as a view of its
        # flat buffer; its gather alone leaves the parameter as it is
        full = self.layer._all_gather_shards(shard, self.layer._partition_sizes, dim=self.dim)
        return cast(Tensor, full)


def split_parameters(module: nn.Module) -> dict[int, SplitParameter]:
    """Split parameters of a module by id; empty without AutoTP.

    Raises:
        RlhfsimError: a fused layer, which AutoTP splits in a way of its own.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer

    split: dict[int, SplitParameter] = {}
    for name, layer in module.named_modules():
        if type(layer) is LinearLayer:
            split |= {id(p): SplitParameter(layer, 0) for p in (layer.weight, layer.bias) if p is not None}
        elif type(layer) is LinearAllreduce:
            split[id(layer.weight)] = SplitParameter(layer, 1)
        elif isinstance(layer, TensorParallel_Layer):
            raise RlhfsimError(
                "autotp-layer",
                f"tensor parallelism of {type(layer).__name__} ({name}) is not gathered here",
                help="use tp: 1 for this model",
            )
    return split
