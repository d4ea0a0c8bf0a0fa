"""Training of one model on one pool: forward, backward, gradient exchange, optimizer (physics T1-T11).

Legend: m micro-batches per optimizer step and rank, p v stages and chunks, t tensor, d data, c context,
e expert parallelism, Psi parameters a GPU holds before data-parallel sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.memory.states import PASSED, cut, passed
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.micro_batch import whole_units
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.training import gradient_exchange as exchange
from rlhfsim.training import pipeline
from rlhfsim.training.gradient_exchange import Optimizer
from rlhfsim.training.layer_time import EP_SPREAD, Pass, ep_spread
from rlhfsim.training.passes import Passes, contention, passes, slowed
from rlhfsim.training.unequal_lengths import Spread, late_parts, spread_of
from rlhfsim.training.work import LOW, Work

BF16 = 2.0
HOPPER, BLACKWELL = ("h100", "h200", "h800", "h20"), ("b200", "b300", "gb200", "gb300")
"""Beginnings of profile names of GPUs whose tables hold attention kernels newer than FlashAttention-2."""


class TrainedModel(NamedTuple):
    """What is trained, whatever the layout; a call is its `passes` and its `updates`."""

    device: Device
    model: ModelSpec
    sequences: Sequences
    """Sequences of one pass over the data; several epochs are several passes."""
    backend: Backend
    software: Software
    steps: int = 1
    """Optimizer steps."""
    optimizer: Optimizer = "adam"
    lora: Lora | None = None
    precision: str = "bf16"

    def passes(self, layout: Layout, pack_len: float | None = None) -> Cost:
        """All optimizer steps without their updates: the same of layouts that differ in `offload_optimizer`
        and `offload_fraction` alone. `pack_len` tokens make a pack; `layout.micro_batch` packs (or sequences)
        a micro-batch.

            T = steps (pipeline(m, stages) + exposed DP traffic + optimizer + wait for the slowest rank)

        with the optimizer from `updates`. Source: physics section 3.
        """
        parts, count = _passed(self, passed(layout), pack_len)
        busy = sum(x.seconds for x in parts)
        return _times([*parts, *_from_elsewhere(self, layout, count, busy)], self.steps)

    def updates(self, layout: Layout) -> Cost:
        """The updates of all optimizer steps: the same of layouts that agree in `memory.states.CUT`."""
        share = adapter_share(self.model, self.lora)
        return _times(
            exchange.updated(self.device, self.model, cut(layout), self.optimizer, share), self.steps
        )


def _times(parts: Iterable[Part], steps: int) -> Cost:
    return Cost(parts=tuple([x for x in parts if x.seconds > 0])).scaled(steps)


class _Step(NamedTuple):
    """One optimizer step before its update."""

    asked: TrainedModel
    layout: Layout
    work: Work
    micro_batches: int
    through: Passes


@lru_cache(maxsize=8192)
def _passed(
    asked: TrainedModel, fields: tuple[Any, ...], packs: float | None
) -> tuple[tuple[Part, ...], int]:
    """One optimizer step before its update, and its micro-batches: the same wherever states lie."""
    layout = Layout(**dict(zip(PASSED, fields, strict=True)))
    device, model, lengths, steps = asked.device, asked.model, asked.sequences, asked.steps
    size, count = micro_batches(layout, lengths, steps, packs)
    work = work_of(device, layout, lengths, size, asked.precision, asked.software, model)
    frozen = asked.lora is not None
    through = passes(device, model, work, asked.software, layout.recompute, frozen=frozen)
    step = _Step(asked, layout, work, count, slowed(through, contention(device, layout.gpus)))
    return _iteration(step, spread_of(lengths, layout, steps, count, packs)), count


def micro_batches(
    layout: Layout, sequences: Sequences, steps: int, pack_len: float | None, *, scoring: bool = False
) -> tuple[float, int]:
    """Tokens of one micro-batch (before context parallelism) and micro-batches per step and rank.

        m = ceil(count / (steps d b)), with `pack_len` count = tokens / pack_len (T2)

    A rank with less than one full micro-batch runs a smaller one; at least one sequence. Where all
    sequences are alike the fullest rank decides; others are dealt out by length, near the mean, and padded
    to their chunks: 2 c t of equal length under context parallelism (zigzag order, sequence parallelism).
    """
    units = sequences.tokens / pack_len if pack_len else float(sequences.count)
    each = pack_len or sequences.tokens / sequences.count
    rank = max(1.0, units / (steps * layout.dp))
    if not pack_len and sequences.deviation == 0:
        rank = math.ceil(rank - 1e-9)
    held = layout.sequences(scoring=scoring)
    count = max(1, math.ceil(rank / (held if scoring else whole_units(held, sequences.together)) - 1e-9))
    chunks = 2 * layout.cp * layout.tp if layout.cp > 1 and sequences.deviation > 0 else 1
    padding = (chunks - 1) / 2 / (sequences.tokens / sequences.count)
    return each * rank / count * (1 + padding), count


def work_of(
    device: Device,
    layout: Layout,
    sequences: Sequences,
    tokens: float,
    precision: str,
    software: Software,
    model: ModelSpec,
) -> Work:
    """The micro-batch of one GPU."""
    skewed = model.moe is not None and layout.ep > 1 and not software.balanced
    dispatcher, ep_overlap = (layout.dispatcher, layout.ep_overlap) if layout.ep > 1 else (None, None)
    return _one(
        Work(
            tokens=tokens / layout.cp,
            length=sequences.attention_length,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            precision=precision,
            bf16_matrices=software.bf16_matrices if precision in LOW else (),
            skew=device["ep_hot_rank_factor"] if skewed else 1.0,
            low_precision_gain=device["training_fp8_gain"] * device[f"fp8_speed_{software.stack}"],
            fused=software.fused,
            attention_slowdown=flash2_slowdown(device) if software.flash2 else 1.0,
            flash=software.flash,
            fused_experts=software.fused_experts,
            dispatcher=dispatcher,
            ep_overlap=ep_overlap,
            fp8_attention=software.fp8_attention,
        )
    )


@lru_cache(maxsize=65536)
def _one(work: Work) -> Work:
    """One object for equal micro-batches: they are compared at every look-up of their costs."""
    return work


def flash2_slowdown(device: Device) -> float:
    """Time of FlashAttention-2 over the generation of kernels that the GPU's tables hold."""
    if device.profile.name.startswith(BLACKWELL):
        return device["flash2_on_blackwell"]
    return device["flash2_on_hopper"] if device.profile.name.startswith(HOPPER) else 1.0


