"""Every layout that a backend can run for one model on a number of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.specs.backends import BACKENDS, BackendRules, violation
from rlhfsim.specs.layout import Layout, Offload, Recompute, RolloutLayout
from rlhfsim.specs.model import ModelSpec

MICRO_BATCHES = (1, 2, 4, 8, 16)
LONG_CONTEXT = 8192
"""Context parallelism is tried from this many tokens on."""
MAX_PIPELINE = 32
MAX_ROLLOUT_TP = 16
UTILIZATIONS = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Shares of usable memory that a rollout engine may claim."""


@dataclass(frozen=True, slots=True)
class Space:
    """Layouts that may compete and why others may not."""

    layouts: tuple[Layout, ...]
    dropped: Counter[str]
    """Reason -> number of layouts."""


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `limit`."""
    return tuple(1 << i for i in range(max(1, limit).bit_length()))


def divides_heads(model: ModelSpec, tp: int) -> bool:
    """Whether tensor parallelism `tp` splits the attention heads evenly."""
    try:
        model.check_tp(tp)
    except RlhfsimError:
        return False
    return True


def training_layouts(
    request: Request, seat: str, model: ModelSpec, gpus: int, domain: int
) -> Space:
    """Layouts of a trained role that fill `gpus` GPUs."""
    rules = BACKENDS[request.backend]
    fixed = request.fix.get(seat, {})
    dropped: Counter[str] = Counter()
    kept = []
    sequences = request.workload.num_sequences // request.workload.mini_batches
    for layout in _degrees(rules, request, model, gpus, domain, fixed):
        reason = _refused(request, model, layout, sequences)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(layout)
    return Space(tuple(kept), dropped)


def _degrees(
    rules: BackendRules,
    request: Request,
    model: ModelSpec,
    gpus: int,
    domain: int,
    fixed: Mapping[str, int | str],
) -> Iterator[Layout]:
    tps = _values(fixed, "tp", powers_of_two(domain) if rules.tensor_parallel else (1,))
    pps = _values(fixed, "pp", _pipelines(model, gpus) if rules.pipeline_parallel else (1,))
    cps = _values(fixed, "cp", _contexts(request, rules))
    for tp, pp, cp in product(tps, pps, cps):
        if gpus % (tp * pp * cp):
            continue
        dp = gpus // (tp * pp * cp)
        if fixed.get("dp", dp) != dp:
            continue
        eps = _values(fixed, "ep", _experts(model, rules, tp * cp * dp))
        vps = _values(fixed, "vp", _virtual(model, rules, pp))
        for ep, vp, (zero, micro, recompute, offload) in product(
            eps, vps, tuple(_switches(rules, request, fixed, dp * cp))
        ):
            if vp > 1 and pp == 1:
                continue
            yield Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vp=vp, zero=zero, micro_batch=micro, recompute=recompute,
                         offload_optimizer=offload, sequence_parallel=rules.sequence_parallel)  # fmt: skip


def _switches(
    rules: BackendRules, request: Request, fixed: Mapping[str, int | str], shards: int
) -> Iterator[tuple[int, int, Recompute, Offload]]:
    stages = sorted({*rules.zero_stages, *rules.zero_stages_tp, *rules.zero_stages_pp})
    zeros = _values(fixed, "zero", stages if shards > 1 else (0,))
    micros = _values(fixed, "micro_batch", MICRO_BATCHES)
    recomputes: tuple[Recompute, ...] = (
        ("none", "selective", "full") if rules.interleaves_recompute else ("none", "full")
    )
    if "recompute" in request.forbid:
        recomputes = ("none",)
    if "recompute" in fixed:
        recomputes = (str(fixed["recompute"]),)  # type: ignore[assignment]
    offloads: tuple[Offload, ...] = (
        ("none",) if "offload" in request.forbid or request.backend == "fsdp2" else ("none", "cpu")
    )
    return product(zeros, micros, recomputes, offloads)


def _values(fixed: Mapping[str, int | str], name: str, default: Iterable[int]) -> tuple[int, ...]:
    return (int(fixed[name]),) if name in fixed else tuple(default)


def _pipelines(model: ModelSpec, gpus: int) -> tuple[int, ...]:
    limit = min(MAX_PIPELINE, gpus, model.num_layers)
    return tuple(p for p in range(1, limit + 1) if model.num_layers % p == 0 and gpus % p == 0)


def _contexts(request: Request, rules: BackendRules) -> tuple[int, ...]:
    longest = request.workload.prompt_len.maximum + request.workload.response_len.maximum
    return (1, 2, 4, 8) if rules.context_parallel and longest >= LONG_CONTEXT else (1,)


def _experts(model: ModelSpec, rules: BackendRules, ranks: int) -> tuple[int, ...]:
    if model.moe is None or not rules.expert_parallel:
        return (1,)
    return tuple(
        e
        for e in powers_of_two(min(ranks, model.moe.num_experts))
        if model.moe.num_experts % e == 0 and ranks % e == 0
    )


def _virtual(model: ModelSpec, rules: BackendRules, pp: int) -> tuple[int, ...]:
    if not rules.virtual_stages or pp == 1:
        return (1,)
    return tuple(v for v in (1, 2, 4) if model.num_layers % (pp * v) == 0)


def _refused(request: Request, model: ModelSpec, layout: Layout, sequences: int) -> str | None:
    if not divides_heads(model, layout.tp):
        return "TP does not divide the attention heads"
    if layout.dp * layout.micro_batch > sequences:
        return "fewer sequences in a mini-batch than data-parallel ranks x micro-batch"
    if layout.vp > 1 and (sequences // (layout.dp * layout.micro_batch)) % layout.pp:
        return "interleaving needs micro-batches in multiples of PP"
    broken = violation(request.backend, layout)
    return f"the backend cannot run it ({broken})" if broken else None


def scoring_layouts(request: Request, seat: str, model: ModelSpec, gpus: int, domain: int) -> Space:
    """Layouts of a role that only runs forward passes: no optimizer, no recompute."""
    space = training_layouts(request, seat, model, gpus, domain)
    plain = {
        replace(
            x, recompute="none", offload_optimizer="none", vp=1, zero=x.zero if x.zero == 3 else 0
        )
        for x in space.layouts
    }
    legal = sorted(
        (x for x in plain if violation(request.backend, x) is None),
        key=lambda x: (x.tp, x.pp, x.cp, x.ep, x.zero, x.micro_batch),
    )
    return Space(tuple(legal), space.dropped)


def rollout_layouts(
    request: Request, model: ModelSpec, gpus: int, domain: int
) -> tuple[RolloutLayout, ...]:
    """Layouts of the inference engine that fill `gpus` GPUs; TP stays inside one scale-up domain."""
    fixed = request.fix.get("rollout", {})
    precision: Literal["bf16", "fp8"] = "fp8" if "fp8" in request.switches else "bf16"
    tps = _values(
        fixed,
        "tp",
        (t for t in powers_of_two(min(domain, MAX_ROLLOUT_TP)) if divides_heads(model, t)),
    )
    pps = _values(
        fixed, "pp", (1, *(p for p in (2, 4) if model.num_layers % p == 0 and domain < gpus))
    )
    found = []
    for tp, pp, utilization in product(tps, pps, UTILIZATIONS):
        if gpus % (tp * pp) or (pp > 1 and tp < min(domain, MAX_ROLLOUT_TP)):
            continue
        for ep in _values(
            fixed,
            "ep",
            (1, tp) if model.moe and tp > 1 and model.moe.num_experts % tp == 0 else (1,),
        ):
            found.append(RolloutLayout(tp=tp, pp=pp, dp=gpus // (tp * pp), ep=ep, memory_utilization=utilization,
                                       precision=precision, kv_precision="bf16"))  # fmt: skip
    return tuple(found)
