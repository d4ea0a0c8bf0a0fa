"""Resharding in place (S1): what each GPU holds against what it needs, and the links that bring the rest."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from rlhfsim.elementwise import Size, least, most, some, where
from rlhfsim.kernels.cost import Part
from rlhfsim.kernels.links import (
    deepspeed_chat_volume,
    gather_rate,
    handled,
    moved,
    network,
    scale_up,
    serial,
    vanilla_volume,
)
from rlhfsim.weight_sync.endpoints import TRAINED_BYTES, Route
from rlhfsim.weight_sync.stages import Priced, quantise


class Cut(NamedTuple):
    """One direction in which weights are cut at both ends: their layers, their experts or their width."""

    train: Size
    """Parts in training."""
    rollout: Size
    """Parts in the rollout."""
    near: Size
    """Share of the training parts that are in one domain."""
    reach: Size = 1.0
    """Share of them among the GPUs whose rollout ranks can be given in any order: a domain, or a replica
    where it is larger."""
    spread: bool = False
    """The rollout may put its parts into the domain where training holds them: stages of a pipeline may
    be apart from each other, ranks of a TP group may not."""

    @property
    def kept(self) -> Size:
        """Share of the whole that a GPU both holds and needs, in the best order of rollout ranks.

        One part in the other (nested) where the two meet; the share max(reach, 1/rollout) of the GPUs
        can be given a part that meets theirs.
        """
        matched = 1.0 if self.spread else most(self.reach, 1 / self.rollout)
        return matched * least(1 / self.train, 1 / self.rollout)

    @property
    def inside(self) -> Size:
        """Share of what a GPU needs that its domain holds."""
        return least(1.0, self.near * (self.rollout if self.spread else 1))


class Received(NamedTuple):
    """Bytes that one GPU receives in a reshard, mean over the GPUs, by where they come from."""

    inside: Size
    """From its own domain."""
    across: Size
    """From other domains."""

    @property
    def total(self) -> Size:
        """Bytes of both."""
        return self.inside + self.across


def received(ends: Route) -> Received:
    """What a rollout GPU needs and does not hold, by link.

        received = need - kept    need = prod 1/g, kept = prod of `Cut.kept`, over layers, experts, width

    For nested layouts this is (tp - t_g p_g)/(t_g p_g t p) M of HybridFlow, arXiv 2409.19256, Table 2;
    for pp 8 -> tp 8 every GPU keeps 1/64 of the model and receives 7/64.
    """
    shares = (ends.weights.dense, _dense_cuts(ends)), (ends.weights.experts, _expert_cuts(ends))
    inside = across = 0.0
    for elements, cuts in shares:
        size = elements * TRAINED_BYTES
        need, kept = prod(1 / c.rollout for c in cuts), prod(c.kept for c in cuts)
        near = most(0.0, need * prod(c.inside for c in cuts) - kept)
        inside += size * near
        across += size * most(0.0, need - kept - near)
    return Received(inside=inside, across=across)


def _layers(ends: Route) -> Cut:
    parts = ends.stages
    stage = ends.train.gpus // parts
    near = least(1.0, most(1, ends.source.domain // stage) / parts)
    return Cut(train=parts, rollout=ends.rollout.pp, near=near, spread=True)


def _cut(ends: Route, train: Size, rollout: Size, stride: Size = 1) -> Cut:
    domain = ends.source.domain
    near, reach = (
        least(1.0, most(1, gpus // stride) / train)
        for gpus in (domain, most(domain, ends.rollout.replica_gpus))
    )
    return Cut(train=train, rollout=rollout, near=near, reach=reach)


def _dense_cuts(ends: Route) -> tuple[Cut, Cut]:
    return _layers(ends), _cut(ends, ends.dense_ranks, ends.rollout.tp)


def _expert_cuts(ends: Route) -> tuple[Cut, Cut, Cut]:
    """Experts over EP ranks, their width over the others; ZeRO-3 cuts all over all GPUs."""
    layout, rollout = ends.train, ends.rollout
    groups = least(rollout.ep, rollout.replica_gpus)
    width = most(1, rollout.replica_gpus // (groups * rollout.pp))
    if ends.sharded:
        return _layers(ends), _cut(ends, layout.gpus, groups), _cut(ends, 1, width)
    etp = where(layout.ep > 1, layout.etp, layout.tp)
    return _layers(ends), _cut(ends, layout.ep, groups, stride=etp), _cut(ends, etp, width)


def reshard(ends: Route) -> Priced:
    """S1, zero-redundancy grouping: each GPU gathers what its rollout shard lacks.

    Flat per-layer buffers: one call a fused tensor. What comes from other domains crosses their NICs
    once for all GPUs of a domain that need the same and is passed on inside.
    """
    got = received(ends)
    copies = most(1, ends.source.domain // ends.rollout.replica_gpus)
    wire = moved(got.across / copies, network(ends.source))
    fabric = moved(got.total - got.across / copies, scale_up(ends.source))
    slowest = wire if some(wire.seconds >= fabric.seconds) else fabric
    slowest = slowest._replace(seconds=most(wire.seconds, fabric.seconds))
    return _in_place(ends, slowest, received=got.total, held=got.total)


def reshard_vanilla(ends: Route) -> Priced:
    """S1, HybridFlow-V: (tp - 1)/(tp) M over the model-parallel group; peak M (M8)."""
    volume = vanilla_volume(ends.stored, ends.dense_ranks, ends.stages)
    link = gather_rate(ends.source, ends.dense_ranks * ends.stages)
    return _in_place(ends, moved(volume, link), received=volume, held=ends.stored)


def reshard_deepspeed_chat(ends: Route) -> Priced:
    """S1, DeepSpeed-Chat: (tpd - 1)/(tpd) M over all training GPUs; peak M (M8)."""
    layout = ends.train
    volume = deepspeed_chat_volume(ends.stored, layout.tp, layout.pp, layout.dp * layout.cp)
    link = gather_rate(ends.source, layout.gpus)
    return _in_place(ends, moved(volume, link), received=volume, held=ends.stored)


def _in_place(ends: Route, transfer: Part, *, received: Size, held: Size) -> Priced:
    stage = (
        transfer,
        handled(ends.local_tensors, ends.source, "sync_gather_latency"),
        *quantise(ends, ends.weights.params * ends.rollout_share[0], ends.local_tensors),
        handled(1, ends.target, "sync_start_latency"),
    )
    return Priced(cost=serial([stage]), bytes_moved=received * ends.train.gpus, rollout_bytes=held)
