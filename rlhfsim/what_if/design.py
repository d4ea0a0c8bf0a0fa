"""The answer to a design question: the plan to run, the proven best one, its rivals, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from math import inf
from typing import Any

from rlhfsim.choice import BreakEven, Choice, RunnerUp
from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import Ledger
from rlhfsim.plan import Plan
from rlhfsim.search import clock
from rlhfsim.search.candidates import Candidate, most_bytes, risk
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.explain import best_name, kind, reasons
from rlhfsim.search.parallel import beside as in_parallel
from rlhfsim.search.parallel import serial
from rlhfsim.search.pareto import SAFE
from rlhfsim.search.planning import asked, asked_again, plan_for, runner_up, searched
from rlhfsim.search.request import Request
from rlhfsim.search.scope import WHOLE, Scope
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.batch import EvenBatch, FewerGpus, even_batch, fewer_gpus
from rlhfsim.what_if.break_evens import break_evens
from rlhfsim.what_if.engine import Prices, Question, answers, variants
from rlhfsim.what_if.estimate import PricedPlacement, priced_placement
from rlhfsim.what_if.gains import Gain, elsewhere, gains, learning_gain
from rlhfsim.what_if.points import asking, points
from rlhfsim.what_if.remedies import Remedy, remedies, shortage
from rlhfsim.what_if.risk.step import law_of, probability_faster
from rlhfsim.what_if.rivals import Rival, Rivals, Searched, of_parts_that_ran
from rlhfsim.what_if.simplest import BF16_SUMS, CLOSE, bf16_sums, simplest
from rlhfsim.what_if.usual_trainer import beside, trained, with_trainer
from rlhfsim.what_if.verdict import contradictions, rules_broken
from rlhfsim.what_if.why_not import Alternative, WhyNot, missing, nearest, why_not

FORKED = 80_000
"""Most options that are priced where the rest of the answer is looked for in several processes: with more of
them each process would hold over 100 MB of its own."""
RUNNERS_UP = 6


@frozen
class Design:
    """A proven, explained answer."""

    request: Request
    chosen: Plan | None
    """The one to run: the simplest close to the best, often the best itself; None when nothing fits."""
    best: Plan | None
    """The proven best one, with which everything else is compared."""
    simple: bool = True
    """Whether a simpler plan than the best may be chosen."""
    runners_up: tuple[Plan, ...] = ()
    """The best plan of every other kind (`what_if.rivals`); without reasons those that were met."""
    gaps: tuple[float | None, ...] = ()
    """By which share a plan of the kind of each could still be better; None: not proven."""
    certificate: Certificate
    """Where every plan of the space went."""
    confidence: float | None = None
    """Probability that the best plan is faster than the first runner-up; None without one."""
    reasons: tuple[str, ...] = ()
    """What fills the step of the chosen plan, what the best one would save, and why that one won."""
    break_evens: tuple[BreakEven, ...] | None = None
    """Single changes that would make another plan the best; None: not looked for."""
    gains: tuple[Gain, ...] = ()
    """What each choice that is not allowed would bring, where that was asked."""
    elsewhere: Gain | None = None
    """The faster step that another backend or framework would bring, if one was met."""
    other_side: Plan | None = None
    """A good plan of the best measured production framework, or of ours where another framework's leads."""
    learning_gain: Gain | None = None
    """The switch that changes learning and would save most, if it saves much."""
    fewer: FewerGpus | None = None
    """The knee, where it is below the GPUs that are asked for."""
    even: EvenBatch | None = None
    """A batch that divides over all GPUs, where the one that was asked for does not and that is worth it."""
    refused: Counter[str] = field(default_factory=Counter)
    """Layouts outside the space by reason."""
    shortage: str | None = None
    """When nothing fits: what the nearest plan lacks."""
    rejected_by: str | None = None
    """When nothing fits: why, with pool, phase and bytes of the plan that comes nearest."""
    nearest: PricedPlacement | None = None
    """When nothing fits: that plan, for the workload as asked or with all allowed switches; None where
    none fits with much more memory."""
    remedy: str | None = None
    """When nothing fits: the smallest change that would."""
    remedies: tuple[Remedy, ...] = ()
    """When nothing fits: the first change of every family that would, the gentlest first."""
    whynots: tuple[WhyNot, ...] = ()
    """The best plan under each alternative that was asked about."""

    @property
    def simpler(self) -> bool:
        """Whether another plan than the best one is chosen."""
        return self.chosen is not self.best

    @property
    def missing(self) -> Ledger | None:
        """When nothing fits: the ledger of the nearest plan; None where the host lacks bytes, or for risk."""
        return missing(self.nearest.memory) if self.nearest else None

    @property
    def told(self) -> Plan | None:
        """The chosen plan with what was asked and why it won, as `rlhfsim design` writes it."""
        if self.chosen is None:
            return None
        choice = Choice(
            asked=asked(self.request),
            confidence=self.confidence,
            reasons=self.reasons,
            break_evens=self.break_evens,
            certificate=searched(self.certificate),
            runners_up=tuple(map(self._runner_up, self.runners_up, self.gaps)),
            fastest=not self.simple,
            best=self._runner_up(self.best, self.certificate.gap) if self.best and self.simpler else None,
        )
        return replace(self.chosen, choice=choice)

    def _runner_up(self, plan: Plan, gap: float | None) -> RunnerUp:
        return runner_up(plan, self.request.workload, gap)


