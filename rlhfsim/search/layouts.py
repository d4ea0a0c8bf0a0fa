"""Every layout that a backend can run for one model on a number of GPUs.

ZeRO-0 does not compete for a trained role on several ranks: stage 1 moves the same bytes, holds
fewer and updates faster. TP runs over powers of two inside one scale-up domain, PP over divisors of
the layers and powers of two, CP to chunks of 128 tokens, EP over divisors of the experts. Selective
recomputation does not compete either: with flash attention it saves no memory (physics M2').
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.features import APART
from rlhfsim.kernels.devices import domain_of
from rlhfsim.memory.kv_cache import rollout_weights
from rlhfsim.memory.states import CUT
from rlhfsim.search import micro_batches
from rlhfsim.search.dispatchers import rollout_dispatcher, training_dispatcher
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import EXCHANGE, OPTIMIZER_SHARES
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import published_type
from rlhfsim.specs.placement.backends import BackendRules, broken_rule, broken_sums, sums_fp32
from rlhfsim.specs.placement.layout import Layout, Offload, Recompute, RolloutLayout
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.dataflow import TRAINED
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.units import BILLION

SHORTEST_CHUNK = 128
"""Tokens of the chunks, two a GPU, into which context parallelism cuts the longest sequence, at least."""
CONTEXTS = (1, 2, 4, 8)
"""Degrees of context parallelism that compete."""
MAX_PIPELINE = 16
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


Fields = dict[str, Any]
_cut_of = itemgetter(*CUT)


class ModelCut(NamedTuple):
    """How a model is cut, and among what its shapes choose: the same on many numbers of GPUs."""

    tp: int
    pp: int
    cp: int
    experts: tuple[int, ...]
    alone: bool
    """A single rank: no other one holds the same parameters."""
    copies: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Fields of the layouts of one `ModelCut`, but DP and the micro-batch; searches share them."""

    fields: tuple[Fields, ...]
    refused: Counter[str]
    """Why others are never run -> how many."""
    homes: Counter[tuple[int, Offload, Offload]]
    """Virtual stages, where optimizer states and parameters lie -> how many."""
    recomputed: bool
    """Whether all of them run the whole forward again."""

    @property
    def leanest(self) -> Fields:
        """The one that holds least on a GPU between its passes."""
        return max(self.fields, key=_leanness)


def _leanness(fields: Fields) -> tuple[object, ...]:
    away = fields["offload_params"] != "none", fields["offload_optimizer"] != "none"
    return fields["shards"] is None, *away, fields["zero"], fields["ep"], fields["offload_fraction"]


class LayoutShape(NamedTuple):
    """Layouts that differ in the micro-batch alone, smallest first; objects are made when they are needed."""

    fields: Fields
    sizes: Sequence[Fields]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All of them."""
        return tuple(Layout(**self.fields, **size) for size in self.sizes)

    @property
    def cut(self) -> tuple[Any, ...]:
        """What decides their states, as `memory.states.cut` of each."""
        fields: tuple[Any, ...] = _cut_of({"etp": 1, **self.fields})
        return fields


class CutShapes(NamedTuple):
    """Shapes of one `ModelCut` on a number of GPUs."""

    dp: int
    shapes: Shapes
    sizes: Mapping[int, Sequence[Fields]]
    """Virtual stages -> sizes of a micro-batch that have work."""

    @property
    def filled(self) -> Iterator[LayoutShape]:
        """All shapes with a layout."""
        for fields in self.shapes.fields:
            if sizes := self.sizes[fields["vp"]]:
                yield LayoutShape({**fields, "dp": self.dp}, sizes)

    @property
    def outlines(self) -> Iterator[Layout]:
        """The cut and recomputation with every size of a micro-batch that has work in one of the shapes."""
        if not self.shapes.fields:
            return
        one = self.shapes.fields[0]
        cut = {name: one[name] for name in ("tp", "pp", "cp")} | {"dp": self.dp}
        recompute: Recompute = "full" if self.shapes.recomputed else "none"
        sizes = {tuple(size.items()): size for sizes in self.sizes.values() for size in sizes}
        for size in sizes.values():
            yield Layout(**cut, **size, recompute=recompute)


@dataclass(frozen=True, slots=True)
class Space:
    """Shapes that may compete and why others may not."""

    blocks: tuple[CutShapes, ...]
    dropped: Counter[str]
    """Reason -> number of layouts."""

    @property
    def shapes(self) -> Iterator[LayoutShape]:
        """All shapes with a layout."""
        return chain.from_iterable(block.filled for block in self.blocks)

    @property
    def layouts(self) -> Iterator[Layout]:
        """All layouts, those of one shape together."""
        return chain.from_iterable(shape.layouts for shape in self.shapes)

    @property
    def homes(self) -> Counter[tuple[Offload, Offload]]:
        """Where optimizer states and parameters lie -> number of layouts."""
        total: Counter[tuple[Offload, Offload]] = Counter()
        for block in self.blocks:
            for (vp, *home), count in block.shapes.homes.items():
                total[home[0], home[1]] += count * len(block.sizes[vp])
        return total


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `limit`."""
    return tuple(1 << i for i in range(max(1, limit).bit_length()))


