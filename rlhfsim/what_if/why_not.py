"""Why not something else: the best plan under a choice that the user names, and what makes the difference.

The alternative is searched as exactly as the answer itself, with the choice as one more constraint;
roles that the choice leaves alone keep their prices. Where nothing fits, the search is repeated on
GPUs (and hosts) with ever more memory until something does, and the ledger of that plan on the real
GPUs names the byte that is in the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import Ledger
from rlhfsim.plan import Plan
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.candidates import Candidate, risk, value
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.excluded import Exclusion, why_excluded
from rlhfsim.search.explain import Term, terms
from rlhfsim.search.planning import plan_for
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import STALE, SWITCHES, Limit, Request, limited, switched
from rlhfsim.search.space import Partition
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.what_if.engine import Prices, Question, answers, good
from rlhfsim.what_if.estimate import memory_of
from rlhfsim.what_if.points import Line, asking, edge, geometric, with_memory
from rlhfsim.what_if.verdict import refusal, rules_broken

ROOMIER = (1.3, 2.0, 4.0, 16.0)
"""Factors of memory at which the nearest plan is looked for."""
EMPTY = Certificate(space=0, infeasible=0, dominated=0, bounded=0, simulated=0)
NARROWING = 3
"""Halvings between the last that did not suffice and the first that did."""
FORBID_PREFIX = "no-"
ROLES = ("colocated", "split", "standalone")


@frozen
class Alternative:
    """A choice, or a plan, that is compared with the answer."""

    text: str
    """As the user names it."""
    question: Question
    """The question with this choice made, or with that plan."""
    roles: tuple[str, ...] = ()
    """The roles that it is about."""
    exact: bool = False
    """Whether it names a plan, in part or in full: what excluded exactly that plan is told too."""
    refused: str | None = None
    """The rule that it breaks whatever else is chosen; None: none is known."""


@frozen
class WhyNot:
    """An alternative against the answer."""

    choice: str
    plan: Plan | None = None
    """The best plan with this choice; None when nothing fits."""
    same: bool = False
    """Whether that is the answer itself."""
    terms: tuple[Term, ...] = ()
    """Seconds by call of the answer and of this plan, the largest difference first."""
    certificate: Certificate
    missing: Ledger | None = None
    """Where nothing fits: that of the nearest plan, as far as GPUs lack bytes."""
    reason: str | None = None
    """Where nothing fits, in words."""
    given: bool = False
    """Whether the plan was named in full rather than searched."""
    exclusion: Exclusion | None = None
    """What excluded exactly this plan, where that was asked."""


# --- the choice as a question -----------------------------------------------------------------------


def alternative(request: Request, text: str, choice: str | Limit) -> Alternative:
    """The question under one choice: a limit on a role, an architecture, a path, a switch, ...

    Raises:
        RlhfsimError: the choice contradicts the workload.
    """
    if isinstance(choice, str):
        return Alternative(text=text, question=_chosen(request, choice))
    return Alternative(text=text, question=Question(request=limited(request, choice)), roles=(choice.role,))


def named_plan(request: Request, text: str, names: Sequence[str], limits: Sequence[Limit]) -> Alternative:
    """The question whose plans have all these choices and limits: what they leave open is chosen.

    Raises:
        RlhfsimError: a choice contradicts the workload.
    """
    chosen: list[Question] = []
    for name in names:
        chosen.append(_chosen(request, name))
        request = chosen[-1].request
    for limit in limits:
        request = limited(request, limit)
    only = [question.scope.only for question in chosen if question.scope.only is not None]
    question = Question(request=request).scoped(only=lambda partition: all(has(partition) for has in only))
    roles = tuple(dict.fromkeys(limit.role for limit in limits))
    return Alternative(text=text, question=question, roles=roles, exact=True)


def _chosen(request: Request, name: str) -> Question:
    changed: dict[str, Any] = {"forbid": request.forbid - {name}}
    only: list[Callable[[Partition], bool]] = []
    if name in STALE:
        changed |= {"allow": request.allow | {name}, "architecture": name}
    elif name in SWITCHES:
        work = switched(request.workload, {name})
        changed |= {"allow": request.allow | {name}, "workload": work}
    elif name in ("naive", "smart", "hybrid", "disaggregated"):
        changed |= {"architecture": name, "weight_path": None}
    elif name in ROLES:
        only.append(lambda partition: partition.role_placement == name)
    elif name == "streaming":
        changed["architecture"] = None
        only.append(lambda partition: partition.schedule.streaming)
    elif name in BACKENDS:
        changed = {"backend": name, "framework": None, "fix": {}, "limits": request.hardware_limits}
    elif name.startswith(FORBID_PREFIX):
        changed = {"forbid": request.forbid | {name.removeprefix(FORBID_PREFIX)}}
    elif name == "lora" and request.workload.lora is None:
        raise RlhfsimError(
            "missing-lora",
            "weight path lora moves adapters only, and no adapters are trained",
            help="--why-not lora compares training adapters",
        )
    else:
        changed |= {"architecture": None, "weight_path": name}
    question = Question(request=replace(request, **changed))
    return question.scoped(only=only[0]) if only else question


# --- the answer -------------------------------------------------------------------------------------


def why_not(alternative: Alternative, chosen: Plan, best: Candidate, prices: Prices) -> WhyNot:
    """The best plan of an alternative against the chosen plan, `best`, of the question of `prices`."""
    question = alternative.question
    if alternative.refused:
        return _refused(alternative, EMPTY, alternative.refused)
    if question.placement is not None:
        return _given(alternative, chosen, best, prices)
    searches = list(answers(question, prices))
    certificate = reduce(Certificate.plus, (result.certificate for _, result in searches))
    plans = [(workload, result.best) for workload, result in searches if result.best is not None]
    if not plans:
        return _nothing(alternative, searches[0][1], certificate, best, prices)
    workload, its = min(plans, key=lambda plan: value(question.request, plan[1]))
    asked = replace(alternative, question=asking(workload=workload).apply(question))
    other = _compared(asked, chosen, its, certificate)
    if not alternative.exact:
        return other
    return replace(other, exclusion=_exclusion(asked.question, its.placement, best, prices))


def _compared(alternative: Alternative, chosen: Plan, best: Candidate, certificate: Certificate) -> WhyNot:
    plan = plan_for(alternative.question.request, best)
    return WhyNot(
        choice=alternative.text,
        plan=plan,
        same=plan.input_hash == chosen.input_hash,
        terms=tuple(terms(chosen, plan)),
        certificate=certificate,
    )


def _exclusion(question: Question, placement: Placement, best: Candidate, prices: Prices) -> Exclusion:
    """What excluded one complete plan from the question that was answered."""
    request = replace(prices.request, workload=question.request.workload)
    return why_excluded(request, question.models, placement, best, prices.kept(request))


def _given(alternative: Alternative, chosen: Plan, best: Candidate, prices: Prices) -> WhyNot:
    """One complete plan against the answer, and what excluded it."""
    question, placement = alternative.question, alternative.question.placement
    assert placement is not None
    exclusion = _exclusion(question, placement, best, prices)
    fates = ("infeasible", "dominated", "bounded", "simulated")
    kinds = ("does_not_fit", "dominated", "bounded", ("slower", "chosen"))
    counts = {fate: int(exclusion.kind in kind) for fate, kind in zip(fates, kinds, strict=True)}
    certificate = Certificate(space=sum(counts.values()), **counts)
    candidate = None if exclusion.kind in ("refused", "does_not_fit") else good(question)
    if candidate is not None:
        return replace(
            _compared(alternative, chosen, candidate, certificate), given=True, exclusion=exclusion
        )
    unfit = exclusion.kind == "does_not_fit"
    return WhyNot(
        choice=alternative.text,
        certificate=certificate,
        given=True,
        exclusion=exclusion,
        reason=exclusion.text,
        missing=missing(_memory(question, placement)) if unfit else None,
    )


def _memory(question: Question, placement: Placement) -> Ledger:
    return memory_of(placement, question.request.workload, question.request.cluster)


def _refused(alternative: Alternative, certificate: Certificate, rule: str) -> WhyNot:
    exclusion = Exclusion(kind="refused", text=rule) if alternative.exact else None
    reason = f"no plan of the space has it: {rule}"
    return WhyNot(choice=alternative.text, certificate=certificate, reason=reason, exclusion=exclusion)


def _refusal(alternative: Alternative, pricer: Pricer) -> str:
    """Why no plan has a choice: the rule that drops most layouts of the first role left without any."""
    if (rule := next(rules_broken(alternative.question.request), None)) is not None:
        return rule
    for role in alternative.roles:
        tables = pricer.tables(role)
        if len(alternative.roles) > 1 and any(map(len, tables)):
            continue
        counts = sum((t.refused for t in tables), Counter[str]())
        if alternative.question.request.fix.get(role) and counts:
            return counts.most_common(1)[0][0]
        return f"no layout of the {role} on these GPUs is like that"
    error = refusal(alternative.question.request)
    return f"{error.message}; {error.help}" if error else "no way to share these GPUs allows it"


def _nothing(
    alternative: Alternative, result: SearchResult, certificate: Certificate, best: Candidate, prices: Prices
) -> WhyNot:
    """Where nothing fits: the rule that refuses the choice, or what the nearest plan lacks."""
    question = alternative.question
    if not certificate.space:
        return _refused(alternative, certificate, _refusal(alternative, result.pricer))
    if (rule := next(rules_broken(question.request), None)) is not None:
        return _refused(alternative, certificate, rule)
    empty = WhyNot(choice=alternative.text, certificate=certificate)
    near = nearest(question)
    if near is None:
        return replace(empty, reason=f"nothing fits, not even with {ROOMIER[-1]:g} times the memory")
    memory = _memory(question, near)
    return replace(
        empty,
        missing=missing(memory),
        reason=memory.rejected_by or risk(question.request, memory),
        exclusion=_exclusion(question, near, best, prices) if alternative.exact else None,
    )


def nearest(question: Question) -> Placement | None:
    """A plan that fits with about the least more memory; None where `ROOMIER` does not suffice."""

    def roomy(factor: float) -> Placement | None:
        cluster = with_memory(question.request.cluster, factor, hosts=True)
        plan = good(asking(cluster=cluster, max_memory=None).apply(question))
        return plan.placement if plan else None

    line = Line(roomy)
    for low, high in pairwise((1.0, *ROOMIER)):
        if line.at(high):
            return line.at(edge(low, high, lambda factor: bool(line.at(factor)), geometric, NARROWING))
    return None


def missing(memory: Ledger) -> Ledger | None:
    """The ledger whose fullest phase exceeds a GPU; None where it is the host, engine or risk."""
    return memory if memory.peak.bytes > memory.peak.capacity else None
