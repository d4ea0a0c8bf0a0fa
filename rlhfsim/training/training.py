"""Training of one model on one pool: forward, backward, gradient exchange, optimizer (physics T1-T11).

Legend: m micro-batches per optimizer step and rank, p v stages and chunks, t tensor, d data, c context,
e expert parallelism, Psi parameters a GPU holds before data-parallel sharding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size, ceil, each, given, most, remembered, some, where
from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import AnyLayout
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

    def passes(self, layout: AnyLayout, pack_len: Size | None = None) -> Cost:
        """All optimizer steps without their updates: the same of layouts that differ in `offload_optimizer`
        and `offload_fraction` alone. `pack_len` tokens make a pack; `layout.micro_batch` packs (or sequences)
        a micro-batch.

            T = steps (pipeline(m, stages) + exposed DP traffic + optimizer + wait for the slowest rank)

        with the optimizer from `updates`. Source: physics section 3.
        """
        size, count = micro_batches(layout, self.sequences, self.steps, pack_len)
        passing = Passing(
            self.device, self.model, self.sequences, self.precision, self.software, self.lora is not None
        )
        step = _Step(self, layout, count, passing.of(layout, size))
        parts = _iteration(step, spread_of(self.sequences, layout, self.steps, count, pack_len))
        busy = sum(x.seconds for x in parts)
        return _times([*parts, *_from_elsewhere(self, layout, count, busy)], self.steps)

    def updates(self, layout: AnyLayout) -> Cost:
        """The updates of all optimizer steps: the same of layouts with equal `memory.states.CUT`."""
        share = adapter_share(self.model, self.lora)
        parts = exchange.update(self.device, self.model, layout, optimizer=self.optimizer, share=share)
        return _times(parts, self.steps)


def _times(parts: Iterable[Part], steps: int) -> Cost:
    return Cost(parts=tuple([x for x in parts if some(x.seconds > 0)])).scaled(steps)


class _Step(NamedTuple):
    """One optimizer step before its update."""

    asked: TrainedModel
    layout: AnyLayout
    micro_batches: Size
    through: Passed


class Passed(NamedTuple):
    """A micro-batch on one GPU, timed."""

    passes: Passes
    held: Size
    """Tokens outside the tensor-parallel regions."""
    ep_spread: tuple[Size, Size]
    """P10 and P90 of the exposed expert-parallel time over its price."""


class WorkCut(NamedTuple):
    """What of a layout decides the work of a micro-batch."""

    tp: Size
    cp: Size
    ep: Size
    etp: Size
    sequence_parallel: Size
    dispatcher: Size
    ep_overlap: Size


class Passing(NamedTuple):
    """What passes micro-batches through a model, whatever the layout."""

    device: Device
    model: ModelSpec
    sequences: Sequences
    precision: str
    software: Software
    frozen: bool
    logprob: bool = True
    scoring: bool = False
    """Without gradients."""

    def of(self, layout: AnyLayout, size: Size) -> Passed:
        """A micro-batch of `size` tokens on one GPU, slowed by the other ranks of its node."""
        device, cut = self.device, (getattr(layout, name) for name in WorkCut._fields)
        near = (layout.tp * layout.cp <= device.domain) & (layout.ep * layout.etp <= device.domain)
        network = where(near, 0.0, device.network_bandwidth)
        recompute: Size = "none" if self.scoring else layout.recompute
        known = _known(device.inside or device, *self[1:])
        *found, held, low, high = remembered(known, self._numbers, network, size, recompute, *cut)
        through = slowed(Passes.of(found), contention(device, layout.gpus))
        return Passed(through, held, (low, high))

    def _numbers(self, _network: Size, tokens: Size, recompute: Size, *cut: Size) -> tuple[Size, ...]:
        device, model, sequences, precision, software, frozen, logprob, scoring = self
        work = work_of(device, WorkCut(*cut), sequences, tokens, precision, software, model)
        through = passes(
            device, model, work, software, recompute, frozen=frozen, logprob=logprob, scoring=scoring
        )
        return *through.numbers, work.held, *ep_spread(device, model, work)


@lru_cache(maxsize=16)
def _known(*_: Hashable) -> dict[tuple[Any, ...], NDArray[np.float64]]:
    """Times of micro-batches that were asked for, whatever their pool, by bandwidth of the network where they
    use it and by work."""
    return {}


def micro_batches(
    layout: AnyLayout, sequences: Sequences, steps: int, pack_len: Size | None, *, scoring: bool = False
) -> tuple[Size, Size]:
    """Tokens of one micro-batch (before context parallelism) and micro-batches per step and rank.

        m = ceil(count / (steps d b)), with `pack_len` count = tokens / pack_len (T2)

    A rank with less than one full micro-batch runs a smaller one; at least one sequence. Where all
    sequences are alike the fullest rank decides; others are dealt out by length, near the mean, and padded
    to their chunks: 2 c t of equal length under context parallelism (zigzag order, sequence parallelism).
    """
    packs, mean = given(pack_len), sequences.tokens / sequences.count
    unit = where(packs, pack_len, mean)
    units = where(packs, sequences.tokens / unit, float(sequences.count))
    rank = most(1.0, units / (steps * layout.dp))
    if sequences.deviation == 0:
        rank = where(packs, rank, ceil(rank - 1e-9))
    held = layout.sequences(scoring=scoring)
    count = most(1, ceil(rank / (held if scoring else whole_units(held, sequences.together)) - 1e-9))
    split = (layout.cp > 1) & (sequences.deviation > 0)
    padding = (where(split, 2 * layout.cp * layout.tp, 1) - 1) / 2 / mean
    return unit * rank / count * (1 + padding), count


def work_of(
    device: Device,
    layout: Layout | WorkCut,
    sequences: Sequences,
    tokens: Size,
    precision: str,
    software: Software,
    model: ModelSpec,
) -> Work:
    """The micro-batch of one GPU."""
    routed = layout.ep > 1
    skew = device["ep_hot_rank_factor"] if model.moe is not None and not software.balanced else 1.0
    return Work(
        tokens=tokens / layout.cp,
        length=sequences.attention_length,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        sequence_parallel=layout.sequence_parallel & (layout.tp > 1),
        precision=precision,
        bf16_matrices=software.bf16_matrices if precision in LOW else (),
        skew=where(routed, skew, 1.0),
        low_precision_gain=device["training_fp8_gain"] * device[f"fp8_speed_{software.stack}"],
        fused=software.fused,
        attention_slowdown=flash2_slowdown(device) if software.flash2 else 1.0,
        flash=software.flash,
        fused_experts=software.fused_experts,
        dispatcher=where(routed, layout.dispatcher, None),
        ep_overlap=where(routed, layout.ep_overlap, None),
        fp8_attention=software.fp8_attention,
    )


def flash2_slowdown(device: Device) -> float:
    """Time of FlashAttention-2 over the generation of kernels that the GPU's tables hold."""
    if device.profile.name.startswith(BLACKWELL):
        return device["flash2_on_blackwell"]
    return device["flash2_on_hopper"] if device.profile.name.startswith(HOPPER) else 1.0


