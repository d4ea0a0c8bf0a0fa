"""The simplest plan close to the best one: what an operator would run.

Of all plans within `CLOSE` of the best (the shortest step, or the fewest bytes on a GPU where memory is the
objective) whose risk of running out of memory is at most `SAFE`, one of least `complexity`, and of those the
fastest. The question is asked again under one rule after the other, in the order of `complexity`: a rule that
some close plan obeys stays, one that none obeys goes. Of layouts and ZeRO stages only those that plans on the
way have are tried for all roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, combinations
from operator import and_, eq

from rlhfsim.elementwise import Size, where
from rlhfsim.frozen import frozen
from rlhfsim.search.candidates import Candidate, value
from rlhfsim.search.complexity import complexity, cut, moves, overlaps, piped, uneven, zero_stages
from rlhfsim.search.excluded import skeleton_of
from rlhfsim.search.options import Wish
from rlhfsim.search.pareto import SAFE
from rlhfsim.search.request import FP32_SUMS, Request, switched
from rlhfsim.search.role_rows import Condition, Roles
from rlhfsim.search.scope import ALONE
from rlhfsim.search.space import Partition
from rlhfsim.specs.placement.placement import Placement, RolloutPlacement
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.roles import FROZEN, GENERATING, MODELS, TRAINED
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.engine import Prices, Question, answer, good

BF16_SUMS = (32, 64, 128)
"""Micro-batches whose gradients may be summed in BF16: with 8 significant bits an addition rounds by up to
2^-9 of the sum, 6 % of what the 32nd of equal terms adds, all of it from the 256th on. The first that some
plan keeps is asked for. DeepSpeed 0.19 sums in the weights' precision (`get_data_types`) unless
`workload.gradients` is fp32 (`grad_accum_dtype`)."""
CLOSE = 0.03
"""Share of the least seconds, or bytes, that a simpler plan may cost: less than the error of the best
predictions."""
DEMANDING = (*reversed(TRAINED), *FROZEN, *GENERATING)
"""Roles in the order in which one is let be less simple: those that hold most first."""
FEATURE = "FP32 gradient sums"
"""Feature of a framework."""
RISKS = (SAFE, 0.02, 0.05)
"""Risks that are asked for, one after the other, until some close plan keeps it."""


# --- rules ------------------------------------------------------------------------------------------


@frozen
class Rule:
    """One more wish for simplicity."""

    partition: Callable[[Partition], bool] = lambda partition: True
    wish: Wish | None = None

    def obeyed(self, placement: Placement) -> bool:
        """Whether a plan has it already."""
        wish, partition = self.wish, skeleton_of(placement).partition
        held = (r for n, r in placement.roles.items() if wish is not None and n in wish.roles)
        return self.partition(partition) and all(wish is None or wish.holds(role) for role in held)

    def ask(self, question: Question) -> Question:
        """The question with it."""
        only, wishes = question.scope.only, question.scope.wishes
        return question.scoped(
            only=lambda partition: self.partition(partition) and (only is None or only(partition)),
            wishes=wishes if self.wish is None else (*wishes, self.wish),
        )


def _of(roles: Collection[str], simple: Condition) -> Rule:
    """Some roles are simple."""
    return Rule(wish=Wish(roles=frozenset(roles), holds=simple))


def _fewest(placement: Placement, complicated: Condition) -> Iterator[list[Rule]]:
    """As few complicated roles as can be: none, one, ..., those of the plan."""

    def simple(role: Roles) -> Size:
        return where(complicated(role), False, True)

    names = [name for name in DEMANDING if name in placement.roles]
    own = [name for name in names if complicated(placement.roles[name])]
    fewer = chain.from_iterable(combinations(names, count) for count in range(len(own)))
    yield [_of(set(names) - set(allowed), simple) for allowed in (*fewer, own)]


def _pools(placement: Placement) -> Iterator[list[Rule]]:
    def at_most(count: int) -> Rule:
        return Rule(partition=lambda p: len(p.groups) + overlaps(p.schedule) <= count)

    yield [*(at_most(count) for count in range(1, complexity(placement)[0] + 1)), Rule()]


def _meshes(placement: Placement) -> Iterator[list[Rule]]:
    """All roles are cut like one of them; where that is too much, as many as can be like the actor."""
    names = [name for name in MODELS if name in placement.roles]

    def like(mesh: Sequence[int]) -> Condition:
        return lambda role: reduce(and_, map(eq, cut(role), mesh))

    cuts = [cut(placement.roles[name]) for name in names]
    yield [_of(names, like(one)) for one in sorted(set(cuts), key=lambda one: -cuts.count(one))]
    as_actor = like(cuts[0])
    yield from ([_of([name], as_actor)] for name in names)


def _stages(placement: Placement) -> Iterator[list[Rule]]:
    """Trained roles share a ZeRO stage, that of one of them."""

    def at(stage: int) -> Rule:
        return _of(TRAINED, lambda role: role.layout.zero == stage)

    yield [at(stage) for stage in sorted(zero_stages(placement))]


def bf16_sums(request: Request, name: str, role: Roles) -> Size:
    """Micro-batches of a step whose gradients a role sums in BF16; 1 where it sums in FP32, or trains not."""
    on_cpus = all(group.profile.vendor == "cpu" for group in request.cluster.node_groups)
    fp32 = request.workload.gradients == "fp32" or request.trainer.gradient_bytes > 2
    if name not in TRAINED or on_cpus or fp32:
        return 1
    assert not isinstance(role, RolloutPlacement)
    return batch_lengths(request.workload).micro_batches(role.layout)


# --- the search -------------------------------------------------------------------------------------

LADDER: tuple[Callable[[Placement], Iterator[list[Rule]]], ...] = (
    _pools,
    lambda placement: _fewest(placement, piped),
    _meshes,
    _stages,
    lambda placement: _fewest(placement, moves),
    lambda placement: _fewest(placement, uneven),
)
"""Rules in the order of `complexity`: of each list the first that a close plan obeys."""


def simplest(best: Candidate, prices: Prices, *, at_most: float = math.inf) -> tuple[Candidate, Workload]:
    """The plan that is recommended, where `best` is that of the question of `prices`; often that one.

    With the workload that it is for: where `best` sums too many gradients in BF16, the best that sums in
    FP32, or fewer, takes its place, if any.

    `at_most`: the seconds that targets leave to it.
    """
    best, asked = _precise(best, prices, at_most)
    request = asked.request
    limit, seconds = value(request, best) * (1 + CLOSE), max(best.seconds, at_most)
    if request.objective == "memory":
        bytes_ = limit if request.max_memory is None else min(limit, request.max_memory)
        request = replace(request, objective="time", max_memory=bytes_)
    else:
        seconds = min(limit, seconds)
    for risk in sorted({min(risk, request.max_oom) for risk in (*RISKS, request.max_oom)}):
        narrower = replace(request, max_oom=risk)
        question = replace(asked, request=narrower).scoped(below=math.nextafter(seconds, math.inf))
        if plan := _simplified(best, question, prices.again(narrower)):
            return plan, request.workload
    return best, request.workload


def _sums_at_most(most: int, request: Request) -> Rule:
    return _of(TRAINED, lambda role: bf16_sums(request, "actor", role) <= most)


def _precise(best: Candidate, prices: Prices, at_most: float) -> tuple[Candidate, Question]:
    """The best plan that sums few gradients in BF16 or all in FP32, and the question about such plans.

    A safe one where that is not `best`.
    """
    request = prices.request
    anything = Question(request=request, scope=ALONE)
    few = _sums_at_most(BF16_SUMS[0], request)
    if few.obeyed(best.placement):
        return best, few.ask(anything)
    most = math.inf if request.objective == "memory" else math.nextafter(at_most, math.inf)
    in_time = anything.scoped(below=most)
    precise = _with_few_sums(best, in_time, prices)
    exact = _in_fp32(in_time)
    if precise and exact:
        exact = exact.scoped(below=min(most, value(request, precise[0])))
    if exact and (plan := _safe(exact, prices)):
        precise = plan, exact.scoped(below=math.inf)
    return precise if precise and precise[0].seconds <= max(best.seconds, at_most) else (best, anything)


def _with_few_sums(best: Candidate, in_time: Question, prices: Prices) -> tuple[Candidate, Question] | None:
    """The best plan that keeps to the first of `BF16_SUMS` that one can keep to."""
    for most in BF16_SUMS:
        rule = _sums_at_most(most, in_time.request)
        if rule.obeyed(best.placement):
            return best, rule.ask(in_time.scoped(below=math.inf))
        if (plan := _safe(rule.ask(in_time), prices)) is not None:
            return plan, rule.ask(in_time.scoped(below=math.inf))
    return None


def _in_fp32(question: Question) -> Question | None:
    """The same question with FP32 sums; None where the framework has none."""
    request = question.request
    runs = request.runs is None or FEATURE in request.runs.features
    if not runs or request.workload.gradients != "backend":
        return None
    return replace(question, request=replace(request, workload=switched(request.workload, {FP32_SUMS})))


def _safe(question: Question, prices: Prices) -> Candidate | None:
    """The best plan of a question that is safe; where none is, the best."""
    request = question.request
    safe = replace(question, request=replace(request, max_oom=min(SAFE, request.max_oom)))
    return answer(safe, prices).best or answer(question, prices).best


def _simplified(best: Candidate, question: Question, prices: Prices) -> Candidate | None:
    """The simplest plan of a question; None where it has none."""
    safe = best.ledger.probability_out_of_memory <= question.request.max_oom
    plan = best if safe else None
    for ladder in LADDER:
        for rules in ladder((plan or best).placement):
            plan, question = _obeying(rules, plan, question, prices)
        if plan is None:
            return None
    return answer(question, prices).best or plan


def _obeying(
    rules: Sequence[Rule], plan: Candidate | None, question: Question, prices: Prices
) -> tuple[Candidate | None, Question]:
    """A plan that obeys the first of the rules that one can obey, and the question with that rule."""
    for rule in rules:
        narrower = rule.ask(question)
        if plan is not None and rule.obeyed(plan.placement):
            return plan, narrower
        if (other := good(narrower, prices)) is not None:
            return other, narrower
    return plan, question