def design(
    request: Request,
    *,
    explain: bool = True,
    left_out: bool = False,
    rivals: bool = True,
    instead: Sequence[Alternative] = (),
    simplest_s: float | None = inf,
    remedied: bool = True,
    overturned: bool = True,
) -> Design:
    """The best plan of a request, with the proof and why it won; `instead` is compared with it.

    `explain`: also the reasons, and the best plan of every other kind up to 1 %. `overturned`: also the
    break-evens, which take as long as all the rest. `left_out`: also what each
    choice would bring that does not compete; it takes as long again. Without `rivals` only those runners-up
    are named that were met on the way, and the search is shorter. The simplest plan close to the
    best is chosen, of at most `simplest_s` seconds unless that takes longer; with None, or where a time
    limit ended the search, the best that was met is. `remedied`: where nothing fits, also why, and what
    would.

    Where time is up, what was met is the answer, and what would take another search is left out; where the
    search ended after its share of work, the simplest plan, the knee and break-evens are.

    Raises:
        RlhfsimError: unknown model, or a request that contradicts itself.
    """
    with clock.within(request.time_limit):
        request, searches, met = _searched(request, Scope(rivals=rivals))
        found = Design(
            request=request,
            chosen=None,
            best=None,
            simple=simplest_s is not None,
            certificate=reduce(Certificate.plus, (f.certificate for _, f in searches)),
            refused=sum((f.refused for _, f in searches), Counter()),
        )
        if not met:
            found = replace(found, shortage=next(rules_broken(request), None) or shortage(searches[0][1]))
            return unfit(found) if explain and remedied else found
        settled = _Settled(request, searches, met, found.certificate.proven, explain)
        sought = partial(settled.others, rivals=rivals, overturned=overturned)
        run = partial(settled.recommended, simplest_s, left_out=left_out)
        best, first, prices = settled.best, settled.first, settled.prices
        with nullcontext() if settled.options <= FORKED else serial():
            (behind, others), (close, ours) = (
                in_parallel(sought, run) if explain and rivals else (sought(), run())
            )
            whynots = tuple(why_not(a, best, first.candidate, prices) for a in instead)
            found = replace(found, best=best, whynots=whynots, **others, **ours)
            if explain and not left_out and not clock.over():
                found = replace(found, elsewhere=settled.elsewhere(found))
        return _compared(found, [first, *behind], prices.request, explain=explain, close=close)


@dataclass(frozen=True)
class _Settled:
    """A question whose best plan is known."""

    request: Request
    searches: Sequence[Searched]
    met: Sequence[Rival]
    """The best plan first."""
    proven: bool
    explain: bool

    @property
    def first(self) -> Rival:
        """The best plan."""
        return self.met[0]

    @cached_property
    def prices(self) -> Prices:
        """Those that found it."""
        return _prices(self.request, self.first.workload, self.searches)

    @property
    def options(self) -> int:
        """Those that were priced on the way."""
        return sum(result.pricer.priced for _, result in self.searches)

    @cached_property
    def best(self) -> Plan:
        """The same, as it is written."""
        return _plan(self.request, self.first)

    def others(self, *, rivals: bool, overturned: bool) -> tuple[Sequence[Rival], dict[str, Any]]:
        """The best plans of other kinds, and fields that do not depend on which plan is run."""
        first, variant, explain = self.first, self.prices.request, self.explain
        behind = _proven(self.request, self.searches, first) if explain and rivals else self.met[1:]
        asked = explain and self.proven
        return behind, {
            "break_evens": _crossings(variant, first, behind) if asked and overturned else None,
            "fewer": fewer_gpus(variant, first.candidate) if asked and not clock.over() else None,
            "even": even_batch(variant, first.candidate) if explain and not clock.over() else None,
            "other_side": beside(variant, first.candidate.placement)
            if explain and not clock.over()
            else None,
        }

    def recommended(self, simplest_s: float | None, *, left_out: bool) -> tuple[bool, dict[str, Any]]:
        """Whether plans close to the best were looked at; the plan to run, of at most `simplest_s` seconds
        (None: the best one), and fields of what it is compared with, as long as time is left."""
        most_s = simplest_s if self.proven and not clock.over() else None
        chosen = None if most_s is None else _to_run(self.request, self.first, self.prices, most_s)
        close = most_s is not None and not clock.over()
        step_s = (chosen or self.best).prediction.step_s
        about = self.prices, self.first.candidate, step_s
        found: dict[str, Any] = {"chosen": chosen}
        if left_out:
            found["gains"] = tuple(gains(*about))
        if self.explain and not clock.over():
            found["learning_gain"] = learning_gain(*about)
        return close, found

    def elsewhere(self, found: Design) -> Gain | None:
        """What another backend would bring than those of the plan to run and of the other side."""
        step_s = (found.chosen or self.best).prediction.step_s
        known = [found.other_side.placement.backend] if found.other_side else []
        return elsewhere(self.prices, self.first.candidate, step_s, known)