def _iteration(step: _Step, spread: Spread) -> tuple[Part, ...]:
    """One optimizer step before its update."""
    device, layout, through = step.asked.device, step.layout, step.through.passes
    p, m, v = layout.pp, step.micro_batches, layout.vp
    times = pipeline.split(step.asked.model.num_layers, p, v).times(through.layer, *through.ends)
    busy = m * sum(times) / p
    whole = pipeline.makespan(times, m, v)
    shown = through.forward.plus(through.backward).times(m / p)
    parts = work_parts(device, layout, shown, busy, step.through.ep_spread)
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
    device: Device, layout: AnyLayout, shown: Pass, busy: Size, ep_spread: tuple[Size, Size] = EP_SPREAD
) -> list[Part]:
    """The mean stage's exposed work by resource; what is left of `busy` is launch-bound."""
    timed = (*zip(_KERNELS, shown, strict=False), *zip(_UNTIMED, (shown.scan, shown.indexer), strict=True))
    parts = [
        Part(resource, seconds, name, device.borrowed(device.inverse_spread(name)))
        for (resource, name), seconds in timed
        if some(seconds > 0)
    ]
    tp, ep, cp = (
        _by_link(collectives.crosses(device, ranks, stride), seconds)
        for ranks, stride, seconds in (
            (layout.tp, 1, shown.tp),
            (layout.ep, layout.etp, shown.ep),
            (layout.cp, layout.tp, shown.cp),
        )
    )
    parts += [Part(link, seconds, "overlap_tp", (0.6, 1.4)) for link, seconds in tp]
    parts += [Part(link, seconds, "overlap_ep", ep_spread) for link, seconds in ep]
    parts += [Part(x, seconds, _link(x), device.inverse_spread(_link(x))) for x, seconds in cp]
    launch = busy - sum(shown)
    if some(launch > 0):
        launch = most(launch, 0.0)
        parts.append(Part("overhead", launch, "host_layer_time", device.spread("host_layer_time")))
    return parts


def _by_link(crosses: Size, seconds: Size) -> Iterator[tuple[Resource, Size]]:
    """Seconds on the links that have some."""
    links: tuple[tuple[Resource, Size], ...] = (
        ("nvlink", where(crosses, 0.0, seconds)),
        ("network", where(crosses, seconds, 0.0)),
    )
    yield from ((link, on) for link, on in links if some(on > 0))