@lru_cache(maxsize=4096)
def divides_heads(model: ModelSpec, tp: int) -> bool:
    """Whether tensor parallelism `tp` splits the attention heads evenly."""
    try:
        model.check_tp(tp)
    except RlhfsimError:
        return False
    return True


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
            fields = _shapes(rules, request, model, fixed, trained, cut)
            known[cut] = _runnable(request, role, model, fields, {"dp": dp, **every[0]})
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
            homes[fields["vp"], fields["offload_optimizer"], fields["offload_params"]] += 1
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
    tps = _values(fixed, "tp", powers_of_two(domain) if rules.tensor_parallel else (1,))
    pps = _values(fixed, "pp", _pipelines(model, gpus) if rules.pipeline_parallel else (1,))
    for tp, pp, cp in product(tps, pps, _contexts(request, rules, fixed)):
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or fixed.get("dp", dp) != dp:
            continue
        ranks = tp * cp * dp
        eps = tuple(ep for ep in _values(fixed, "ep", _experts(model, rules, ranks)) if ranks % ep == 0)
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
    vps = _values(fixed, "vp", _virtual(model, rules, pp)) if trained else (1,)
    vps = tuple(vp for vp in vps if vp == 1 or interleaves(model, pp, vp))
    runs = rules.zero_stages_pp if pp > 1 else rules.zero_stages_tp if tp > 1 else rules.zero_stages
    single = (0,) if 0 in runs else runs
    states = _states(rules, request, fixed, single if cut.alone else None, trained)
    for ep, vp, (zero, offload, share), recompute, shards in product(
        cut.experts, vps, states, _recomputes(request, fixed, trained), cut.copies
    ):
        if shards and (zero not in rules.hybrid_stages or ep > 1):
            continue
        yield {
            "dispatcher": training_dispatcher(request, model, ep),
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
            "offload_params": offload if rules.offloads_all else "none",
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
        return _values(fixed, "zero", alone)
    scoring = sorted(stages & {0, 3}) or [min(stages)]
    return _values(fixed, "zero", sorted(stages - {0}) if trained else scoring)


def _recomputes(request: Request, fixed: Mapping[str, int | str], trained: bool) -> tuple[Recompute, ...]:
    if "recompute" in fixed:
        return (fixed["recompute"],)  # type: ignore[return-value]  # checked where options are read
    if not trained or "recompute" in request.left_out:
        return ("none",)
    return "none", "full"


def _offloads(request: Request, trained: bool) -> tuple[Offload, ...]:
    return ("none", "cpu") if trained and "offload" not in request.left_out else ("none",)


def _values(fixed: Mapping[str, int | str], name: str, default: Iterable[int]) -> tuple[int, ...]:
    return (int(fixed[name]),) if name in fixed else tuple(default)


def _pipelines(model: ModelSpec, gpus: int) -> tuple[int, ...]:
    limit = min(MAX_PIPELINE, gpus, *(one.num_layers for one in model.each))
    return tuple(p for p in range(1, limit + 1) if gpus % p == 0 and splits_layers(model, p))


def splits_layers(model: ModelSpec, pp: int) -> bool:
    """Whether `pp` stages are usual: equal ones, or a power of two with shorter first and last stages.

    Engines cut 61 or 126 layers unevenly (`training.pipeline.split`).
    """
    even = pp & (pp - 1) == 0
    return all(pp <= one.num_layers and (one.num_layers % pp == 0 or even) for one in model.each)


def _contexts(request: Request, rules: BackendRules, fixed: Mapping[str, int | str]) -> tuple[int, ...]:
    chunks = batch_lengths(request.workload).max_tokens / (2 * SHORTEST_CHUNK)
    padded = request.runs is not None and request.backend in request.runs.says.packed_contexts
    cuts = rules.context_parallel and (request.workload.packing or not padded)
    degrees = (c for c in CONTEXTS if c == 1 or c <= chunks) if cuts else (1,)
    return _values(fixed, "cp", degrees)


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


def rollout_layouts(
    request: Request, model: ModelSpec, gpus: int, group: NodeGroup, *, shares: bool = False
) -> tuple[RolloutLayout, ...]:
    """Layouts of the inference engine that fill `gpus` GPUs, which it `shares` with the actor or not.

    The same layout at falling shares of memory stands together.
    """
    fixed = request.fix.get("rollout", {})
    layouts = []
    for tp, pp, attention_dp in _replicas(request, model, gpus, group):
        each = tp * pp * attention_dp
        if gpus % each:
            continue
        for ep in _values(fixed, "ep", _rollout_experts(model, tp, attention_dp)):
            if tp * attention_dp % ep or ("dispatcher" in fixed and not 1 < ep == tp * attention_dp):
                continue
            replica = RolloutLayout(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp)
            if _lacks_replica(request, group, replica):
                continue
            whole = _formatted(request, replace(replica, dp=gpus // each))
            whole = replace(whole, dispatcher=rollout_dispatcher(request, model, whole, group))
            whole = replace(whole, max_num_seqs=_running(request, whole, gpus, shares))
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
    asked_for = _values(request.fix.get("rollout", {}), "prefill", every)
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
    """Speculative decoding of the workload beside none, where an engine can have it; a draft that is trained
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
    tps = _values(
        fixed,
        "tp",
        (t for t in powers_of_two(widest) if divides_heads(model, t) and (t <= domain or t % domain == 0)),
    )
    stages = WIDE_PIPELINES if many and domain < gpus else ()
    pps = _values(fixed, "pp", (1, *(p for p in stages if splits_layers(model, p))))
    for tp, pp in product(tps, pps):
        if pp == 1 or tp == inside or "pp" in fixed:
            yield tp, pp, 1
    if many and model.moe is not None and "pp" not in fixed:
        for tp, ranks in product(tps, _values(fixed, "ep", powers_of_two(min(gpus, MAX_EXPERT_RANKS)))):
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
    return rollout_weights(model, whole) >= ROOM * group.profile.usable_memory.value


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