def what_overturns(request: Request) -> tuple[BreakEven, ...] | None:
    """Single changes that would make another plan the answer; None where no best plan was proven in time.

    Raises:
        RlhfsimError: unknown model, or a request that contradicts itself.
    """
    with clock.within(request.time_limit):
        request, searches, met = _searched(request, WHOLE)
        if not met or not all(found.certificate.proven for _, found in searches):
            return None
        first = met[0]
        variant = _prices(request, first.workload, searches).request
        return _crossings(variant, first, _proven(request, searches, first))


def with_break_evens(plan: Plan, cluster: Cluster | None, limit_s: float) -> Plan:
    """The plan with what would change its choice, searched where `design` did not look for it.

    `cluster`: that of the plan; None: not known here.
    """
    if cluster is None or plan.choice is None or plan.choice.break_evens is not None:
        return plan
    overturned = what_overturns(replace(asked_again(plan, cluster), time_limit=limit_s))
    return replace(plan, choice=replace(plan.choice, break_evens=overturned))


def _crossings(variant: Request, first: Rival, behind: Sequence[Rival]) -> tuple[BreakEven, ...] | None:
    """Break-evens of the best plan with those of other kinds; None where time is up before they are known."""
    same_work = [r.candidate for r in (first, *behind) if r.workload == first.workload]
    found = None if clock.over() else tuple(break_evens(variant, same_work))
    return None if clock.over() else found


def unfit(answer: Design, typed: Mapping[str, str] | None = None) -> Design:
    """An answer without a plan, with the plan that comes nearest, what it lacks, and what would fit.

    `typed`: see `remedies`.
    """
    request, timely = answer.request, not clock.over()  # what would fit takes searches of its own
    possible = answer.certificate.space and not any(contradictions(request))
    near = _nearest(request) if timely and possible else None
    refused = max(answer.refused, key=lambda reason: answer.refused[reason], default=None)
    helps = remedies(request, typed) if timely else ()
    return replace(
        answer,
        nearest=near,
        rejected_by=next(rules_broken(request), None)
        or (risk(request, near.memory) if near else None)
        or answer.shortage
        or refused
        or "no plan with these choices fits",
        remedies=helps,
        remedy=helps[0].change if helps else None,
    )


def _nearest(request: Request) -> PricedPlacement | None:
    """The plan that misses memory by least, for the workload as asked or with every allowed switch."""
    works = dict.fromkeys((request.workload, variants(request)[-1]))
    near = points(Question(request=request), (asking(workload=work) for work in works), nearest)
    found = [priced_placement(p.answer, p.question.request.workload, request.cluster) for p in near]
    return min(found, key=lambda one: one.memory.peak.bytes / one.memory.peak.capacity, default=None)


def _compared(
    found: Design, ranked: Sequence[Rival], variant: Request, *, explain: bool, close: bool
) -> Design:
    """The answer with the best of every other kind; `variant`: with the switches of the best."""
    request, best, shown = found.request, found.best, ranked[1 : RUNNERS_UP + 1]
    assert best is not None
    chosen, plans = found.chosen or best, [best, *(_plan(request, rival) for rival in shown)]
    why = _reasons(variant, request.workload, chosen, plans, close=close) if explain else ()
    return replace(
        found,
        chosen=chosen,
        runners_up=tuple(_exact(plan, request, found.whynots) or plan for plan in plans[1:]),
        gaps=tuple(rival.gap for rival in shown),
        confidence=_confidence(plans, [rival.candidate for rival in ranked[:2]]),
        reasons=tuple(why),
    )


def _exact(plan: Plan, request: Request, whynots: Sequence[WhyNot]) -> Plan | None:
    """The exactly proven best plan of the kind of a runner-up, where `--why-not` has asked for that."""
    exact = (w.plan for w in whynots if w.choice == plan.architecture and w.plan and w.certificate.proven)
    like = (p for p in exact if kind(p, request.workload) == kind(plan, request.workload))
    return next((p for p in like if p.prediction.step_s < plan.prediction.step_s), None)


