"""What data-parallel ranks exchange, and the optimizer step (physics T5, T6, T9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.cost import Part, part
from rlhfsim.kernels.device import Device, Group, group
from rlhfsim.kernels.links import host_rate, moved
from rlhfsim.memory.states import BASE_BYTES, CUT, Parted, parted
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.weight_sync.endpoints import weights_of

Optimizer = Literal["adam", "adam8bit", "sgd"]
Link = Literal["nvlink", "network"]
LINKS: tuple[Link, ...] = ("nvlink", "network")
BF16, FP32 = 2.0, 4.0
STATE_BYTES: dict[Optimizer, float] = {"adam": 26.0, "adam8bit": 14.0, "sgd": 10.0}
"""HBM bytes per owned parameter besides its gradient: FP32 master, momentum and variance read and
written, BF16 weight written (3 x 8 + 2); 8-bit moments 8 + 4 + 2; SGD 8 + 2. Counting (T9)."""


@hashed_once
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShard(Hashed):
    """Parameters of one kind on one GPU and the ranks that hold the same ones."""

    params: float
    """Psi before data-parallel sharding; trained ones only."""
    ranks: Group
    copies: Group | None = None
    """Ranks with the same shard of other copies (HSDP)."""

    def owned(self, zero: int) -> float:
        """Parameters whose optimizer state this GPU holds."""
        return self.params / self.ranks.ranks if zero else self.params


def shards(
    device: Device, model: ModelSpec, layout: Layout, *, share: float = 1.0
) -> tuple[GradientShard, ...]:
    """Dense parameters over d x c ranks, experts over N_gpu/(p e x); the mean pipeline stage.

    `share` is the trained part of them (adapters). Source: Megatron-Core's expert data parallelism.
    """
    return _shards(device.domain, model, parted(layout), share)


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
    layout: Layout,
    micro_batches: int,
    reduce_bytes: float,
    *,
    whole: bool = False,
    reductions: int | None = None,
) -> tuple[float, float]:
    """Raw seconds of (parameter gathers, gradient reductions) per optimizer step (T5).

        ZeRO-0: AR(b_g Psi) ; 1: AG(b_w Psi), RS(b_g Psi) ; 2: AG, r RS ; 3: 2 m AG, r RS     r = m

    `whole`: ranks reduce all gradients though they own a share (AR for RS); `reductions`: r, where it is not
    m. Source: Rajbhandari et al., arXiv 1910.02054, section 7; FSDP's reshard after forward.
    """
    gather, reduce = _once(device, shard, reduce_bytes, layout.zero > 0 and not whole)
    if layout.zero == 0:
        return 0.0, reduce
    if layout.zero == 1:
        return gather, reduce
    times = micro_batches if reductions is None else reductions
    return (gather if layout.zero == 2 else 2 * micro_batches * gather), times * reduce


@lru_cache(maxsize=65536)
def _once(device: Device, shard: GradientShard, reduce_bytes: float, sharded: bool) -> tuple[float, float]:
    """One gather of the parameters, and one reduction of the gradients: to their owner or to all."""
    gather = collectives.all_gather(device, BF16 * shard.params, shard.ranks)
    reduce = collectives.reduce_scatter if sharded else collectives.all_reduce
    return gather, reduce(device, reduce_bytes * shard.params, shard.ranks)


def between_copies(
    device: Device, shard: GradientShard, layout: Layout, times: int, reduce_bytes: float
) -> float:
    """Raw seconds in which the copies of a shard sum their gradients `times` a step (HSDP): AR(b_g Psi / s).

    `fully_shard` on a mesh of two dimensions does so after every micro-batch unless it is told otherwise.
    """
    assert shard.copies is not None
    return times * collectives.all_reduce(device, reduce_bytes * shard.owned(layout.zero), shard.copies)


def hidden_behind(seconds: float, compute: float, overlap: float, layers: int) -> float:
    """What stays exposed: max(T/L, T - eta T_comp) (T6): the first layer's part has nothing to hide
    behind."""
    return max(seconds / max(1, layers), seconds - overlap * compute)


class Room(NamedTuple):
    """One direction of one micro-batch on the mean stage, as the data-parallel traffic sees it."""

    seconds: float
    held: Mapping[Link, float]
    """Seconds that its own collectives hold each link."""

    def free(self, link: Link) -> float:
        """Seconds in which the GPU works and the link is idle."""
        return max(0.0, self.seconds - self.held.get(link, 0.0))


class GradientSums(NamedTuple):
    """How gradients add up over data-parallel ranks."""

    bytes_each: float
    """Bytes of a gradient that is sent."""
    whole: bool = False
    """All are reduced on all ranks, and new weights gathered at the end of the update (DeepSpeed's ZeRO-1 and
    ZeRO-2)."""
    copies_each: bool = False
    """Copies of shards add up after every micro-batch, not once."""
    once: bool = False
    """Nothing is reduced before the last backward pass, behind which it hides."""
    in_turn: bool = False
    """No backward pass runs while gradients are reduced (DeepSpeed without `overlap_comm`)."""


def exchange(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    micro_batches: int,
    *,
    forward: Room,
    backward: Room,
    sums: GradientSums,
    share: float = 1.0,
) -> list[Part]:
    """Exposed data-parallel traffic of one optimizer step, and the compute that it slows.

    All shards on one link share it and the time it is free: no step is shorter than the traffic of a
    link. Collectives that run beside kernels take a share of the SMs (Calculon, arXiv 2305.06990).
    """
    parts: list[Part] = []
    eta, depth = device["overlap_dp"], -(-model.num_layers // layout.pp)
    reduce_bytes, whole, copies_each, once, in_turn = sums
    reductions = 1 if once else micro_batches
    parts_held = shards(device, model, layout, share=share)
    for link in LINKS:
        raw = [
            traffic(device, shard, layout, micro_batches, reduce_bytes, whole=whole, reductions=reductions)
            for shard in parts_held
            if shard.ranks.ranks > 1 and link_of(shard.ranks) == link
        ]
        gather, reduce = sum(g for g, _ in raw), sum(r for _, r in raw)
        reduce += sum(
            between_copies(device, shard, layout, reductions if copies_each else 1, reduce_bytes)
            for shard in parts_held
            if shard.copies and link_of(shard.copies) == link
        )
        if gather + reduce == 0:
            continue
        behind = 0.0 if in_turn else backward.free(link)
        free = 0.0 if whole else forward.free(link)
        last = reduce if once else 0.0
        seen = exposed(layout.zero, micro_batches, gather, reduce - last, free, behind, eta, depth)
        seen += hidden_behind(last, behind, eta, depth)
        taken = "sm_share_nic" if link == "network" else "sm_share_nvlink"
        slowed = device[taken] * max(0.0, gather + reduce - seen)
        parts.append(part(link, seen, "overlap_dp", spread=(0.4, 1.8)))
        parts.append(part("compute", slowed, taken, spread=(0.3, 1.5)))
    if layout.zero == 3:  # a gather ahead and one back; reductions go by bucket
        parts.append(zero_calls(device, model, layout, 2 * micro_batches))
    return parts


def dequantised(device: Device, model: ModelSpec, layout: Layout, passes: float) -> Part:
    """What a 4-bit base costs: in each of `passes` every matrix is read, and written in BF16.

        passes Psi_layers (0.52 + 2) / (B_m eta)

    Source: QLoRA, arXiv 2305.14314; eta is `nf4_dequantise_efficiency`, known to a factor of seven.
    """
    ends = model.params_embedding + (0 if model.tied_embeddings else model.params_lm_head)
    whole = sum(s.params for s in shards(device, model, replace(layout, shards=None)))
    held = whole - ends / (layout.tp * layout.pp)
    name = "nf4_dequantise_efficiency"
    seconds = passes * held * (BASE_BYTES["nf4"] + BF16) / (device.profile.hbm.value * device[name])
    return part("hbm", seconds, name, spread=device.inverse_spread(name))


def summed(device: Device, model: ModelSpec, layout: Layout, micro_batches: int, *, share: float) -> Part:
    """What sums in FP32 take beside sums in BF16: they are read and written once a micro-batch.

    m Psi_held (2 + 2) / (B_m eta)        Psi_held = Psi, of its owner from ZeRO-2 on
    """
    held = sum(s.owned(layout.zero >= 2) for s in shards(device, model, layout, share=share))
    name = "optimizer_hbm_efficiency"
    seconds = micro_batches * held * 2 * (FP32 - BF16) / (device.profile.hbm.value * device[name])
    return part("hbm", seconds, name, spread=device.inverse_spread(name))


def cast(device: Device, model: ModelSpec, layout: Layout, passes: float, *, share: float = 1.0) -> Part:
    """What autocast costs: in each of `passes` FP32 weights are read and written in BF16, or gradients the
    other way round.

        passes Psi_held (4 + 2) / (B_m eta)
    """
    held = sum(s.params for s in shards(device, model, layout, share=share))
    name = "optimizer_hbm_efficiency"
    seconds = passes * held * (FP32 + BF16) / (device.profile.hbm.value * device[name])
    return part("hbm", seconds, name, spread=device.inverse_spread(name))


def exposed(
    zero: int,
    micro_batches: int,
    gather: float,
    reduce: float,
    forward: float,
    backward: float,
    eta: float,
    layers: int,
) -> float:
    """Seconds of the gathers and reductions of one step that no compute hides.

        ZeRO-3: half the gathers behind m forwards; the other half and the reductions behind m backwards
        else:   gathers behind the first forward; reductions behind the last backward (ZeRO-2: every one)

    `forward` and `backward`: seconds of one micro-batch in which the link is free.
    """
    if zero == 3:
        ahead = hidden_behind(gather / 2, micro_batches * forward, eta, layers)
        return ahead + hidden_behind(gather / 2 + reduce, micro_batches * backward, eta, layers)
    behind = (micro_batches if zero == 2 else 1) * backward
    return hidden_behind(gather, forward, eta, layers) + hidden_behind(reduce, behind, eta, layers)


def link_of(ranks: Group) -> Link:
    """The link that limits a collective of these ranks."""
    return "network" if ranks.domains > 1 else "nvlink"


def zero_calls(device: Device, model: ModelSpec, layout: Layout, passes: float) -> Part:
    """What the hooks of ZeRO-3 take on the host: one call a named tensor and pass.

    `zero_tensor_time`: 0 on GPUs, where it hides behind kernels that were launched before; on a CPU the
    core that computes runs the hooks and the Python of each collective as well.
    """
    tensors = weights_of(model).tensors / layout.pp
    name = "zero_tensor_time"
    seconds = passes * tensors * device[name]
    return part("overhead", seconds, name, spread=device.spread(name))


def gathers(
    device: Device, model: ModelSpec, layout: Layout, micro_batches: int, compute: float
) -> list[Part]:
    """Exposed ZeRO-3 parameter gathers of a forward without gradients: one a layer and micro-batch."""
    if layout.zero != 3:
        return []
    parts = []
    depth = -(-model.num_layers // layout.pp)
    for link in LINKS:
        raw = micro_batches * sum(
            _once(device, shard, BF16, True)[0]
            for shard in shards(device, model, layout)
            if link_of(shard.ranks) == link
        )
        seen = hidden_behind(raw, compute, device["overlap_dp"], depth)
        parts.append(part(link, seen, "overlap_dp", spread=(0.4, 1.8)))
    return [*parts, zero_calls(device, model, layout, micro_batches)]


def update(
    device: Device, model: ModelSpec, layout: Layout, *, optimizer: Optimizer, share: float = 1.0
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
    launch = part(
        "overhead",
        device["optimizer_overhead"],
        "optimizer_overhead",
        spread=device.spread("optimizer_overhead"),
    )
    sharded = layout.zero > 0 and layout.dp * layout.cp > 1
    own = part(
        "overhead",
        sharded * device["zero_step_time"],
        "zero_step_time",
        spread=device.spread("zero_step_time"),
    )
    away = 0.0 if layout.offload_optimizer == "none" else layout.offload_fraction
    name = "optimizer_hbm_efficiency"
    seconds = (1 - away) * owned * bytes_each / (device.profile.hbm.value * device[name])
    here = [part("hbm", seconds, name, spread=device.inverse_spread(name))] if away < 1 else []
    there = _on_host(device, layout, away * owned, bytes_each) if away else []
    return [*here, *there, launch, own]


@lru_cache(maxsize=8192)
def updated(
    device: Device, model: ModelSpec, cut: tuple[Any, ...], optimizer: Optimizer, share: float
) -> tuple[Part, ...]:
    """The same of every layout with these fields (`memory.states.CUT`), whatever its micro-batches."""
    layout = Layout(**dict(zip(CUT, cut, strict=True)))
    return tuple(update(device, model, layout, optimizer=optimizer, share=share))


def fetches(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    passes: int,
    compute: float,
    *,
    width: float = BF16,
    returned: int = 0,
) -> list[Part]:
    """Sharded weights of `width` bytes from the host in `passes` passes over PCIe, which a node's GPUs share.

    A layer's copy runs on a stream of its own while the layer before computes: it hides behind `compute`
    seconds as ZeRO-3's gathers do (torch, foreach_all_gather; DeepSpeed, overlap_comm). FP32 gradients of
    `returned` micro-batches beside those that the update counts come down, and block (foreach_reduce).
    """
    held = sum(s.owned(3) for s in shards(device, model, layout))
    rate = host_rate(device, min(device.gpus_per_node, layout.gpus))
    copied, depth = moved(passes * width * held, rate), -(-model.num_layers // layout.pp)
    low, seen, high = (
        hidden_behind(seconds, compute, device["overlap_dp"], depth)
        for seconds in (copied.low, copied.seconds, copied.high)
    )
    fetched = part(copied.resource, seen, copied.rests_on, spread=(low / seen, high / seen))
    return [fetched, moved(returned * FP32 * held, rate)]


def _on_host(device: Device, layout: Layout, owned: float, bytes_each: float) -> list[Part]:
    """Adam over `owned` parameters a GPU on the CPU, all GPUs of a node at once.

        t = (4 + 2) Psi_own / B_host + n Psi_own b / (DDR min(eta, n eta_1)) [+ NVMe]

    FP32 gradients come down and BF16 weights go up over PCIe that the n GPUs of a node share
    (`kernels.links.host_rate`); b bytes a parameter pass the host's memory, of which one rank's threads
    reach eta_1 and all ranks together eta of the peak.
    """
    gpus = min(device.gpus_per_node, layout.gpus)
    up = BF16 if layout.offload_params == "none" else 0.0  # else they stay there
    shares = {
        "cpu_adam_efficiency": device["cpu_adam_efficiency"],
        "cpu_adam_rank_efficiency": gpus * device["cpu_adam_rank_efficiency"],
    }
    name = min(shares, key=lambda share: shares[share])
    node = device.profile.node
    seconds = gpus * owned * bytes_each / (node.host_bandwidth.value * shares[name])
    parts = [
        moved((FP32 + up) * owned, host_rate(device, gpus)),
        part("host", seconds, name, spread=device.inverse_spread(name)),
    ]
    if layout.offload_optimizer == "nvme":
        disk = gpus * owned * 12.0
        rate = node.local_storage.value * device["local_storage_read_efficiency"]
        seconds = disk / rate + disk / (node.local_storage.value * device["local_storage_write"])
        parts.append(part("storage", seconds, "local_storage_read_efficiency", spread=(0.7, 1.7)))
    return parts
