"""How a pipeline is put together: DeepSpeed's PipelineModule over the layers, its weights, its engine.

Weights are read stage by stage from a checkpoint, and sent whole to those who send them on.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from executor.engines import device
from executor.engines.deepspeed.config import ds_config
from executor.engines.mesh import coordinates
from executor.engines.optimizers import adam
from executor.engines.pipeline.layers import (
    EMBEDDING,
    HEADS,
    Block,
    Decoder,
    Embedding,
    HeadMatrix,
    Norm,
    Weight,
)
from executor.engines.pipeline.shards import attach
from executor.engines.protocols import EngineSpec
from executor.engines.transformers.heads import HEAD_NAMES, ScalarHead, TokenHead, draw_head
from executor.engines.transformers.shards import ModelFiles
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.placement.backends import broken_rule

_TIED = "embedding"


def check(spec: EngineSpec, model: Decoder) -> None:
    """Refuse by name what the pipeline engine does not do.

    Raises:
        RlhfsimError: LoRA, what DeepSpeed does not run with a pipeline (ZeRO 2 and 3, virtual stages,
            selective recompute), more stages than layers.
    """
    layout, layers = spec.layout, len(model.layers)
    if spec.lora_rank is not None:
        raise RlhfsimError("pipeline-lora", "LoRA does not run with pipeline parallelism", help="use pp: 1")
    if broken := broken_rule(framework(OWN).trainers["deepspeed"], layout):
        raise RlhfsimError(
            "deepspeed-layout", broken, help="see the rules in rlhfsim/specs/placement/backends.py"
        )
    if layout.pp > layers:
        raise RlhfsimError(
            "pipeline-too-deep", f"{layout.pp} stages for {layers} decoder layers", help=f"use pp <= {layers}"
        )


def stages(spec: EngineSpec, model: Decoder, rank: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The PipelineModule with this rank's stage, its weights not read yet; a collective over all ranks.

    Stages hold about equal numbers of parameters. Micro-batches may differ in shape (dynamic_shape), so that
    each is as long as its own longest row and no longer.
    """
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = spec.layout
    options = {
        "tp": layout.tp,
        "tp_rank": coordinates(rank, layout).tp,
        "recompute": layout.recompute == "full",
    }
    tied = model.tied and spec.head == "causal"
    embedding = (Embedding, model.config, model.dtype)
    layers = [TiedLayerSpec(_TIED, *embedding) if tied else LayerSpec(*embedding)]
    layers += [LayerSpec(Block, model, index, **options) for index in range(len(model.layers))]
    layers += [LayerSpec(Norm, model)]
    layers += [
        TiedLayerSpec(_TIED, *embedding, forward_fn=_unchanged)
        if tied
        else LayerSpec(HeadMatrix, spec.head, model.config, model.dtype)
    ]
    # DeepSpeed prints its partition, and broadcasts tied weights as if they had a gradient
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        module = PipelineModule(
            layers=layers,
            topology=PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp),
            loss_fn=loss,
            partition_method="parameters",
            dynamic_shape=True,
        )
    _join(module, tp=layout.tp, tp_rank=options["tp_rank"])
    return module


