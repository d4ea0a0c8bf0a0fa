"""Every layout of the inference engine on a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rlhfsim.kernels.devices import domain_of
from rlhfsim.memory.kv_cache import rollout_weights
from rlhfsim.search.degrees import divides_heads, powers_of_two, splits_layers, values
from rlhfsim.search.dispatchers import rollout_dispatcher
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.features import APART
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.units import BILLION

MAX_ROLLOUT_TP = 16
"""Inside one scale-up domain."""
MAX_WIDE_TP = 32
"""Over several."""
WIDE_PIPELINES = (2, 3, 4, 8, 16)
MAX_EXPERT_RANKS = 64
"""GPUs of a replica with attention DP."""
LARGE_MOE = 200 * BILLION
"""Parameters from which replicas of several scale-up domains compete."""
ROOM = 0.8
"""Share of usable memory that weights take, above which a replica hardly runs."""
UTILIZATIONS = (0.9, 0.7, 0.55, 0.4, 0.25)
"""Shares of usable memory that a rollout engine may claim."""


def rollout_layouts(
    request: Request, model: ModelSpec, gpus: int, group: NodeGroup, *, shares: bool = False
) -> tuple[RolloutLayout, ...]:
    """Layouts of the inference engine that fill `gpus` GPUs, which it `shares` with the actor or not.

    Layouts that differ only in their share of memory follow each other, at falling shares.
    """
    fixed = request.fix.get("rollout", {})
    layouts = []
    for tp, pp, attention_dp in _replicas(request, model, gpus, group):
        each = tp * pp * attention_dp
        if gpus % each:
            continue
        for ep in values(fixed, "ep", _rollout_experts(model, tp, attention_dp)):
            if tp * attention_dp % ep or ("dispatcher" in fixed and not 1 < ep == tp * attention_dp):
                continue
            replica = RolloutLayout(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp)
            if _lacks_replica(request, group, replica):
                continue
            whole = _formatted(request, replace(replica, dp=gpus // each))
            whole = replace(whole, dispatcher=rollout_dispatcher(request, model, whole, group))
            whole = replace(whole, max_num_seqs=_running(request, whole, gpus, shares))
            if request.runs and (budget := request.runs.says.prefill.get(shares)):
                whole = replace(whole, max_batched_tokens=budget)
            for speculation, prefill in product(_speculations(request, whole), _prefills(request, whole)):
                layouts += [
                    replace(whole, memory_utilization=share, speculation=speculation, prefill=prefill)
                    for share in UTILIZATIONS
                ]
    return tuple(layouts)


def _prefills(request: Request, layout: RolloutLayout) -> tuple[int, ...]:
    """Replicas that only prefill: none, and powers of two of them where turns have answers to prefill.

    An engine that never drains is priced without.
    """
    asked = request.workload.environment
    agents = asked is not None and (asked.answer_tokens > 0 or asked.prefix_reuse < 1)
    runs = request.runs is None or APART in request.runs.features
    some = agents and runs and not request.stale
    every = (0, *powers_of_two(layout.dp - 1)) if some and layout.dp > 1 else (0,)
    asked_for = values(request.fix.get("rollout", {}), "prefill", every)
    return tuple(p for p in asked_for if p < layout.dp and not (p and request.stale))


def _formatted(request: Request, layout: RolloutLayout) -> RolloutLayout:
    """With the number formats of the workload's rollout."""
    work = request.workload
    return replace(
        layout,
        precision=work.rollout_precision,
        bf16_attention=work.rollout_bf16_attention,
        bf16_layers=work.rollout_bf16_layers,
        kv_precision=work.kv_precision,
        engine=request.fix.get("rollout", {}).get("engine"),  # type: ignore[arg-type]  # checked where read
    )


def _running(request: Request, layout: RolloutLayout, gpus: int, shares: bool) -> int:
    """Sequences at a time of a replica."""
    if request.runs is None:
        return layout.max_num_seqs
    samples = request.workload.num_sequences
    return request.runs.says.engine(layout, samples, gpus, shares=shares)


def _speculations(request: Request, layout: RolloutLayout) -> tuple[Speculation | None, ...]:
    """No speculative decoding, and that of the workload where an engine can have it; a draft that is trained
    is used."""
    asked = request.workload.speculation
    if asked is None or layout.pp > 1:
        return () if request.workload.trains_draft else (None,)
    return (asked,) if asked.trained else (None, asked)


def _replicas(
    request: Request, model: ModelSpec, gpus: int, group: NodeGroup
) -> Iterator[tuple[int, int, int]]:
    """TP, PP and attention DP of replicas; more of them for a model that a scale-up domain hardly holds.

    TP stays inside a domain or fills several; pipelines have stages of a whole domain; attention DP fills
    whole domains, with the experts over all of its GPUs.
    """
    domain, fixed = domain_of(group), request.fix.get("rollout", {})
    inside, many = min(domain, MAX_ROLLOUT_TP), spans_domains(request, model, group)
    widest = MAX_WIDE_TP if many else inside
    tps = values(
        fixed,
        "tp",
        (t for t in powers_of_two(widest) if divides_heads(model, t) and (t <= domain or t % domain == 0)),
    )
    stages = WIDE_PIPELINES if many and domain < gpus else ()
    pps = values(fixed, "pp", (1, *(p for p in stages if splits_layers(model, p))))
    for tp, pp in product(tps, pps):
        if pp == 1 or tp == inside or "pp" in fixed:
            yield tp, pp, 1
    if many and model.moe is not None and "pp" not in fixed:
        for tp, ranks in product(tps, values(fixed, "ep", powers_of_two(min(gpus, MAX_EXPERT_RANKS)))):
            if (
                tp < ranks
                and tp <= inside <= ranks
                and not (ranks % domain and domain % ranks)
                and model.moe.num_experts % ranks == 0
            ):
                yield tp, 1, ranks // tp


def spans_domains(request: Request, model: ModelSpec, group: NodeGroup) -> bool:
    """Whether replicas over several scale-up domains, and attention DP, compete for a rollout.

    For a MoE of `LARGE_MOE` parameters, and where the weights leave a domain no room for a KV cache.
    """
    if model.moe is not None and model.num_params >= LARGE_MOE:
        return True
    tp = max(t for t in powers_of_two(min(domain_of(group), MAX_ROLLOUT_TP)) if divides_heads(model, t))
    whole = _formatted(request, RolloutLayout(tp=tp))
    return bool(rollout_weights(model, whole) >= ROOM * group.profile.usable_memory.value)


def _lacks_replica(request: Request, group: NodeGroup, replica: RolloutLayout) -> bool:
    """Whether such replicas do not lie well on these nodes, or the framework does not run them."""
    size = replica.replica_gpus
    one_node = size <= group.gpus_per_node
    if one_node and group.gpus > group.gpus_per_node and group.gpus_per_node % size:
        return True  # some would lie across an edge between nodes
    replica = _formatted(request, replica)
    return request.runs is not None and bool(
        request.runs.lacks_rollout(replica, one_node=one_node, backend=request.backend)
    )


def _rollout_experts(model: ModelSpec, tp: int, attention_dp: int) -> tuple[int, ...]:
    if attention_dp > 1:
        return (tp * attention_dp,)
    return (1, tp) if model.moe and tp > 1 and model.moe.num_experts % tp == 0 else (1,)
