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
    known: dict[ModelCut, Shapes] | None = None,
) -> Space:
    """Layouts of a role that fill `gpus` GPUs; a role that only runs forward needs no optimizer.

    `known`: its shapes on any number of GPUs.
    """
    rules, fixed = request.rules(role), request.fix.get(role, {})
    asked = _RoleSpace(request, role, model, rules, fixed, domain, trained=role in TRAINED)
    return asked.space(gpus, {} if known is None else known)


@dataclass(frozen=True, slots=True)
class _RoleSpace:
    """A role whose layouts are asked for."""

    request: Request
    role: str
    model: ModelSpec
    rules: BackendRules
    fixed: Mapping[str, int | str]
    domain: int
    trained: bool

    def space(self, gpus: int, known: dict[ModelCut, Shapes]) -> Space:
        """Its layouts that fill `gpus` GPUs."""
        sizes = {cp: micro_batches.sizes(self.request, self.role, cp) for cp in self._contexts}
        dropped: Counter[str] = Counter()
        blocks = []
        for dp, cut in self._cuts(gpus):
            every = sizes[cut.cp]
            if cut not in known:
                each = [cut._replace(experts=(ep,)) for ep in cut.experts]
                for one in each:  # other numbers of GPUs share it
                    if one not in known:
                        known[one] = self._runnable(one, {"dp": dp, **every[0]})
                known[cut] = joined([known[one] for one in each])
            shapes, filled = known[cut], dict[int, Sequence[Fields]]()
            for reason, count in shapes.refused.items():
                dropped[reason] += count * len(every)
            for vp in {home[0]: None for home in shapes.homes}:
                count = sum(n for home, n in shapes.homes.items() if home[0] == vp)
                filled[vp], reasons = self._filled(every, pp=cut.pp, dp=dp, cp=cut.cp, vp=vp)
                dropped.update({reason: count * number for reason, number in reasons.items()})
            blocks.append(CutShapes(dp, shapes, filled))
        return Space(tuple(blocks), dropped)

    def _runnable(self, cut: ModelCut, rest: Fields) -> Shapes:
        """Shapes of a cut that are run, however many ranks and tokens they have (`rest`: some)."""
        runs, refused, homes = list[Fields](), Counter[str](), Counter[Any]()
        for fields in self._shapes(cut):
            if reason := never_run(self.request, self.model, Layout(**fields, **rest), self.role):
                refused[reason] += 1
            else:
                runs.append(fields)
                homes[
                    fields["vp"], fields["offload_optimizer"], fields["offload_params"], fields["zero"]
                ] += 1
        recomputed = all(fields["recompute"] == "full" for fields in runs)
        return Shapes(tuple(runs), refused, homes, recomputed)

    def _filled(self, every: Sequence[Fields], **cut: Any) -> tuple[Sequence[Fields], dict[str, int]]:
        """Those of `every` size that competes which the shapes with a cut have; why not others, how many."""
        request, batch = self.request, batch_lengths(self.request.workload)
        layouts = [(size, Layout(**cut, **size)) for size in every]
        if refused := unshared(request, layouts[0][1], self.role):
            return (), {refused: len(every)}
        filled = [(size, x) for size, x in layouts if micro_batches.has_work(x, batch)]
        lacking = "too few sequences in a mini-batch for its ranks, stages and micro-batch"
        dropped = {lacking: len(every) - len(filled)}
        if request.runs is not None and request.runs.says.whole_updates:
            even = [(size, x) for size, x in filled if batch.sequences % (x.dp * x.micro_batch) == 0]
            dropped["a mini-batch is not whole micro-batches"] = len(filled) - len(even)
            filled = even
        return [size for size, _ in filled], dropped

    def _values(self, name: str, default: Iterable[int]) -> tuple[int, ...]:
        return values(self.fixed, name, default)

    def _cuts(self, gpus: int) -> Iterator[tuple[int, ModelCut]]:
        """DP and the rest of every cut that fills the GPUs."""
        tps = self._values("tp", powers_of_two(self.domain) if self.rules.tensor_parallel else (1,))
        pps = self._values("pp", self._pipelines(gpus) if self.rules.pipeline_parallel else (1,))
        for tp, pp, cp in product(tps, pps, self._contexts):
            dp = gpus // (tp * pp * cp)
            if dp * tp * pp * cp != gpus or self.fixed.get("dp", dp) != dp:
                continue
            ranks = tp * cp * dp
            eps = tuple(ep for ep in self._values("ep", self._experts(ranks)) if ranks % ep == 0)
            yield dp, ModelCut(tp, pp, cp, eps, dp * cp == 1, self._copies(dp * cp, self.domain // tp))

    def _shapes(self, cut: ModelCut) -> Iterator[Fields]:
        """Fields of the layouts of a cut but DP and those that say how large a micro-batch is."""
        rules, model, pp = self.rules, self.model, cut.pp
        said = {**self.request.fix.get("actor", {}), **self.fixed}
        exchange = {name: said[name] for name in EXCHANGE if name in said}
        virtual = (1, 2) if rules.virtual_stages and interleaves(model, pp, 2) else (1,)
        vps = self._values("vp", virtual) if self.trained else (1,)
        vps = tuple(vp for vp in vps if vp == 1 or interleaves(model, pp, vp))
        runs = rules.zero_stages_pp if pp > 1 else rules.zero_stages_tp if cut.tp > 1 else rules.zero_stages
        single = (0,) if 0 in runs else runs
        states = self._states(single if cut.alone else None)
        dispatchers = {ep: training_dispatcher(self.request, model, ep) for ep in cut.experts}
        for ep, vp, (zero, offload, share), recompute, shards in product(
            cut.experts, vps, states, self._recomputes, cut.copies
        ):
            if shards and (zero not in rules.hybrid_stages or ep > 1):
                continue
            yield {
                "dispatcher": dispatchers[ep],
                "tp": cut.tp,
                "pp": pp,
                "cp": cut.cp,
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

    def _copies(self, ranks: int, domain: int) -> tuple[int | None, ...]:
        """Shards over all ranks, or, where those leave a scale-up domain of `domain` ranks, inside each."""
        hybrid = self.rules.hybrid_stages
        if "shards" in self.fixed:
            wanted = int(self.fixed["shards"])
            return (wanted,) if hybrid and wanted < ranks and ranks % wanted == 0 else ()
        if not hybrid or "hsdp" in self.request.left_out or not 1 < domain < ranks or ranks % domain:
            return (None,)
        return None, domain

    def _states(self, alone: tuple[int, ...] | None) -> list[tuple[int, Offload, float]]:
        """ZeRO stages with where optimizer states live, and which share of them is away."""
        parts = () if "partial-offload" in self.request.left_out else OPTIMIZER_SHARES
        return [
            (zero, offload, share)
            for zero, offload in self._zeros_and_offloads(alone)
            for share in (*(parts if offload != "none" and zero in self.rules.partial_offload else ()), 1.0)
        ]

    def _zeros_and_offloads(self, alone: tuple[int, ...] | None) -> Iterable[tuple[int, Offload]]:
        """One rank offloads under the lowest stage that can; where the weights leave too, they come back
        layer by layer, under stage 3."""
        rules, request, left_open = self.rules, self.request, "zero" not in self.fixed
        zeros, offloads = self._zeros(alone), list[Offload](["none"])
        if self.trained and "offload" not in request.left_out:
            offloads.append("cpu")
        if alone is not None and self.trained and left_open and sums_fp32(request.workload, request.backend):
            zeros = rules.fp32_sums[:1]
        if rules.offloads_all and left_open:
            return [*((zero, offloads[0]) for zero in zeros), *((3, offload) for offload in offloads[1:])]
        pairs = product(zeros, offloads)
        if alone is None or not left_open or not rules.offload_stages:
            return pairs
        return [
            (zero if offload == "none" else min(rules.offload_stages), offload) for zero, offload in pairs
        ]

    def _zeros(self, alone: tuple[int, ...] | None) -> tuple[int, ...]:
        """Stages that compete; 0 only for a single rank, or for a role without optimizer: sharded or not.

        `alone`: those of a single rank; where the framework shards whatever the ranks (verl), its own.
        """
        rules = self.rules
        stages = {*rules.zero_stages, *rules.zero_stages_tp, *rules.zero_stages_pp}
        scoring = sorted(stages & {0, 3}) or [min(stages)]
        several = sorted(stages - {0}) if self.trained else scoring
        return self._values("zero", several if alone is None else alone)

    @property
    def _recomputes(self) -> tuple[Recompute, ...]:
        if "recompute" in self.fixed:
            return (self.fixed["recompute"],)  # type: ignore[return-value]  # checked where options are read
        if not self.trained or "recompute" in self.request.left_out:
            return ("none",)
        return "none", "full"

    def _pipelines(self, gpus: int) -> Iterable[int]:
        limit = min(MAX_PIPELINE, gpus, *(one.num_layers for one in self.model.each))
        return (p for p in range(1, limit + 1) if gpus % p == 0 and splits_layers(self.model, p))

    @property
    def _contexts(self) -> tuple[int, ...]:
        request = self.request
        chunks = batch_lengths(request.workload).max_tokens / (2 * SHORTEST_CHUNK)
        padded = request.runs is not None and request.backend in request.runs.says.packed_contexts
        cuts = self.rules.context_parallel and (request.workload.packing or not padded)
        return self._values("cp", (c for c in CONTEXTS if c == 1 or c <= chunks) if cuts else (1,))

    def _experts(self, ranks: int) -> tuple[int, ...]:
        counts = {one.moe.num_experts if one.moe else 1 for one in self.model.each}
        if not self.rules.expert_parallel:
            return (1,)
        return tuple(
            e for e in powers_of_two(min(ranks, *counts)) if ranks % e == 0 and not any(n % e for n in counts)
        )


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