def _confidence(plans: Sequence[Plan], candidates: Sequence[Candidate]) -> float | None:
    """Probability that the first plan is faster than the second; None without one."""
    if len(candidates) < 2:
        return None
    one, other = (law_of(p, c.iteration.cost) for p, c in zip(plans, candidates, strict=False))
    return probability_faster(one, other)


def _reasons(
    request: Request, workload: Workload, chosen: Plan, ranked: Sequence[Plan], *, close: bool
) -> Iterator[str]:
    """`workload`: as asked, without switches; `close`: the plans close to the best were looked at."""
    yield from reasons(chosen, ranked[0], ranked[1:], workload, request.objective)
    yield from rules_broken(request) if "offload" in request.forbid else ()
    its, ours = (most_bf16_sums(request, plan) for plan in (ranked[0], chosen))
    if close and ours < its > BF16_SUMS[0]:
        other = f"this one of {ours:,}" if ours > 1 else "this one in FP32"
        yield f"{best_name(request.objective)} sums the gradients of {its:,} micro-batches in BF16, {other}"
    if close and ours > BF16_SUMS[0]:
        yield (
            f"the gradients of {ours:,} micro-batches are summed in BF16, which drops what is small next to "
            "the sum: --mini-batches, more GPUs or another backend make them fewer"
        )
    risk = chosen.prediction.probability_out_of_memory
    if close and risk > SAFE:
        least = f"no plan within {CLOSE:.0%} of the best risks less than {SAFE:.0%}".replace("%", " %")
        yield f"{least} of running out of memory; this one risks {100 * risk:.1f} %"


def most_bf16_sums(request: Request, plan: Plan) -> int:
    """Most micro-batches whose gradients a role sums in BF16."""
    request = replace(request, workload=plan.workload)
    return max(int(bf16_sums(request, name, role)) for name, role in plan.placement.roles.items())


def _simpler(best: Candidate, prices: Prices, at_most: float) -> Plan | None:
    """The simplest plan close to the best one; None where that is the simplest."""
    request = prices.request
    simple, workload = simplest(best, prices, at_most=at_most)
    if simple.placement == best.placement and workload == request.workload:
        return None
    return _plan(request, Rival(workload=workload, candidate=simple, gap=None))


def _to_run(request: Request, best: Rival, prices: Prices, at_most: float) -> Plan | None:
    """The simplest plan close to the best one whose parts have run; None where that is the best."""
    ran = of_parts_that_ran(request, best, prices)
    if ran is None:
        return _simpler(best.candidate, prices, at_most)
    again = prices.again(replace(request, workload=ran.workload))
    return _simpler(ran.candidate, again, at_most) or _plan(request, ran)


def _searched(request: Request, scope: Scope) -> tuple[Request, list[Searched], list[Rival]]:
    """The question with its trainer, its searches, and what they met."""
    request = trained(request)
    searches = list(answers(Question(request=request, scope=scope)))
    return request, searches, _met(request, searches)


def _met(request: Request, searches: Sequence[Searched]) -> list[Rival]:
    """The best plan first, then the best of every other kind that was met."""
    met = [
        Rival(workload=workload, candidate=c, gap=None)
        for workload, result in searches
        for c in (result.best, *result.rivals)
        if c is not None
    ]
    return sorted(met, key=lambda plan: _value(request, plan.candidate))


def _proven(request: Request, searches: Sequence[Searched], best: Rival) -> list[Rival]:
    """The proven best plan of every other kind."""
    others = Rivals(request=request, searches=searches).all(best.workload, best.candidate)
    once = {(r.workload, r.candidate.placement): r for r in others}
    return sorted(once.values(), key=lambda plan: _value(request, plan.candidate))


def _prices(request: Request, workload: Workload, searches: Sequence[Searched]) -> Prices:
    """Roles as they were priced, for each workload; first of all for that of the best plan."""
    variants = {w: f.pricer for w, f in searches}
    request = replace(request, workload=workload)
    steps = {w: f.search.steps for w, f in searches}
    return Prices(request=request, pricer=variants[workload], variants=variants, steps=steps)


def _plan(request: Request, rival: Rival) -> Plan:
    return with_trainer(plan_for(replace(request, workload=rival.workload), rival.candidate), request)


def _value(request: Request, candidate: Candidate) -> tuple[float, float]:
    """What is minimised, then what decides between equals."""
    pair = candidate.seconds, most_bytes(candidate.ledger)
    return (pair[1], pair[0]) if request.objective == "memory" else pair