def _link(resource: Resource) -> str:
    return "nic_efficiency" if resource == "network" else "nvlink_efficiency"


def _stage_sends(step: _Step) -> list[Part]:
    """Activations and their gradients between stages (T3), as `pipeline.sends` counts them.

    T' h elements each; interleaved schedules send while the next chunk computes, so that `overlap_dp`
    of it hides; plain 1F1B waits.
    """
    device, layout = step.asked.device, step.layout
    visible = where(layout.vp > 1, 1 - device["overlap_dp"], 1.0)
    rounds = layout.vp * step.micro_batches
    return send_parts(device, step.asked.model, layout, step.through.held, rounds, visible)


def send_parts(
    device: Device,
    model: ModelSpec,
    layout: AnyLayout,
    tokens: Size,
    rounds: Size,
    visible: Size,
    *,
    back: bool = True,
) -> list[Part]:
    """Sends of `tokens` between pipeline stages by link; `rounds` micro-batches times chunks, `visible` share
    shown."""
    if not some(layout.pp > 1):
        return []

    def sends(pp: int, stride: int, rounds: int) -> pipeline.Sends:
        return pipeline.sends(pipeline.hops(pp, stride, device.domain), rounds, back=back)

    near, far = each(sends, layout.pp, layout.tp * layout.cp * layout.dp, rounds)
    size = BF16 * tokens * model.hidden
    found: list[Part] = []
    links: tuple[tuple[Resource, Size], ...] = (("nvlink", near), ("network", far))
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
    asked, layout, through = step.asked, step.layout, step.through.passes
    device, model, software = asked.device, asked.model, asked.software
    rules, share = BACKENDS[asked.backend], adapter_share(model, asked.lora)
    whole = reduce(or_, (layout.zero == zero for zero in rules.whole_stages), False)
    plain = software.plain(layout, trained=True)
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
            where(given(plain), plain, software.reduce_bytes or rules.reduce_bytes),
            whole,
            software.copies_each,
            software.sums_whole and asked.backend == "fsdp2",
            whole & (not software.overlaps_reduction or software.fp32_sums & (layout.zero == 1)),
        ),
        share=share,
    )
    if software.fp32_sums:
        exchanged.append(exchange.summed(device, model, layout, step.micro_batches, share=share))
    return exchanged


def in_fp32(software: Software, layout: AnyLayout, lora: Lora | None, *, trained: bool) -> Size:
    """Whether autocast turns FP32 weights into BF16 for every pass."""
    if lora is not None and lora.base == "nf4":
        return False
    return software.plain(layout, trained=trained) == exchange.FP32


def _from_elsewhere(asked: TrainedModel, layout: AnyLayout, micro_batches: Size, busy: Size) -> list[Part]:
    """4-bit weights dequantised and parameters fetched from the host, in an optimizer step of `busy` s.

    FSDP2's shards are FP32, and it sends the gradients of each micro-batch down (torch, CPUOffloadPolicy).
    """
    device, model, lora, parts = asked.device, asked.model, asked.lora, list[Part]()
    again = where(layout.recompute == "full", 1, 0)
    if some(fp32 := in_fp32(asked.software, layout, lora, trained=True)):
        share = adapter_share(model, lora)
        weights = exchange.cast(device, model, layout, micro_batches * (1 + again))
        gradients = exchange.cast(device, model, layout, micro_batches, share=share)
        parts += [exchange.only(fp32, one) for one in (weights, gradients)]
    if lora is not None and lora.base == "nf4":
        parts.append(exchange.dequantised(device, model, layout, micro_batches * (2 + again)))
    if some(hosted := layout.offload_params != "none"):
        width, returned = (
            (exchange.FP32, micro_batches - 1) if asked.backend == "fsdp2" else (exchange.BF16, 0)
        )
        fetched = exchange.fetches(
            device, model, layout, 2 * micro_batches, busy, width=width, returned=returned
        )
        parts += [exchange.only(hosted, one) for one in fetched]
    return parts


def _room(device: Device, layout: AnyLayout, seconds: Size, raw: Pass) -> exchange.Room:
    """What one direction of a micro-batch leaves to the data-parallel traffic, on the mean stage."""
    held: dict[exchange.Link, Size] = {"nvlink": 0.0, "network": 0.0}
    groups = ((layout.tp, 1, raw.tp), (layout.ep, layout.etp, raw.ep), (layout.cp, layout.tp, raw.cp))
    for ranks, stride, time in groups:
        crosses, each = collectives.crosses(device, ranks, stride), time / layout.pp
        held["nvlink"] += where(crosses, 0.0, each)
        held["network"] += where(crosses, each, 0.0)
    return exchange.Room(seconds / layout.pp, held)
