"""Low-rank adapters on every linear layer of the backbone, through peft.

    W' = W + scale * B A        W (out, in), A (rank, in), B (out, rank), scale = alpha / rank

Source: Hu et al. 2021, arXiv 2106.09685, section 4.1. The frozen base with its adapters off is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from executor.engines.protocols import EngineSpec
from executor.engines.transformers.heads import HeadedModel, named_tensors
from executor.engines.weights import gathered, names_in_groups
from executor.weight_transfer.packing import Named
from rlhfsim.specs.workload.workload import LORA_ALPHA_OVER_RANK

_ADAPTER = "default"


Adapter = Mapping[str, Tensor]
"""The matrices of one adapted weight: A (rank, in) and B (out, rank)."""


def attach(model: HeadedModel, rank: int, seed: int) -> None:
    """Freeze the backbone and put adapters on its linear layers; A is drawn from `seed`, B is zero.

    The head of a critic goes on learning.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in model.backbone.named_modules() if type(module) is nn.Linear]
    config = LoraConfig(r=rank, lora_alpha=round(LORA_ALPHA_OVER_RANK * rank), target_modules=names)
    dtype = next(model.backbone.parameters()).dtype
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model.backbone, adapter_name=_ADAPTER)
    for name, parameter in model.backbone.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if model.head_name != "score":
        model.head.requires_grad_(False)


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A fresh matrix of an adapter as peft makes it: A uniform in +-1/sqrt(in), B zero."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


@contextmanager
def without(model: HeadedModel) -> Iterator[None]:
    """Inside, the adapters do nothing: the model is the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        # peft's enable_adapters() would also switch requires_grad, which ZeRO read when it was built
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def split(model: HeadedModel) -> tuple[dict[str, Tensor], Mapping[str, Adapter]]:
    """Base weights by Hugging Face name, and the adapters of those that have one."""
    base: dict[str, Tensor] = {}
    sides: dict[str, dict[str, Tensor]] = {}
    for plain, parameter in named_tensors(model).items():
        if ".lora_" in plain:
            weight, _, side = plain.rpartition(".lora_")
            sides.setdefault(f"{weight}.weight", {})[side[0]] = parameter
        else:
            base[plain.replace(".base_layer.", ".")] = parameter
    return base, sides


def merged(model: HeadedModel, bucket_bytes: int, *, here: bool) -> Iterator[list[Named]]:
    """Buckets of full weights with their adapters merged; a collective."""
    base, adapters = split(model)
    for names in names_in_groups(base, bucket_bytes):
        adapted = [name for name in names if name in adapters]
        parameters = [base[name] for name in names]
        parameters += [adapters[name][side] for name in adapted for side in "AB"]
        with gathered(parameters) as tensors:
            sides = tensors[len(names) :]
            pairs = dict(zip(adapted, zip(sides[::2], sides[1::2], strict=True), strict=True))
            weights = zip(names, tensors, strict=False)
            yield [(name, _merged(weight, pairs.get(name))) for name, weight in weights] if here else []


def matrices(model: HeadedModel, *, here: bool) -> list[Named]:
    """`<weight>.lora_A` and `<weight>.lora_B` of every adapter; a collective."""
    _, adapters = split(model)
    named = {f"{name}.lora_{side}": pair[side] for name, pair in adapters.items() for side in "AB"}
    with gathered(list(named.values())) as tensors:
        return [(name, tensor.clone()) for name, tensor in zip(named, tensors, strict=True)] if here else []


def export(model: HeadedModel, spec: EngineSpec, folder: Path, *, here: bool) -> None:
    """`adapter_config.json` and `adapter_model.safetensors` as peft reads them, where `here`; a collective.

    A scalar head is trained along with the adapters and is among peft's `modules_to_save`.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    adapters = matrices(model, here=here)
    head: dict[str, Any] = {f"{model.head_name}.weight": model.head.weight} if spec.head != "causal" else {}
    with gathered(list(head.values())) as tensors:
        whole = [(name, tensor.clone()) for name, tensor in zip(head, tensors, strict=True)] if here else []
    if not here:
        return
    modules = {name.rsplit(".", 3)[1] for name, _ in adapters}
    rank = cast(int, spec.lora_rank)
    config = LoraConfig(
        r=rank,
        lora_alpha=round(LORA_ALPHA_OVER_RANK * rank),
        target_modules=sorted(modules),
        modules_to_save=[name.removesuffix(".weight") for name, _ in whole] or None,
        task_type="SEQ_CLS" if whole else "CAUSAL_LM",
        base_model_name_or_path=spec.model,
    )
    config.save_pretrained(str(folder))
    named = [(f"{name.rsplit('.', 2)[0]}.{name[-6:]}.weight", tensor) for name, tensor in adapters] + whole
    plain = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in named}
    save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _merged(weight: Tensor, sides: tuple[Tensor, Tensor] | None) -> Tensor:
    """The weight (out, in) with its adapter's A (rank, in) and B (out, rank)."""
    if sides is None:
        return weight.contiguous()
    a, b = sides
    full: Any = weight.float() + LORA_ALPHA_OVER_RANK * (b.float() @ a.float())
    return cast(Tensor, full.to(weight.dtype))
