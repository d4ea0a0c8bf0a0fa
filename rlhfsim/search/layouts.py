"""Every layout that a backend can run for one trained or scoring model on a number of GPUs.

ZeRO-0 does not compete for a trained role on several ranks: stage 1 moves the same bytes, holds
fewer and updates faster. TP runs over powers of two inside one scale-up domain, PP over divisors of
the layers and powers of two, CP to chunks of 128 tokens, EP over divisors of the experts. Selective
recomputation does not compete either: with flash attention it saves no memory (physics M2').
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhfsim.search import micro_batches
from rlhfsim.search.degrees import divides_heads, powers_of_two, splits_layers, values
from rlhfsim.search.dispatchers import training_dispatcher
from rlhfsim.search.layout_shapes import CutShapes, Fields, ModelCut, Shapes, Space, joined
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import EXCHANGE, OPTIMIZER_SHARES
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import published_type
from rlhfsim.specs.placement.backends import BackendRules, broken_rule, broken_sums, sums_fp32
from rlhfsim.specs.placement.layout import Layout, Offload, Recompute, RolloutLayout
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.roles import TRAINED

SHORTEST_CHUNK = 128
"""Tokens of the chunks, two a GPU, into which context parallelism cuts the longest sequence, at least."""
CONTEXTS = (1, 2, 4, 8)
"""Degrees of context parallelism that compete."""
MAX_PIPELINE = 16


def role_layouts(
    request: Request,
    role: str,
    model: ModelSpec,
    gpus: int,
    domain: int,
    *,
    trained: bool,
    known: dict[ModelCut, Shapes] | None = None,
) -> Space:
    """Layouts of a role that fill `gpus` GPUs; a role that only runs forward needs no optimizer.

    `known`: its shapes on any number of GPUs.
    """
    rules, fixed = request.rules(role), request.fix.get(role, {})
    sizes = {cp: micro_batches.sizes(request, role, cp) for cp in _contexts(request, rules, fixed)}
    known = {} if known is None else known
    dropped: Counter[str] = Counter()
    blocks = []
    for dp, cut in _cuts(rules, request, model, gpus, domain, fixed):
        every = sizes[cut.cp]
        if cut not in known:
            each = [cut._replace(experts=(ep,)) for ep in cut.experts]
            for one in each:  # other numbers of GPUs share it
                if one not in known:
                    fields = _shapes(rules, request, model, fixed, trained, one)
                    known[one] = _runnable(request, role, model, fields, {"dp": dp, **every[0]})
            known[cut] = joined([known[one] for one in each])
        shapes, filled = known[cut], dict[int, Sequence[Fields]]()
        for reason, count in shapes.refused.items():
            dropped[reason] += count * len(every)
        for vp in {home[0]: None for home in shapes.homes}:
            count = sum(n for home, n in shapes.homes.items() if home[0] == vp)
            batch = _batch(request, role, every, pp=cut.pp, dp=dp, cp=cut.cp, vp=vp)
            filled[vp] = () if batch.refused else batch.filled
            reasons = {batch.refused: len(every)} if batch.refused else batch.dropped
            dropped.update({reason: count * number for reason, number in reasons.items()})
        blocks.append(CutShapes(dp, shapes, filled))
    return Space(tuple(blocks), dropped)


def _runnable(
    request: Request, role: str, model: ModelSpec, shapes: Iterable[Fields], rest: Fields
) -> Shapes:
    """Those of some shapes that are run, however many ranks and tokens they have (`rest`: some)."""
    runs, refused, homes = list[Fields](), Counter[str](), Counter[Any]()
    for fields in shapes:
        if reason := never_run(request, model, Layout(**fields, **rest), role):
            refused[reason] += 1
        else:
            runs.append(fields)
            homes[fields["vp"], fields["offload_optimizer"], fields["offload_params"], fields["zero"]] += 1
    recomputed = all(fields["recompute"] == "full" for fields in runs)
    return Shapes(tuple(runs), refused, homes, recomputed)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Which sizes of a micro-batch the layouts of one shape have."""

    refused: str | None
    """Why none of them is run."""
    filled: Sequence[dict[str, Any]]
    dropped: Mapping[str, int]


def _batch(request: Request, role: str, every: Sequence[dict[str, Any]], **cut: Any) -> _Batch:
    """Those of the shapes with a cut, of `every` size that competes."""
    batch = batch_lengths(request.workload)
    layouts = [(size, Layout(**cut, **size)) for size in every]
    filled = [(size, x) for size, x in layouts if micro_batches.has_work(x, batch)]
    lacking = "too few sequences in a mini-batch for its ranks, stages and micro-batch"
    dropped = {lacking: len(every) - len(filled)}
    if request.runs is not None and request.runs.says.whole_updates:
        even = [(size, x) for size, x in filled if batch.sequences % (x.dp * x.micro_batch) == 0]
        dropped["a mini-batch is not whole micro-batches"] = len(filled) - len(even)
        filled = even
    return _Batch(unshared(request, layouts[0][1], role), [size for size, _ in filled], dropped)