def _iteration(step: _Step, spread: Spread) -> tuple[Part, ...]:
    """One optimizer step before its update."""
    device, layout, through = step.asked.device, step.layout, step.through
    p, m, v = layout.pp, step.micro_batches, layout.vp
    times = pipeline.split(step.asked.model.num_layers, p, v).times(through.layer, *through.ends)
    busy = m * sum(times) / p
    whole = pipeline.makespan(times, m, v)
    shown = through.forward.plus(through.backward).times(m / p)
    parts = work_parts(device, layout, shown, busy, ep_spread(device, step.asked.model, step.work))
    bubble = part("bubble", whole - busy, "pipeline schedule")
    late = late_parts(device, sum(shown), m / p * through.launch, spread, whole / busy)
    return *parts, bubble, *late, *_stage_sends(step), *_exchange(step)


_KERNELS: tuple[tuple[Resource, str], ...] = (
    ("compute", "training_kernel_efficiency"),
    ("compute", "training_attention_efficiency"),
    ("hbm", "hbm_efficiency"),
)
"""Resource and coefficient of the first parts of a `Pass`."""
_UNTIMED: tuple[tuple[Resource, str], ...] = (
    ("compute", "scan_efficiency"),
    ("compute", "indexer_efficiency"),
)
"""Those of the kernels that nobody timed: the scan of recurrent layers, the indexer of sparse attention."""


def work_parts(
    device: Device, layout: Layout, shown: Pass, busy: float, ep_spread: tuple[float, float] = EP_SPREAD
) -> list[Part]:
    """The mean stage's exposed work by resource; what is left of `busy` is launch-bound."""
    timed = (*zip(_KERNELS, shown, strict=False), *zip(_UNTIMED, (shown.scan, shown.indexer), strict=True))
    parts = [
        Part(resource, seconds, name, device.borrowed(device.inverse_spread(name)))
        for (resource, name), seconds in timed
        if seconds > 0
    ]
    if shown.tp > 0:
        parts.append(Part(_tier(device, layout.tp, 1), shown.tp, "overlap_tp", (0.6, 1.4)))
    if shown.ep > 0:
        parts.append(Part(_tier(device, layout.ep, layout.etp), shown.ep, "overlap_ep", ep_spread))
    if shown.cp > 0:
        cp = _tier(device, layout.cp, layout.tp)
        parts.append(Part(cp, shown.cp, _link(cp), device.inverse_spread(_link(cp))))
    launch = busy - sum(shown)
    if launch > 0:
        parts.append(Part("overhead", launch, "host_layer_time", device.spread("host_layer_time")))
    return parts


def _tier(device: Device, ranks: int, stride: int) -> Resource:
    return "network" if collectives.crosses(device, ranks, stride) else "nvlink"


def _link(resource: Resource) -> str:
    return "nic_efficiency" if resource == "network" else "nvlink_efficiency"


