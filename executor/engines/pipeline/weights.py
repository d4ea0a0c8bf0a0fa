"""Weights of a pipeline: read stage by stage from a checkpoint, sent whole to those who send them on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch import distributed as dist

from executor.engines.pipeline.layers import Weight
from executor.engines.transformers.heads import HEAD_NAMES
from executor.engines.transformers.shards import ModelFiles
from rlhfsim.errors import RlhfsimError


def read(folder: str, weights: Sequence[Weight], optional: str | None = None) -> list[Weight]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