def _unchanged(_: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """What HeadMatrix does."""
    return inputs[0]


def _join(module: Any, *, tp: int, tp_rank: int) -> None:
    """Give shards their group, and mark the parameters whose gradient norm this rank must count.

    DeepSpeed sums squared norms over the ranks of a replica: in fp32 without ZeRO of rank 0 and of marked
    parameters only (stages after the first would not count), else of shard 0 and of marked ones. So all that
    is cut is marked, what every shard holds whole on shard 0 alone, a tied matrix in its first stage alone.
    """
    for weight in own_weights(module):
        replica = getattr(weight.parameter, "ds_pipe_replicated", False)
        counted = not replica and (weight.cut is not None or tp_rank == 0)
        weight.parameter.tensor_model_parallel = counted  # type: ignore[attr-defined]
    if tp > 1:
        for block in (layer for layer in module.modules() if isinstance(layer, Block)):
            attach(block.layer, module.mpu().get_slice_parallel_group())


def own_weights(module: Any) -> list[Weight]:
    """Weights of this rank's stage, layer by layer."""
    kinds = (Embedding, Block, Norm, HeadMatrix)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    return [weight for layer in layers for weight in layer.weights()]


def fill(spec: EngineSpec, model: Decoder, weights: list[Weight]) -> None:
    """Read this stage's weights; a scalar head that the checkpoint lacks is drawn as heads.py does."""
    fresh = HEADS[spec.head] if spec.head != "causal" else None
    for weight in _read(spec.model, weights, fresh):
        draw_head(weight.parameter, model.config, spec.seed)


def reader(spec: EngineSpec, model: Decoder, weights: list[Weight]) -> TokenHead | ScalarHead:
    """What turns hidden states into results, around the head's matrix of the last stage."""
    tied = model.tied and spec.head == "causal"
    name = EMBEDDING if tied else HEADS[spec.head]
    matrix = next(weight.parameter for weight in weights if weight.name == name)
    if spec.head != "causal":
        head = ScalarHead(matrix.shape[1], matrix.dtype)
        head.weight = matrix
        return head
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = matrix
    return TokenHead(linear, model.config, spec.temperature)


def engine(spec: EngineSpec, module: Any, apply: Callable[[Callable[[], None]], None]) -> Any:
    """DeepSpeed's engine over the module; a collective over all ranks.

    At the end of a step `apply` gets the optimizer's update to call. Shards are ours, so the configuration
    must not know of tensor parallelism; stages exchange whole activations, because DeepSpeed remembers how it
    cut the first ones and shapes change. The number of micro-batches is set again before every step.
    """
    import deepspeed
    from deepspeed.runtime.pipe.schedule import OptimizerStep

    from executor.engines.deepspeed.process_groups import of_pipeline

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    config = ds_config(
        replace(spec.layout, tp=1),
        spec.optimizer,
        spec.precision,
        cuda=device.available(),
        trained=sum(parameter.numel() for parameter in trained),
        gradients=spec.gradients,
    )
    config |= {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    with of_pipeline(module.mpu()):
        started: Any = deepspeed.initialize(
            model=module, optimizer=adam(spec, trained), config=config, dist_init_required=False
        )[0]
    update = started._INSTRUCTION_MAP[OptimizerStep]

    def step(running: Any, **arguments: Any) -> None:
        apply(lambda: update(running, **arguments))

    started._INSTRUCTION_MAP = {**started._INSTRUCTION_MAP, OptimizerStep: step}
    return started


def leave(module: Any) -> None:
    """Destroy the process groups of a pipeline: with NCCL each holds device memory. A collective."""
    grid = module.mpu()
    tied = [comm["group"] for comm in module.tied_comms.values()]
    axes = (grid.ds_model_proc_group, grid.dp_proc_group, grid.pp_proc_group, grid.slice_proc_group)
    dist.barrier()
    for group in (*tied, *axes, module.world_group):
        dist.destroy_process_group(group)


def _read(folder: str, weights: Sequence[Weight], optional: str | None = None) -> list[Weight]:
    """Fill `weights` from the safetensors of `folder`, each with its own part only; those that it lacks.

    A scalar head may have any of its usual names. Only the one called `optional` may be missing.

    Raises:
        RlhfsimError: a tensor that the checkpoint does not have.
    """
    files = ModelFiles(folder)
    stored = {weight.name: files.stored(*_names(weight.name)) for weight in weights}
    lost = next((name for name, present in stored.items() if not present and name != optional), None)
    if lost is not None:
        raise RlhfsimError(
            "checkpoint-lacks-tensor",
            f"no safetensors file in {folder} has the tensor {lost!r}",
            help="give a folder with the weights of a causal model in safetensors files",
        )
    for weight in weights:
        if (name := stored[weight.name]) is not None:
            dim, rank = (weight.cut.dim, weight.cut.rank) if weight.cut else (0, 0)
            start = rank * weight.parameter.shape[dim]
            files.expect(name, _whole(weight))
            files.read(name, weight.parameter.data, dim=dim, start=start)
    return [weight for weight in weights if stored[weight.name] is None]


def _names(name: str) -> tuple[str, ...]:
    """Under which a checkpoint may have it: backbones are stored with or without their prefix."""
    return HEAD_NAMES if name in HEAD_NAMES else (name, name.removeprefix("model."))


@frozen
class CatalogueEntry:
    """A whole tensor of the model, known to every rank."""

    name: str
    shape: tuple[int, ...]
    owner: int
    """Rank that hands it out: first replica and shard of its stage."""


def catalogue(mine: Sequence[Weight], owner: int) -> list[CatalogueEntry]:
    """Tensors of all stages in order, each once; a collective over the default group.

    `mine`: this rank's weights, [] on ranks that own none (other replicas and shards).
    """
    own = [CatalogueEntry(name=w.name, shape=_whole(w), owner=owner) for w in mine]
    everyone: list[list[CatalogueEntry]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    named: dict[str, CatalogueEntry] = {}
    for entry in (entry for stage in everyone for entry in stage):
        named.setdefault(entry.name, entry)  # a tied matrix lives in two stages
    return list(named.values())


def _whole(weight: Weight) -> tuple[int, ...]:
    shape = list(weight.parameter.shape)
    if weight.cut is not None:
        shape[weight.cut.dim] *= weight.cut.parts
    return tuple(shape)


def pass_on(whole: Tensor, owner: int, rank: int, senders: Collection[int]) -> None:
    """Fill `whole` on every sender from its owner; to several of them as a broadcast over all ranks."""
    if len(senders) > 1:
        dist.broadcast(whole, src=owner)
    elif owner not in senders:
        [sender] = senders
        if rank == owner:
            dist.send(whole, dst=sender)
        elif rank == sender:  # not the owner's tensor-parallel peers, who took part in gathering it
            dist.recv(whole, src=owner)
