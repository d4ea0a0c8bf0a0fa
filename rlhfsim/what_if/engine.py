"""A question and its answer: what every break-even, gain, why-not, remedy, size and scenario asks.

    answer(question)

A question is a design request, whose best plan is searched, or a placement that keeps its layouts and is
priced again. Roles that a change leaves alone keep the prices that the first answer came with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import combinations
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.search import clock
from rlhfsim.search.branch_and_bound import Search, SearchResult
from rlhfsim.search.candidates import Candidate, judged, stale_seconds, value
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import FP32_SUMS, STALE, Limit, Request, switched
from rlhfsim.search.role_fields import FIXABLE_ROLES
from rlhfsim.search.scope import WHOLE, Scope, Steps
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.roles import GENERATING, MODELS, POLICY, TRAINED
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.measured import model_error

ASIDE_WORK = 50_000
"""Options that a search for what is said in passing may price: gains, the knee, break-evens."""
ASIDE = Scope(rivals=False, work=ASIDE_WORK)
"""The scope of such a search."""
TOUCHED: dict[str, frozenset[str]] = {
    "adam8bit": frozenset(TRAINED),
    "bf16-gradients": frozenset(TRAINED),
    FP32_SUMS: frozenset(TRAINED),
    "fp8": frozenset(GENERATING),
    "fp8-kv": frozenset(GENERATING),
    "mxfp4": frozenset(GENERATING),
    "nvfp4": frozenset(GENERATING),
    "lora": frozenset(POLICY),
    "qlora": frozenset(POLICY),
    "fp8-training": frozenset(MODELS),
    "rollout-logprobs": frozenset({"actor"}),
}
"""Roles whose price a switch changes; with LoRA the reference shares the weights of the actor."""


@frozen
class Question:
    """What is asked: the best plan of a request, or one placement under it."""

    request: Request
    placement: Placement | None = None
    """Priced again as it is; None: the best one is searched."""
    scope: Scope = WHOLE
    """What of its space is searched, and how far."""

    def scoped(self, **fields: Any) -> Question:
        """The question with other fields of its scope."""
        return replace(self, scope=replace(self.scope, **fields))

    @property
    def models(self) -> Models:
        """The models of its workload."""
        return models_of(self.request.workload)


@frozen
class Prices:
    """Roles as they were priced for a question that is answered."""

    request: Request
    pricer: Pricer

    variants: Mapping[Workload, Pricer] = field(default_factory=dict)
    """Prices for other workloads of the same question."""
    steps: Mapping[Workload, Steps] = field(default_factory=dict)
    """Plans of each workload that were simulated on the cluster of the question."""

    def kept(self, other: Request) -> Pricer | None:
        """Prices of the roles that another request leaves alone; None where it leaves none."""
        base, pricer = self.request, self.pricer
        if other.workload != base.workload and other.workload in self.variants:
            base, pricer = replace(base, workload=other.workload), self.variants[other.workload]
        if (base.backend, base.runs) != (other.backend, other.runs) or base.max_oom < other.max_oom:
            return None
        if (base.left_out ^ other.left_out) & {"offload", "partial-offload", "hsdp", "recompute"}:
            return None
        # bounds of a rollout that never drains enter its prices
        touched = frozenset({"rollout"} if other.stale and not base.stale else ())
        if base.workload != other.workload:
            switches = [n for n in TOUCHED if switched(base.workload, {n}) == other.workload]
            if not switches:
                return None
            touched |= TOUCHED[switches[0]]
        changed = {role for role in FIXABLE_ROLES if _narrowed(base, role) != _narrowed(other, role)}
        return pricer.again(other, models_of(other.workload), touched | changed)

    def again(self, request: Request) -> Prices:
        """The prices for many questions about another request: what they find out of options is kept."""
        pricer = self.kept(request)
        return self if pricer is None else replace(self, request=request, pricer=pricer)


def _narrowed(request: Request, role: str) -> tuple[Mapping[str, int | str], tuple[Limit, ...]]:
    """What a request says about the layouts of a role."""
    limits = (x for x in request.limits if x.role == role and x.field not in ("gpus", "hardware"))
    return request.fix.get(role, {}), tuple(limits)


# --- answers ----------------------------------------------------------------------------------------


def answer(question: Question, prices: Prices | None = None) -> SearchResult:
    """The best plan of a question, with the proof."""
    return search_of(question, prices).run()


def answers(question: Question, prices: Prices | None = None) -> Iterator[tuple[Workload, SearchResult]]:
    """A search for each workload that the allowed switches make; a later one must beat the earlier ones."""
    request, below = question.request, question.scope.below
    for workload in variants(request):
        asked = replace(question, request=replace(request, workload=workload))
        result = answer(asked.scoped(below=below), prices)
        if result.best is not None:
            below = min(below, value(request, result.best))
        yield workload, result


def variants(request: Request) -> tuple[Workload, ...]:
    """The workload as asked, and with each allowed switch and all of them; with a draft that is trained, then
    with it as it is."""
    switches = sorted(request.switches - STALE)
    sizes = sorted({1, len(switches)}) if switches else []
    chosen = [frozenset(some) for size in sizes for some in combinations(switches, size)]
    asked = [request.workload]
    if (drafts := request.workload.speculation) is not None and drafts.trained:
        asked.append(replace(request.workload, speculation=replace(drafts, trained=False)))
    return tuple(dict.fromkeys(switched(work, some) for some in (frozenset(), *chosen) for work in asked))


def good(question: Question, prices: Prices | None = None, *, insists: bool = False) -> Candidate | None:
    """A good plan of a question without the proof, or its placement priced again; None where nothing fits.

    `insists`: see `Search.first`.
    A placement that stays above `below` is not simulated to the end, or not at all.
    """
    if question.placement is None:
        return search_of(question, prices).first(insists=insists)
    if not _has_work(question.request, question.placement):
        return None
    below = question.scope.below
    cutoff = None if below == math.inf else below
    if cutoff and stale_seconds(question.request, question.models, question.placement) > cutoff:
        return None
    return judged(question.request, question.models, question.placement, cutoff=cutoff)


@frozen
class Fastest:
    """The question among several whose good plan is the fastest."""

    asked: Request
    beaten: tuple[Backend, ...]
    """Training backends of the questions before it that have a plan too."""


def fastest(questions: Iterable[Request]) -> Fastest | None:
    """The first question with a plan, or a later one that is faster by more than the model's error.

    None where nothing fits. Where time is up, those not asked do not lead; where bytes are minimised, the
    first that fits does.
    """
    best, below, fitting = None, math.inf, list[Backend]()
    for asked in questions:
        timed = asked.objective != "memory"  # else bounds are bytes
        if best is not None and (clock.over() or not timed):
            break
        question = Question(request=asked, scope=Scope(rivals=False, below=below if timed else math.inf))
        found = good(question, insists=best is None)
        if found is not None and found.seconds < below:
            best = Fastest(asked=asked, beaten=tuple(fitting))
            below = found.seconds * (1 - model_error())
            fitting.append(asked.backend)
    return best


def search_of(question: Question, prices: Prices | None = None) -> Search:
    """The search that answers a question, not yet begun."""
    request, scope = question.request, question.scope
    pricer = prices.kept(request) if prices else None
    if pricer and scope.wishes:
        pricer = pricer.only(scope.wishes)
    if prices and request.cluster == prices.request.cluster:
        scope = replace(scope, steps=prices.steps.get(request.workload))
    return Search(request, question.models, pricer, scope)


def _has_work(request: Request, placement: Placement) -> bool:
    """Whether every rank has a micro-batch, as `search.layouts` asks."""
    sequences = request.workload.num_sequences // request.workload.mini_batches
    return all(s.layout.dp * s.layout.micro_batch <= sequences for s in placement.trainers.values())
