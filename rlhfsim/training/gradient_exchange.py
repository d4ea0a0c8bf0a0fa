"""What data-parallel ranks exchange, and the optimizer step (physics T5, T6, T9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhfsim.elementwise import Size, each, either, least, most, some, where
from rlhfsim.frozen import frozen
from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.cost import Part, part
from rlhfsim.kernels.device import Device, Group, group
from rlhfsim.kernels.links import handled, host_rate, moved, through_memory
from rlhfsim.memory.states import BASE_BYTES, Parted, parted
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.weight_sync.endpoints import weights_of

Optimizer = Literal["adam", "adam8bit", "sgd"]
Link = Literal["nvlink", "network"]
LINKS: tuple[Link, ...] = ("nvlink", "network")
BF16, FP32 = 2.0, 4.0
STATE_BYTES: dict[Optimizer, float] = {"adam": 26.0, "adam8bit": 14.0, "sgd": 10.0}
"""HBM bytes per owned parameter in addition to those of its gradient: FP32 master, momentum and variance
read and written, BF16 weight written (3 x 8 + 2); 8-bit moments 8 + 4 + 2; SGD 8 + 2. Counting (T9)."""


@frozen
class GradientShard:
    """Parameters of one kind on one GPU and the ranks that hold the same ones."""

    params: Size
    """Psi before data-parallel sharding; trained ones only."""
    ranks: Group
    copies: Group | None = None
    """Ranks with the same shard of other copies (HSDP)."""

    def owned(self, zero: Size) -> Size:
        """Parameters whose optimizer state this GPU holds."""
        return where(zero > 0, self.params / self.ranks.ranks, self.params)


def shards(
    device: Device, model: ModelSpec, layout: AnyLayout, *, share: float = 1.0
) -> tuple[GradientShard, ...]:
    """Dense parameters over d x c ranks, experts over N_gpu/(p e x); the mean pipeline stage.

    `share` is the trained part of them (adapters). Source: Megatron-Core's expert data parallelism.
    """
    if isinstance(layout, Layout):
        return _shards(device.domain, model, parted(layout), share)

    def numbers(*part: Any) -> list[float]:
        held = _shards(device.domain, model, part, share)
        dense, routed = held[0], held[1] if len(held) > 1 else _EMPTY
        groups = dense.ranks, dense.copies or _ALONE, routed.ranks
        return [dense.params, routed.params, *(n for g in groups for n in (g.ranks, g.per_domain))]

    dense, routed, *groups = each(numbers, *parted(layout))
    ranks, copies, narrow = (Group(ranks=groups[i], per_domain=groups[i + 1]) for i in (0, 2, 4))
    wide = GradientShard(params=dense, ranks=ranks, copies=copies if some(copies.ranks > 1) else None)
    return (wide, GradientShard(params=routed, ranks=narrow)) if some(routed > 0) else (wide,)


_ALONE = Group(ranks=1, per_domain=1)
_EMPTY = GradientShard(params=0.0, ranks=_ALONE)
"""What a GPU lacks that other layouts of a column have."""


@lru_cache(maxsize=65536)
def _shards(domain: int, model: ModelSpec, part: Parted, share: float) -> tuple[GradientShard, ...]:
    tp, pp, dp, cp, ep, etp, shards = part
    ranks = dp * cp
    ends = model.params_embedding + (0 if model.tied_embeddings else model.params_lm_head)
    ends += model.params_vision * tp
    dense = sum(kind.layers * layers.layer_params(model, tp, kind=kind) for kind in model.kinds) + ends / tp
    routed = 0.0
    if model.num_moe_layers:
        routed = model.num_moe_layers * layers.layer_expert_params(model, ep, etp)
    if shards:  # experts are sharded like all else
        copies = group(ranks // shards, shards * tp, domain)
        held = group(shards, tp, domain)
        return (GradientShard(params=share * (dense + routed) / pp, ranks=held, copies=copies),)
    wide = GradientShard(params=share * dense / pp, ranks=group(ranks, tp, domain))
    if not routed:
        return (wide,)
    narrow = group(max(1, ranks * tp // (ep * etp)), ep * etp, domain)
    return wide, GradientShard(params=share * routed / pp, ranks=narrow)


def traffic(
    device: Device,
    shard: GradientShard,
    layout: AnyLayout,
    micro_batches: Size,
    reduce_bytes: Size,
    *,
    whole: Size = False,
    reductions: Size | None = None,
) -> tuple[Size, Size]:
    """Raw seconds of (parameter gathers, gradient reductions) per optimizer step (T5).

        ZeRO-0: AR(b_g Psi) ; 1: AG(b_w Psi), RS(b_g Psi) ; 2: AG, r RS ; 3: 2 m AG, r RS     r = m

    `whole`: ranks reduce all gradients though they own a share (AR for RS); `reductions`: r, where it is not
    m. Source: Rajbhandari et al., arXiv 1910.02054, section 7; FSDP's reshard after forward.
    """
    zero = layout.zero
    gather, reduce = _once(device, shard, reduce_bytes, where(whole, False, zero > 0))
    times = micro_batches if reductions is None else reductions
    gathers = where(zero == 3, 2 * micro_batches * gather, where(zero > 0, gather, 0.0))
    return gathers, where(zero > 1, times, 1) * reduce


def _once(device: Device, shard: GradientShard, reduce_bytes: Size, sharded: Size) -> tuple[Size, Size]:
    """One gather of the parameters, and one reduction of the gradients: to their owner or to all."""
    ranks, size = shard.ranks, reduce_bytes * shard.params
    gather = collectives.all_gather(device, BF16 * shard.params, ranks)
    return gather, either(
        sharded,
        lambda: collectives.reduce_scatter(device, size, ranks),
        lambda: collectives.all_reduce(device, size, ranks),
    )


def between_copies(
    device: Device, shard: GradientShard, layout: AnyLayout, times: Size, reduce_bytes: Size
) -> Size:
    """Raw seconds in which the copies of a shard sum their gradients `times` a step (HSDP): AR(b_g Psi / s).

    `fully_shard` on a mesh of two dimensions does so after every micro-batch unless it is told otherwise.
    """
    copies = shard.copies
    assert copies is not None
    size = reduce_bytes * shard.owned(layout.zero)
    return times * collectives.all_reduce(device, size, copies)


def hidden_behind(seconds: Size, compute: Size, overlap: float, layers: Size) -> Size:
    """What stays exposed: max(T/L, T - eta T_comp) (T6): the first layer's part has nothing to hide
    behind."""
    return most(seconds / most(1, layers), seconds - overlap * compute)


class Room(NamedTuple):
    """One direction of one micro-batch on the mean stage, as the data-parallel traffic sees it."""

    seconds: Size
    held: Mapping[Link, Size]
    """Seconds that its own collectives hold each link."""

    def free(self, link: Link) -> Size:
        """Seconds in which the GPU works and the link is idle."""
        return most(0.0, self.seconds - self.held.get(link, 0.0))


class GradientSums(NamedTuple):
    """How gradients add up over data-parallel ranks."""

    bytes_each: Size
    """Bytes of a gradient that is sent."""
    whole: Size = False
    """All are reduced on all ranks, and new weights gathered at the end of the update (DeepSpeed's ZeRO-1 and
    ZeRO-2)."""
    copies_each: bool = False
    """Copies of shards add up after every micro-batch, not once."""
    once: bool = False
    """Nothing is reduced before the last backward pass, behind which it hides."""
    in_turn: Size = False
    """No backward pass runs while gradients are reduced (DeepSpeed without `overlap_comm`)."""


def exchange(
    device: Device,
    model: ModelSpec,
    layout: AnyLayout,
    micro_batches: Size,
    *,
    forward: Room,
    backward: Room,
    sums: GradientSums,
    share: float = 1.0,
) -> list[Part]:
    """Exposed data-parallel traffic of one optimizer step, and the compute that it slows.

    All shards on one link share it and the time it is free: no step is shorter than the traffic of a
    link. Collectives that run at the same time as kernels take a share of the SMs (Calculon,
    arXiv 2305.06990).
    """
    parts: list[Part] = []
    eta, depth = device["overlap_dp"], -(-model.num_layers // layout.pp)
    reduce_bytes, whole, copies_each, once, in_turn = sums
    reductions = 1 if once else micro_batches
    parts_held = shards(device, model, layout, share=share)
    raw = [
        traffic(device, shard, layout, micro_batches, reduce_bytes, whole=whole, reductions=reductions)
        for shard in parts_held
    ]
    for link in LINKS:
        on = [_on(link, shard.ranks) for shard in parts_held]
        gather = sum(where(here, one, 0.0) for here, (one, _) in zip(on, raw, strict=True))
        reduce = sum(where(here, one, 0.0) for here, (_, one) in zip(on, raw, strict=True))
        reduce += sum(
            where(
                _on(link, shard.copies),
                between_copies(device, shard, layout, reductions if copies_each else 1, reduce_bytes),
                0.0,
            )
            for shard in parts_held
            if shard.copies
        )
        if not some(gather + reduce > 0):
            continue
        behind = where(in_turn, 0.0, backward.free(link))
        free = where(whole, 0.0, forward.free(link))
        last = reduce if once else 0.0
        seen = exposed(layout.zero, micro_batches, gather, reduce - last, free, behind, eta, depth)
        seen += hidden_behind(last, behind, eta, depth)
        taken = "sm_share_nic" if link == "network" else "sm_share_nvlink"
        slowed = device[taken] * most(0.0, gather + reduce - seen)
        parts.append(part(link, seen, "overlap_dp", spread=(0.4, 1.8)))
        parts.append(part("compute", slowed, taken, spread=(0.3, 1.5)))
    if some(layout.zero == 3):  # a gather ahead and one back; reductions go by bucket
        parts.append(only(layout.zero == 3, zero_calls(device, model, layout, 2 * micro_batches)))
    return parts


def only(holds: Size, one: Part) -> Part:
    """A part of the layouts for which it holds."""
    return one._replace(seconds=where(holds, one.seconds, 0.0))


def dequantised(device: Device, model: ModelSpec, layout: AnyLayout, passes: Size) -> Part:
    """What a 4-bit base costs: in each of `passes` every matrix is read, and written in BF16.

        passes Psi_layers (0.52 + 2) / (B_m eta)

    Source: QLoRA, arXiv 2305.14314; eta is `nf4_dequantise_efficiency`, known to a factor of seven.
    """
    ends = model.params_embedding + (0 if model.tied_embeddings else model.params_lm_head)
    whole = sum(s.params for s in shards(device, model, replace(layout, shards=None)))
    held = whole - ends / (layout.tp * layout.pp)
    return through_memory(passes * held * (BASE_BYTES["nf4"] + BF16), device, "nf4_dequantise_efficiency")


def summed(device: Device, model: ModelSpec, layout: AnyLayout, micro_batches: Size, *, share: float) -> Part:
    """What sums in FP32 take in addition to sums in BF16: they are read and written once a micro-batch.

    m Psi_held (2 + 2) / (B_m eta)        Psi_held = Psi, of its owner from ZeRO-2 on
    """
    held = sum(s.owned(where(layout.zero >= 2, 1, 0)) for s in shards(device, model, layout, share=share))
    return through_memory(micro_batches * held * 2 * (FP32 - BF16), device, "optimizer_hbm_efficiency")


def cast(device: Device, model: ModelSpec, layout: AnyLayout, passes: Size, *, share: float = 1.0) -> Part:
    """What autocast costs: in each of `passes` FP32 weights are read and written in BF16, or gradients the
    other way round.

        passes Psi_held (4 + 2) / (B_m eta)
    """
    held = sum(s.params for s in shards(device, model, layout, share=share))
    return through_memory(passes * held * (FP32 + BF16), device, "optimizer_hbm_efficiency")


def exposed(
    zero: Size,
    micro_batches: Size,
    gather: Size,
    reduce: Size,
    forward: Size,
    backward: Size,
    eta: float,
    layers: Size,
) -> Size:
    """Seconds of the gathers and reductions of one step that no compute hides.

        ZeRO-3: half the gathers behind m forwards; the other half and the reductions behind m backwards
        else:   gathers behind the first forward; reductions behind the last backward (ZeRO-2: every one)

    `forward` and `backward`: seconds of one micro-batch in which the link is free.
    """
    sharded, half = zero == 3, where(zero == 3, gather / 2, gather)
    ahead = where(sharded, micro_batches * forward, forward)
    behind = where(zero > 1, micro_batches, 1) * backward
    later = where(sharded, half + reduce, reduce)
    return hidden_behind(half, ahead, eta, layers) + hidden_behind(later, behind, eta, layers)


def _on(link: Link, ranks: Group) -> Size:
    """Whether a link limits a collective of these ranks."""
    return (ranks.ranks > 1) & ((ranks.domains > 1) == (link == "network"))


def zero_calls(device: Device, model: ModelSpec, layout: AnyLayout, passes: Size) -> Part:
    """What the hooks of ZeRO-3 take on the host: one call a named tensor and pass.

    `zero_tensor_time`: 0 on GPUs, where it hides behind kernels that were launched before; on a CPU the
    core that computes runs the hooks and the Python of each collective as well.
    """
    return handled(passes * (weights_of(model).tensors / layout.pp), device, "zero_tensor_time")


def gathers(
    device: Device, model: ModelSpec, layout: AnyLayout, micro_batches: Size, compute: Size
) -> list[Part]:
    """Exposed ZeRO-3 parameter gathers of a forward without gradients: one a layer and micro-batch."""
    sharded = layout.zero == 3
    if not some(sharded):
        return []
    parts = []
    depth = -(-model.num_layers // layout.pp)
    held = shards(device, model, layout)
    once = [_once(device, shard, BF16, True)[0] for shard in held]
    for link in LINKS:
        on = [where(_on(link, shard.ranks), one, 0.0) for shard, one in zip(held, once, strict=True)]
        seen = hidden_behind(micro_batches * sum(on), compute, device["overlap_dp"], depth)
        parts.append(part(link, seen, "overlap_dp", spread=(0.4, 1.8)))
    return [only(sharded, one) for one in (*parts, zero_calls(device, model, layout, micro_batches))]


def update(
    device: Device, model: ModelSpec, layout: AnyLayout, *, optimizer: Optimizer, share: float = 1.0
) -> list[Part]:
    """Optimizer step and gradient norm of one GPU.

        GPU:  Psi_own (state + 2 x 4 gradient) / (B_m eta)
        host: PCIe down and up, then the node's memory (`_on_host`)

    Of a share on the host the rest is updated on the GPU, one after the other.

    Source: counting (T9); ZeRO-Offload, arXiv 2101.06840, for the host. `zero_step_time` is what a
    sharded step takes on top, 0 on GPUs.
    """
    owned = sum(s.owned(layout.zero) for s in shards(device, model, layout, share=share))
    bytes_each = STATE_BYTES[optimizer] + 2 * FP32
    sharded = (layout.zero > 0) & (layout.dp * layout.cp > 1)
    away = where(layout.offload_optimizer == "none", 0.0, layout.offload_fraction)
    size = (1 - away) * owned * bytes_each
    here = [through_memory(size, device, "optimizer_hbm_efficiency")] if some(away < 1) else []
    there = _on_host(device, layout, away * owned, bytes_each) if some(away > 0) else []
    own = handled(1 * sharded, device, "zero_step_time")
    return [*here, *there, handled(1, device, "optimizer_overhead"), own]


def fetches(
    device: Device,
    model: ModelSpec,
    layout: AnyLayout,
    passes: Size,
    compute: Size,
    *,
    width: float = BF16,
    returned: Size = 0,
) -> list[Part]:
    """Sharded weights of `width` bytes from the host in `passes` passes over PCIe, which a node's GPUs share.

    A layer's copy runs on a stream of its own while the layer before computes: it hides behind `compute`
    seconds as ZeRO-3's gathers do (torch, foreach_all_gather; DeepSpeed, overlap_comm). FP32 gradients of
    `returned` micro-batches, in addition to those that the update counts, come down, and block
    (foreach_reduce).
    """
    held = sum(s.owned(3) for s in shards(device, model, layout))
    copying, depth = least(device.gpus_per_node, layout.gpus), -(-model.num_layers // layout.pp)
    parts: list[Part] = []
    for count in np.unique(copying).tolist():
        rate = host_rate(device, count)
        copied = moved(passes * width * held, rate)
        low, seen, high = (
            hidden_behind(seconds, compute, device["overlap_dp"], depth)
            for seconds in (copied.low, copied.seconds, copied.high)
        )
        fetched = part(copied.resource, seen, copied.rests_on, spread=(low / seen, high / seen))
        parts += [only(copying == count, one) for one in (fetched, moved(returned * FP32 * held, rate))]
    return parts


def _on_host(device: Device, layout: AnyLayout, owned: Size, bytes_each: float) -> list[Part]:
    """Adam over `owned` parameters a GPU on the CPU, all GPUs of a node at once.

        t = (4 + 2) Psi_own / B_host + n Psi_own b / (DDR min(eta, n eta_1)) [+ NVMe]

    FP32 gradients come down and BF16 weights go up over PCIe that the n GPUs of a node share
    (`kernels.links.host_rate`); b bytes a parameter pass the host's memory, of which one rank's threads
    reach eta_1 and all ranks together eta of the peak.
    """
    gpus, node = least(device.gpus_per_node, layout.gpus), device.profile.node
    up = where(layout.offload_params == "none", BF16, 0.0)  # else they stay there
    parts: list[Part] = []
    for count in np.unique(gpus).tolist():
        shares = {
            "cpu_adam_efficiency": device["cpu_adam_efficiency"],
            "cpu_adam_rank_efficiency": count * device["cpu_adam_rank_efficiency"],
        }
        name = min(shares, key=lambda share: shares[share])
        seconds = count * owned * bytes_each / (node.host_bandwidth.value * shares[name])
        copied = moved((FP32 + up) * owned, host_rate(device, count))
        updated = part("host", seconds, name, spread=device.inverse_spread(name))
        parts += [only(gpus == count, one) for one in (copied, updated)]
    if some(on_disk := layout.offload_optimizer == "nvme"):
        disk = gpus * owned * 12.0
        rate = node.local_storage.value * device["local_storage_read_efficiency"]
        seconds = disk / rate + disk / (node.local_storage.value * device["local_storage_write"])
        stored = part("storage", seconds, "local_storage_read_efficiency", spread=(0.7, 1.7))
        parts.append(only(on_disk, stored))
    return parts