def _cuts(
    rules: BackendRules,
    request: Request,
    model: ModelSpec,
    gpus: int,
    domain: int,
    fixed: Mapping[str, int | str],
) -> Iterator[tuple[int, ModelCut]]:
    """DP and the rest of every cut that fills the GPUs."""
    tps = values(fixed, "tp", powers_of_two(domain) if rules.tensor_parallel else (1,))
    pps = values(fixed, "pp", _pipelines(model, gpus) if rules.pipeline_parallel else (1,))
    for tp, pp, cp in product(tps, pps, _contexts(request, rules, fixed)):
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or fixed.get("dp", dp) != dp:
            continue
        ranks = tp * cp * dp
        eps = tuple(ep for ep in values(fixed, "ep", _experts(model, rules, ranks)) if ranks % ep == 0)
        yield (
            dp,
            ModelCut(tp, pp, cp, eps, dp * cp == 1, _copies(rules, request, fixed, dp * cp, domain // tp)),
        )


def _shapes(
    rules: BackendRules,
    request: Request,
    model: ModelSpec,
    fixed: Mapping[str, int | str],
    trained: bool,
    cut: ModelCut,
) -> Iterator[Fields]:
    """Fields of the layouts of a cut but DP and those that say how large a micro-batch is."""
    said = {**request.fix.get("actor", {}), **fixed}
    exchange = {name: said[name] for name in EXCHANGE if name in said}
    tp, pp, cp = cut.tp, cut.pp, cut.cp
    vps = values(fixed, "vp", _virtual(model, rules, pp)) if trained else (1,)
    vps = tuple(vp for vp in vps if vp == 1 or interleaves(model, pp, vp))
    runs = rules.zero_stages_pp if pp > 1 else rules.zero_stages_tp if tp > 1 else rules.zero_stages
    single = (0,) if 0 in runs else runs
    states = _states(rules, request, fixed, single if cut.alone else None, trained)
    dispatchers = {ep: training_dispatcher(request, model, ep) for ep in cut.experts}
    for ep, vp, (zero, offload, share), recompute, shards in product(
        cut.experts, vps, states, _recomputes(request, fixed, trained), cut.copies
    ):
        if shards and (zero not in rules.hybrid_stages or ep > 1):
            continue
        yield {
            "dispatcher": dispatchers[ep],
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "vp": vp,
            "zero": zero,
            "shards": shards,
            "recompute": recompute,
            "offload_optimizer": offload,
            "offload_fraction": share,
            "offload_params": "cpu" if rules.hosted else offload if rules.offloads_all else "none",
            "sequence_parallel": rules.sequence_parallel,
            **exchange,
        }


def _copies(
    rules: BackendRules, request: Request, fixed: Mapping[str, int | str], ranks: int, domain: int
) -> tuple[int | None, ...]:
    """Shards over all ranks, or, where those leave a scale-up domain of `domain` ranks, inside each."""
    if "shards" in fixed:
        wanted = int(fixed["shards"])
        return (wanted,) if rules.hybrid_stages and wanted < ranks and ranks % wanted == 0 else ()
    if not rules.hybrid_stages or "hsdp" in request.left_out or not 1 < domain < ranks or ranks % domain:
        return (None,)
    return None, domain


def _states(
    rules: BackendRules,
    request: Request,
    fixed: Mapping[str, int | str],
    alone: tuple[int, ...] | None,
    trained: bool,
) -> list[tuple[int, Offload, float]]:
    """ZeRO stages with where optimizer states live, and which share of them is away."""
    pairs = _zeros_and_offloads(rules, request, fixed, alone, trained)
    parts = () if "partial-offload" in request.left_out else OPTIMIZER_SHARES
    return [
        (zero, offload, share)
        for zero, offload in pairs
        for share in (*(parts if offload != "none" and zero in rules.partial_offload else ()), 1.0)
    ]


def _zeros_and_offloads(
    rules: BackendRules,
    request: Request,
    fixed: Mapping[str, int | str],
    alone: tuple[int, ...] | None,
    trained: bool,
) -> list[tuple[int, Offload]]:
    """One rank offloads under the lowest stage that can; where the weights leave too, they come back layer by
    layer, under stage 3."""
    zeros, offloads = _zeros(rules, fixed, alone, trained), _offloads(request, trained)
    if alone is not None and trained and "zero" not in fixed and sums_fp32(request.workload, request.backend):
        zeros = rules.fp32_sums[:1]
    if rules.offloads_all and "zero" not in fixed:
        return [*((zero, "none") for zero in zeros), *((3, offload) for offload in offloads[1:])]
    pairs = product(zeros, offloads)
    if alone is None or "zero" in fixed or not rules.offload_stages:
        return list(pairs)
    return [(zero if offload == "none" else min(rules.offload_stages), offload) for zero, offload in pairs]


def _zeros(
    rules: BackendRules, fixed: Mapping[str, int | str], alone: tuple[int, ...] | None, trained: bool
) -> tuple[int, ...]:
    """Stages that compete; 0 only for a single rank, or for a role without optimizer: sharded or not.

    `alone`: those of a single rank; where the framework shards whatever the ranks (verl), its own.
    """
    stages = {*rules.zero_stages, *rules.zero_stages_tp, *rules.zero_stages_pp}
    if alone is not None:
        return values(fixed, "zero", alone)
    scoring = sorted(stages & {0, 3}) or [min(stages)]
    return values(fixed, "zero", sorted(stages - {0}) if trained else scoring)


def _recomputes(request: Request, fixed: Mapping[str, int | str], trained: bool) -> tuple[Recompute, ...]:
    if "recompute" in fixed:
        return (fixed["recompute"],)  # type: ignore[return-value]  # checked where options are read
    if not trained or "recompute" in request.left_out:
        return ("none",)
    return "none", "full"


def _offloads(request: Request, trained: bool) -> tuple[Offload, ...]:
    return ("none", "cpu") if trained and "offload" not in request.left_out else ("none",)


def _pipelines(model: ModelSpec, gpus: int) -> tuple[int, ...]:
    limit = min(MAX_PIPELINE, gpus, *(one.num_layers for one in model.each))
    return tuple(p for p in range(1, limit + 1) if gpus % p == 0 and splits_layers(model, p))


def _contexts(request: Request, rules: BackendRules, fixed: Mapping[str, int | str]) -> tuple[int, ...]:
    chunks = batch_lengths(request.workload).max_tokens / (2 * SHORTEST_CHUNK)
    padded = request.runs is not None and request.backend in request.runs.says.packed_contexts
    cuts = rules.context_parallel and (request.workload.packing or not padded)
    degrees = (c for c in CONTEXTS if c == 1 or c <= chunks) if cuts else (1,)
    return values(fixed, "cp", degrees)


def _experts(model: ModelSpec, rules: BackendRules, ranks: int) -> tuple[int, ...]:
    counts = {one.moe.num_experts if one.moe else 1 for one in model.each}
    if not rules.expert_parallel:
        return (1,)
    return tuple(
        e for e in powers_of_two(min(ranks, *counts)) if ranks % e == 0 and not any(n % e for n in counts)
    )


def _virtual(model: ModelSpec, rules: BackendRules, pp: int) -> tuple[int, ...]:
    return (1, 2) if rules.virtual_stages and interleaves(model, pp, 2) else (1,)


def layout_refusal(
    request: Request, model: ModelSpec, layout: Layout | RolloutLayout, role: str
) -> str | None:
    """Why the backend (or the engine) cannot run a model in a layout, or None."""
    reason = never_run(request, model, layout, role)
    return reason if reason or isinstance(layout, RolloutLayout) else unshared(request, layout, role)


def unshared(request: Request, layout: Layout, role: str) -> str | None:
    """Why the framework cannot share out the samples of a trained role over its ranks, or None."""
    lacks = request.runs and role in TRAINED and request.runs.lacks_shares(layout, request.workload)
    return f"{request.runs.title} does not run {lacks.what}" if request.runs and lacks else None


def never_run(request: Request, model: ModelSpec, layout: Layout | RolloutLayout, role: str) -> str | None:
    """Why a model is not run in a layout, however many data-parallel ranks it has, or None."""
    if not divides_heads(model, layout.tp):
        return "TP does not divide the attention heads"
    if isinstance(layout, RolloutLayout):
        return None
    rules, sums = request.rules(role), role in TRAINED and sums_fp32(request.workload, request.backend)
    if broken := broken_rule(rules, layout) or (sums and broken_sums(rules, layout)):
        return f"the backend cannot run it ({broken})"
    lacks = request.runs and (
        request.runs.lacks_cut(request.backend, layout, request.workload, role)
        or request.runs.lacks_model(layout, model, published_type(model.name))
    )
    return f"{request.runs.title} does not run {lacks.what}" if request.runs and lacks else None


def interleaves(model: ModelSpec, pp: int, vp: int) -> bool:
    """Whether every one of `pp` stages has `vp` virtual ones of equally many layers."""
    return pp > 1 and model.num_layers % (pp * vp) == 0
