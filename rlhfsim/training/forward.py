"""Forward passes without gradients: log-probs, values, scores (physics F1)."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from typing import Literal, NamedTuple

from rlhfsim.elementwise import Size, most, some
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.training import gradient_exchange as exchange
from rlhfsim.training import pipeline
from rlhfsim.training.training import Passing, in_fp32, micro_batches, send_parts, work_parts
from rlhfsim.training.unequal_lengths import late_parts, spread_of

Head = Literal["logprob", "value", "score"]


class ScoredModel(NamedTuple):
    """What reads sequences without gradients, whatever the layout."""

    device: Device
    model: ModelSpec
    sequences: Sequences
    backend: Backend
    software: Software
    head: Head = "logprob"
    lora: Lora | None = None
    precision: str = "bf16"
    trained: bool = False
    """Its role is trained too, so that FSDP2's shards are FP32."""


def forward(asked: ScoredModel, layout: AnyLayout, pack_len: Size | None = None) -> Cost:
    """Time of one forward over all `sequences` by the layout's d ranks.

        T = (m - 1) max_i t_i + sum_i t_i + exposed parameter gathers (ZeRO-3) + wait

    One micro-batch flows behind the other through p stages without backward. `value` and `score`
    read one number a token or sequence instead of V logits; `lora` runs its adapters too. Source: F1;
    GPipe's forward. Models of one role run one after the other, each over its part of the sequences.
    """
    device, model, sequences, backend, software, head, lora, precision, trained = asked
    if model.others:
        dealt = zip(model.each, sequences.dealt(len(model.each)), strict=True)
        runs = (asked._replace(model=one, sequences=its) for one, its in dealt)
        return reduce(add, (forward(run, layout, pack_len) for run in runs))
    if head != "logprob" and not model.value_head:
        model = replace(model, value_head=True)
    size, count = micro_batches(layout, sequences, 1, pack_len, scoring=True)
    scored, frozen = head == "logprob", lora is not None
    passing = Passing(device, model, sequences, precision, software, frozen, scored, scoring=True)
    through, held, ep_spread = passing.of(layout, size)
    stages = pipeline.split(model.num_layers, layout.pp)
    times = stages.times(through.layer_forward, *through.ends_forward)
    busy = count * sum(times) / layout.pp
    total = (count - 1) * most(*times) + sum(times)
    shown = through.forward.times(count / layout.pp)
    parts = work_parts(device, layout, shown, busy, ep_spread)
    if some(layout.pp > 1):
        parts.append(exchange.only(layout.pp > 1, part("bubble", total - busy, "pipeline schedule")))
        parts += send_parts(device, model, layout, held, count, 1.0, back=False)
    parts += exchange.gathers(device, model, layout, count, busy)
    if some(fp32 := in_fp32(software, layout, lora, trained=trained)):
        parts.append(exchange.only(fp32, exchange.cast(device, model, layout, count)))
    if lora is not None and lora.base == "nf4":
        parts.append(exchange.dequantised(device, model, layout, count))
    if some(hosted := layout.offload_params != "none"):
        width = exchange.FP32 if trained and backend == "fsdp2" else exchange.BF16
        fetched = exchange.fetches(device, model, layout, count, busy, width=width)
        parts += [exchange.only(hosted, one) for one in fetched]
    spread = spread_of(sequences, layout, 1, count, pack_len)
    launch = count / layout.pp * through.launch / 2
    parts += late_parts(device, sum(through.forward) * count / layout.pp, launch, spread, total / busy)
    return Cost(parts=tuple(p for p in parts if some(p.seconds > 0)))