def _stage_sends(step: _Step) -> list[Part]:
    """Activations and their gradients between stages (T3), as `pipeline.sends` counts them.

    T' h elements each; interleaved schedules send while the next chunk computes, so that `overlap_dp`
    of it hides; plain 1F1B waits.
    """
    device, layout = step.asked.device, step.layout
    visible = 1 - device["overlap_dp"] if layout.vp > 1 else 1.0
    return send_parts(device, step.asked.model, layout, step.work, layout.vp * step.micro_batches, visible)


def send_parts(
    device: Device,
    model: ModelSpec,
    layout: Layout,
    work: Work,
    rounds: int,
    visible: float,
    *,
    back: bool = True,
) -> list[Part]:
    """Sends between pipeline stages by link; `rounds` micro-batches times chunks, `visible` share shown."""
    if layout.pp == 1:
        return []
    crossing = pipeline.hops(layout.pp, layout.tp * layout.cp * layout.dp, device.domain)
    count = pipeline.sends(crossing, rounds, back=back)
    size = BF16 * work.held * model.hidden
    found: list[Part] = []
    links: tuple[tuple[Resource, float], ...] = (("nvlink", count.near), ("network", count.far))
    for link, sent in links:
        seconds = visible * sent * collectives.p2p(device, size, link == "network")
        found.append(part(link, seconds, _link(link), spread=device.inverse_spread(_link(link))))
    return found


def adapter_share(model: ModelSpec, lora: Lora | None) -> float:
    """Trained over all parameters; adapters of rank r add r (n + k) to each n x k matrix."""
    if lora is None:
        return 1.0
    whole, added = 0, 0
    for kind in model.kinds:
        matrices = layers.layer_matrices(model, kind=kind)
        whole += kind.layers * sum(m.params for m in matrices)
        added += kind.layers * sum(lora.rank * (m.n + m.k) * m.experts for m in matrices)
    return min(1.0, added / whole)


def _exchange(step: _Step) -> list[Part]:
    """Data-parallel traffic of one step, and its sums in FP32."""
    asked, layout, through = step.asked, step.layout, step.through
    device, model, software = asked.device, asked.model, asked.software
    share, whole = adapter_share(model, asked.lora), layout.zero in BACKENDS[asked.backend].whole_stages
    ahead = through.layer_forward * model.num_layers + sum(through.ends_forward)
    back = through.layer * model.num_layers + sum(through.ends) - ahead
    exchanged = exchange.exchange(
        device,
        model,
        layout,
        step.micro_batches,
        forward=_room(device, layout, ahead, through.sent[0]),
        backward=_room(device, layout, back, through.sent[1]),
        sums=exchange.GradientSums(
            software.plain(layout, trained=True)
            or software.reduce_bytes
            or BACKENDS[asked.backend].reduce_bytes,
            whole,
            software.copies_each,
            software.sums_whole and asked.backend == "fsdp2",
            whole and (not software.overlaps_reduction or (software.fp32_sums and layout.zero == 1)),
        ),
        share=share,
    )
    if software.fp32_sums:
        exchanged.append(exchange.summed(device, model, layout, step.micro_batches, share=share))
    return exchanged


def _from_elsewhere(asked: TrainedModel, layout: Layout, micro_batches: int, busy: float) -> list[Part]:
    """4-bit weights dequantised and parameters fetched from the host, in an optimizer step of `busy` s.

    FSDP2's shards are FP32, and it sends the gradients of each micro-batch down (torch, CPUOffloadPolicy).
    """
    device, model, lora, parts = asked.device, asked.model, asked.lora, list[Part]()
    fp32 = asked.software.plain(layout, trained=True) == exchange.FP32
    if fp32 and (lora is None or lora.base != "nf4"):
        passes = micro_batches * (2 if layout.recompute == "full" else 1)
        share = adapter_share(model, lora)
        parts.append(exchange.cast(device, model, layout, passes))
        parts.append(exchange.cast(device, model, layout, micro_batches, share=share))  # gradients
    if lora is not None and lora.base == "nf4":
        rounds = micro_batches * (3 if layout.recompute == "full" else 2)
        parts.append(exchange.dequantised(device, model, layout, rounds))
    if layout.offload_params != "none":
        width, returned = (
            (exchange.FP32, micro_batches - 1) if asked.backend == "fsdp2" else (exchange.BF16, 0)
        )
        parts += exchange.fetches(
            device, model, layout, 2 * micro_batches, busy, width=width, returned=returned
        )
    return parts


def _room(device: Device, layout: Layout, seconds: float, raw: Pass) -> exchange.Room:
    """What one direction of a micro-batch leaves to the data-parallel traffic, on the mean stage."""
    held: dict[exchange.Link, float] = {"nvlink": 0.0, "network": 0.0}
    groups = ((layout.tp, 1, raw.tp), (layout.ep, layout.etp, raw.ep), (layout.cp, layout.tp, raw.cp))
    for ranks, stride, time in groups:
        held["network" if collectives.crosses(device, ranks, stride) else "nvlink"] += time / layout.pp
    return exchange.Room(seconds / layout.pp, held)
