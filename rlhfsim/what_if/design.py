"""The answer to a design question: the plan to run, the proven best one, its rivals, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf

from rlhfsim.plan import BreakEven, Choice, Plan, RunnerUp
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.candidates import Candidate, most_bytes
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.explain import best_name, kind, reasons
from rlhfsim.search.pareto import SAFE
from rlhfsim.search.planning import asked, plan_of, runner_up, searched
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.break_evens import break_evens
from rlhfsim.what_if.engine import Prices, Question, answers
from rlhfsim.what_if.fewer_gpus import FewerGpus, fewer_gpus
from rlhfsim.what_if.framework_rules import rules_broken
from rlhfsim.what_if.gains import Gain, elsewhere, gains
from rlhfsim.what_if.remedies import Remedy, remedies, shortage
from rlhfsim.what_if.risk.step import law_of, probability_faster
from rlhfsim.what_if.rivals import Rival, Rivals
from rlhfsim.what_if.simplest import BF16_SUMS, CLOSE, bf16_sums, simplest
from rlhfsim.what_if.why_not import Alternative, MissingBytes, WhyNot, missing_bytes, why_not

RUNNERS_UP = 6


@dataclass(frozen=True, slots=True, kw_only=True)
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
    break_evens: tuple[BreakEven, ...] = ()
    """Single changes that would make another plan the best."""
    gains: tuple[Gain, ...] = ()
    """What each choice that is not allowed would bring, where that was asked."""
    elsewhere: Gain | None = None
    """The faster step that another backend or framework would bring, if one was met."""
    fewer: FewerGpus | None = None
    """Half the GPUs, where the batch hardly feeds more."""
    refused: Counter[str] = field(default_factory=Counter)
    """Layouts outside the space by reason."""
    shortage: str | None = None
    """When nothing fits: what the nearest plan lacks."""
    missing: MissingBytes | None = None
    """When nothing fits: the byte that the nearest plan lacks; None where that is the host's, or risk."""
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
    simple: bool = True,
    at_most: float = inf,
) -> Design:
    """The best plan of a request, with the proof and why it won; `instead` is compared with it.

    `explain`: also the reasons, and the best plan of every other kind up to 1 %. `left_out`: also what each
    choice would bring that does not compete; it takes as long again. Without `rivals` only those runners-up
    are named that were met on the way, and the search is shorter. `simple`:
    the simplest plan close to the best is chosen, of at most `at_most` seconds unless that takes longer;
    where a time limit ended the search, the best that was met is.

    Raises:
        RlhfsimError: unknown model, or a request that contradicts itself.
    """
    searches = list(answers(Question(request=request, rivals=rivals)))
    certificate = reduce(lambda whole, more: whole.plus(more), (f.certificate for _, f in searches))
    refused = sum((f.refused for _, f in searches), Counter())
    ranked = _ranked(request, searches, prove=explain and rivals)
    if not ranked:
        found = remedies(request) if explain else ()
        return Design(
            request=request,
            chosen=None,
            best=None,
            certificate=certificate,
            refused=refused,
            missing=missing_bytes(Question(request=request)) if explain and certificate.space else None,
            shortage=next(rules_broken(request), None) or shortage(searches[0][1]),
            remedies=found,
            remedy=found[0].change if found else None,
        )
    plans = [
        plan_of(r.candidate, r.workload, models_of(r.workload), request.cluster, request.price)
        for r in ranked[: RUNNERS_UP + 1]
    ]
    workload, best = ranked[0].workload, ranked[0].candidate
    prices = Prices(
        request=replace(request, workload=workload),
        pricer=next(f.pricer for w, f in searches if w == workload),
        variants={w: f.pricer for w, f in searches},
    )
    whynots = tuple(why_not(a, plans[0], best, prices) for a in instead)
    same_work = [r.candidate for r in ranked if r.workload == workload]
    chosen = plans[0]
    close = simple and certificate.proven
    if close:
        chosen = _simpler(best, prices, at_most) or chosen
    return Design(
        request=request,
        chosen=chosen,
        best=plans[0],
        simple=simple,
        runners_up=tuple(_exact(plan, request, whynots) or plan for plan in plans[1:]),
        gaps=tuple(r.gap for r in ranked[1 : RUNNERS_UP + 1]),
        certificate=certificate,
        refused=refused,
        confidence=_confidence(plans, [r.candidate for r in ranked[:2]]),
        reasons=tuple(_reasons(prices.request, request.workload, chosen, plans, close=close))
        if explain
        else (),
        break_evens=tuple(break_evens(prices.request, same_work)) if explain else (),
        gains=tuple(gains(prices, best, chosen.prediction.step_s)) if left_out else (),
        elsewhere=elsewhere(prices, best, chosen.prediction.step_s) if explain and not left_out else None,
        fewer=fewer_gpus(prices.request, best) if explain else None,
        whynots=whynots,
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
    its, ours = (_sums(request, plan) for plan in (ranked[0], chosen))
    if close and ours < its > BF16_SUMS[0]:
        other = f"this one of {ours:,}" if ours > 1 else "this one in FP32"
        yield f"{best_name(request.objective)} sums the gradients of {its:,} micro-batches in BF16, {other}"
    if close and ours > BF16_SUMS[0]:
        yield (
            f"the gradients of {ours:,} micro-batches are summed in BF16, which drops what is small beside "
            "the sum: --mini-batches, more GPUs or another backend make them fewer"
        )
    risk = chosen.prediction.probability_out_of_memory
    if close and risk > SAFE:
        least = f"no plan within {CLOSE:.0%} of the best risks less than {SAFE:.0%}".replace("%", " %")
        yield f"{least} of running out of memory; this one risks {100 * risk:.1f} %"


def _sums(request: Request, plan: Plan) -> int:
    """Most micro-batches whose gradients a role sums in BF16."""
    request = replace(request, workload=plan.workload)
    return max(bf16_sums(request, name, role) for name, role in plan.placement.roles.items())


def _simpler(best: Candidate, prices: Prices, at_most: float) -> Plan | None:
    """The simplest plan close to the best one; None where that is the simplest."""
    request = prices.request
    simple, workload = simplest(best, prices, at_most=at_most)
    if simple.placement == best.placement and workload == request.workload:
        return None
    return plan_of(simple, workload, models_of(workload), request.cluster, request.price)


def _ranked(
    request: Request, searches: Sequence[tuple[Workload, SearchResult]], *, prove: bool
) -> list[Rival]:
    """The best plan first, then the best of every other kind: proven, or those that were met."""
    met = [
        Rival(workload=workload, candidate=c, gap=None)
        for workload, result in searches
        for c in (result.best, *result.rivals)
        if c is not None
    ]
    ranked = sorted(met, key=lambda plan: _value(request, plan.candidate))
    if not prove or not ranked:
        return ranked
    best = ranked[0]
    others = Rivals(request=request, searches=searches).all(best.workload, best.candidate)
    once = {(r.workload, r.candidate.placement): r for r in others}
    return [best, *sorted(once.values(), key=lambda plan: _value(request, plan.candidate))]


def _value(request: Request, candidate: Candidate) -> tuple[float, float]:
    """What is minimised, then what decides between equals."""
    pair = candidate.seconds, most_bytes(candidate.ledger)
    return (pair[1], pair[0]) if request.objective == "memory" else pair
