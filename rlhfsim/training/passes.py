"""One micro-batch through the whole model, as a training stack runs it.

Raw kernel and collective times of `training.layer_time` become seconds of a step: kernels at the speed
that they keep in a whole step, collectives less what hides, recomputation added, and never faster
than the host launches them. All of it holds for one layout, or for columns of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from rlhfsim.elementwise import Size, least, most, some, where
from rlhfsim.kernels.device import Device
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.software import Graphs, Software
from rlhfsim.training import layer_time as roofline
from rlhfsim.training.layer_time import NOTHING, Layer, Pass
from rlhfsim.training.work import LOW, Work


class Passes(NamedTuple):
    """One micro-batch through all layers, embedding and head."""

    forward: Pass
    """Exposed seconds by part."""
    backward: Pass
    layer: Size
    """Forward plus backward of the mean layer, launch-bound excess included."""
    layer_forward: Size
    ends: tuple[Size, Size]
    """Forward plus backward of the embedding and of the head."""
    ends_forward: tuple[Size, Size]
    sent: tuple[Pass, Pass]
    """Forward and backward with nothing hidden: how long collectives hold their links."""
    launch: Size
    """Seconds that the host needs for forward plus backward of all layers."""

    @property
    def numbers(self) -> tuple[Size, ...]:
        """All of them in a row."""
        return (
            *chain(self.forward, self.backward, *self.sent, self.ends, self.ends_forward),
            *(self.layer, self.layer_forward, self.launch),
        )

    @classmethod
    def of(cls, numbers: Sequence[Size]) -> Passes:
        """From `numbers`, each of which may be an array."""
        size = len(Pass._fields)
        ahead, back, *sent = (Pass(*numbers[i * size : (i + 1) * size]) for i in range(4))
        one, two, first, second, layer, layer_forward, launch = numbers[4 * size :]
        return cls(ahead, back, layer, layer_forward, (one, two), (first, second), (sent[0], sent[1]), launch)


def passes(
    device: Device,
    model: ModelSpec,
    work: Work,
    software: Software,
    recompute: Size,
    *,
    frozen: bool = False,
    logprob: bool = True,
    scoring: bool = False,
) -> Passes:
    """The passes of a micro-batch; `frozen` weights (LoRA) have no weight gradients (T1), but adapters.

    Adapters pass over inputs and outputs of every matrix and double what the host launches; where each is
    a shard of its own, it is gathered for every pass and reduced (`adapter_gather_time` a layer and pass).
    Where several sets are held side by side the host waits for their tokens (`adapter_sets_time`).
    """
    ahead, back, both, first = NOTHING, NOTHING, 0.0, 0.0
    raw_ahead, raw_back, launch = NOTHING, NOTHING, 0.0
    for kind, count, done in _layers(model, work, software):
        raw = roofline.layer(device, _trunk(model), done, kind=kind)
        host = host_time(device, software.graphs, kind=kind)
        if frozen:
            raw, host = _adapted(raw, *roofline.adapter_time(device, model, work, kind=kind)), 2 * host
        behind = _backward(raw, software, recompute, frozen)
        one, two = (exposed(device, x, software, work.ep_overlap) for x in (raw.forward, behind))
        again = where(recompute == "full", 2.0, 1.0)
        gather = _adapter_host(device, software) if frozen else 0.0
        seconds = launched(device, sum(one), host) + gather
        first += count * seconds
        both += count * (seconds + launched(device, sum(two), again * host) + (again + 1) * gather)
        ahead, back = ahead.plus(one.times(count)), back.plus(two.times(count))
        raw_ahead, raw_back = raw_ahead.plus(raw.forward.times(count)), raw_back.plus(behind.times(count))
        launch += count * (1 + again) * host
    loss = software.head
    head = roofline.head(
        device,
        model,
        work,
        logprob=logprob,
        traffic=loss.traffic(scoring=scoring) if loss else None,
        again=bool(loss and loss.computed_again and not scoring),
    )
    ends = (roofline.embedding(device, model, work), head)
    shown = [(exposed(device, e.forward, software), exposed(device, e.backward, software)) for e in ends]
    for one, two in shown:
        ahead, back = ahead.plus(one), back.plus(two)
    sums = [(sum(one), sum(two)) for one, two in shown]
    depth = model.num_layers
    return Passes(
        ahead,
        back,
        both / depth,
        first / depth,
        (sum(sums[0]), sum(sums[1])),
        (sums[0][0], sums[1][0]),
        (raw_ahead, raw_back),
        launch,
    )


def _layers(model: ModelSpec, work: Work, software: Software) -> Iterator[tuple[LayerKind, float, Work]]:
    """Kinds of layers, how many of each, and their work; a recipe may keep the last ones in BF16.

    Kinds are taken to be spread evenly over the depth.
    """
    kept = 0.0 if work.precision not in LOW else min(1.0, software.bf16_layers / model.num_layers)
    for kind in model.kinds:
        if kept < 1:
            yield kind, (1 - kept) * kind.layers, work
        if kept > 0:
            yield kind, kept * kind.layers, replace(work, precision="bf16")


@lru_cache(maxsize=256)
def _trunk(model: ModelSpec) -> ModelSpec:
    """The model as its layers see it: the same for a policy and for the critic on its trunk."""
    return replace(model, value_head=False, lm_head_bias=False)


def _adapter_host(device: Device, software: Software) -> float:
    """Seconds of a layer and pass in which the host handles adapters one by one while its GPU waits."""
    sets = device["adapter_sets_time"] if software.adapters > 1 else 0.0
    return max(device["adapter_gather_time"], sets)


def _adapted(raw: Layer, first: Size, second: Size) -> Layer:
    """A layer with the passes of its adapters, forward and backward."""
    ahead, back = raw.forward, raw.backward
    return raw._replace(
        forward=ahead._replace(memory=ahead.memory + first),
        backward=back._replace(memory=back.memory + second),
    )


def _backward(raw: Layer, software: Software, recompute: Size, frozen: bool) -> Pass:
    """The backward of one layer as trained: recomputation in, frozen gradients out."""
    back = raw.backward
    gemm = back.gemm - (raw.weight_gradient if frozen else 0.0)
    cores, names = recompute == "selective", software.recomputed
    half = roofline.EVERY_SECOND * raw.forward.gemm if roofline.OPERATORS in names else 0.0
    again = back._replace(gemm=gemm).plus(raw.forward)
    without = back._replace(
        gemm=gemm + half + sum(raw.modules.get(name, 0.0) for name in names),
        attention=back.attention + where(cores, raw.core, 0.0),
        scan=back.scan + where(cores, raw.forward.scan, 0.0),
        memory=back.memory + raw.forward.memory * roofline.repeated_traffic(names),
    )
    return Pass(*map(partial(where, recompute == "full"), again, without))


def exposed(device: Device, one: Pass, software: Software, ep_overlap: Size = None) -> Pass:
    """A pass with kernels at the speed of a whole step and collectives less what hides.

    kernels / (clock eta speed) ; (1 - overlap) T_tp, T_ep ; max(0, T_cp - T_attention) (T6)
    """
    eta, core = kernel_rates(device, software)
    gathered = device["overlap_tp_user_buffers" if software.user_buffers else "overlap_tp"]
    hidden = where(ep_overlap == 1, device["overlap_ep_scheduled"], device["overlap_ep"])
    return Pass(
        one.gemm / eta,
        one.attention / core,
        one.memory,
        (1 - gathered) * one.tp,
        (1 - hidden) * one.ep,
        most(0.0, one.cp - one.attention - one.scan),
        one.scan,
        one.indexer,
    )


def kernel_rates(device: Device, software: Software) -> tuple[float, float]:
    """Speed of matrix products and of attention cores in a whole step over those that were timed alone."""
    clock, stack = device["sustained_clock"], software.stack
    return (
        clock * device["training_kernel_efficiency"] * device[f"kernel_speed_{stack}"],
        clock * device["training_attention_efficiency"] * device[f"attention_speed_{stack}"],
    )


def launched(device: Device, kernels: Size, launch: Size) -> Size:
    """Seconds of kernels that a host launches one by one.

        t = max(k, h) + (1 - w) min(k, h)      k kernels, h launch, w = `overlap_launch`

    w = 1 where a host launches ahead of its GPU; 0 where one core launches and computes.
    """
    return most(kernels, launch) + (1 - device["overlap_launch"]) * least(kernels, launch)


def contention(device: Device, ranks: Size) -> Size:
    """Factor on the kernels of a rank while `ranks` ranks work, as many of them in its node as fit.

        1 + (k - 1) (f - 1)      k ranks in the node, f = `rank_contention`

    GPUs share no cores and no memory (f = 1); cores of one socket share caches, bandwidth and clock.
    """
    return 1 + (least(ranks, device.gpus_per_node) - 1) * (device["rank_contention"] - 1)


def slowed(through: Passes, factor: Size) -> Passes:
    """All times of a micro-batch scaled."""
    return Passes.of([number * factor for number in through.numbers]) if some(factor != 1) else through


def host_time(device: Device, graphs: Graphs, *, kind: LayerKind) -> float:
    """Seconds the host needs to launch one direction of one layer; the GPU cannot be faster.

    Eager Python issues tens of kernels a layer; MoE layers add routing, permutation and the counts
    that the host waits for; a block alone is half a layer. Graphs over attention and
    router leave the experts; a full graph none.
    """
    experts = kind.ffn == "experts"
    if graphs == "full":
        return 0.0
    if graphs == "partial":
        return device["host_moe_time"] * 0.5 if experts else 0.0
    return device["host_layer_time"] * kind.blocks / 2 + (device["host_moe_time"] if experts else 0.0)
