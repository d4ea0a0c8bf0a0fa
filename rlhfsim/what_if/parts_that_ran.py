"""A plan of parts that have run, in place of a little faster one with a part that nobody has run yet."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhfsim.plan import Plan
from rlhfsim.search.candidates import value
from rlhfsim.search.options import Wish
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Scope
from rlhfsim.what_if.engine import Prices, Question, answer, variants
from rlhfsim.what_if.rivals import Rival

WORTH = 0.1
"""Share of the step, or bytes, that a part which was only written must save to be recommended."""
ONE_STAGE = Scope(
    wishes=(Wish(roles=frozenset({"rollout"}), holds=lambda role: role.layout.pp == 1),), rivals=False
)
"""Plans whose rollout is not pipelined."""


def of_parts_that_ran(request: Request, best: Rival, prices: Prices) -> Rival | None:
    """The best plan whose parts have run; None where `best` is one, or none comes within `WORTH` of it."""
    if not _only_written(request, best):
        return None
    limit, found = value(request, best.candidate) * (1 + WORTH), None
    for workload in variants(request):
        question = Question(request=replace(request, workload=workload), scope=ONE_STAGE)
        candidate = answer(question.scoped(below=math.nextafter(limit, math.inf)), prices).best
        if candidate is None:
            continue
        rival = Rival(workload=workload, candidate=candidate, gap=None)
        if not _only_written(request, rival):
            limit, found = value(request, candidate), rival
    return found


def _only_written(request: Request, rival: Rival) -> tuple[str, ...]:
    return only_written(request, plan_for(replace(request, workload=rival.workload), rival.candidate))


def only_written(request: Request, plan: Plan) -> tuple[str, ...]:
    """Parts of a plan that its framework has, and that nobody has run."""
    if request.runs is None:
        return ()
    known = request.runs.known(
        plan.placement, plan.workload, plan.topology, one_node=plan.replicas_in_one_node
    )
    return tuple(part for part, how in known.items() if how == "written only")
