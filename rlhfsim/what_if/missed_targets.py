"""What would meet targets that a design misses: single changes, each asked again before it is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request, switched
from rlhfsim.search.requirements import narrowed
from rlhfsim.search.scope import ALONE
from rlhfsim.what_if.engine import Question, good
from rlhfsim.what_if.points import Change, asking, first_of_each, on_gpus, on_larger, points
from rlhfsim.what_if.risk.odds import Odds, Targets
from rlhfsim.what_if.verdict import refusal

SWITCHES = ("rollout-logprobs", "fp8", "async")
"""Switches that are tried, what changes least of learning first; other weights (LoRA) are no answer."""
MORE = (2, 3, 4, 6, 8)
FEWER = (2, 4)
"""Times and parts of the GPUs that are tried: fewer of them may keep a budget."""


@frozen
class Meeting:
    """One change under which a good plan (not proven) fits and meets all targets."""

    change: str
    """As an option of `rlhfsim design`."""
    step_s: float
    usd_per_step: float | None
    probability: float
    """That it fits and meets all targets."""


def that_meet(request: Request, targets: Targets) -> tuple[Meeting, ...]:
    """The first change of each family (a switch, more GPUs, fewer, another GPU) that meets the targets.

    Where time is up, those that were found before.
    """
    question = Question(request=request)
    return first_of_each(_meetings(question, family, targets) for family in _families(request))


def _families(request: Request) -> Iterator[Iterator[Change]]:
    for name in SWITCHES:
        if name not in request.switches | request.forbid and request.workload.generates:
            yield iter([_allowed(request, name)])
    group = request.cluster.node_group
    if len(request.cluster.node_groups) == 1:
        yield on_gpus(request, (group.gpus * times for times in MORE))
        yield on_gpus(request, (group.gpus // part for part in FEWER if group.gpus >= part))
        yield on_larger(request)


def _allowed(request: Request, name: str) -> Change:
    stale = {"architecture": "async"}
    only = stale if name == "async" else {"workload": switched(request.workload, {name})}
    return asking(f"--allow {name}", allow=request.allow | {name}, **only)


def _meetings(question: Question, family: Iterable[Change], targets: Targets) -> Iterator[Meeting]:
    """The changes of a family that meet the targets."""

    def planned(asked: Question) -> tuple[Plan, Odds] | None:
        there = narrowed(asked.request, targets.requirements)
        limit = targets.most_s(there)
        if limit <= 0 or refusal(there, suggest=False) is not None:
            return None
        found = good(replace(asked, request=replace(there, time_limit=None), scope=ALONE))
        if found is None or found.seconds > limit:
            return None
        plan = plan_for(there, found)
        known = targets.odds(there, plan)
        return (plan, known) if known.meets else None

    for point in points(question, family, planned):
        plan, known = point.answer
        p = plan.prediction
        yield Meeting(
            change=point.name, step_s=p.step_s, usd_per_step=p.usd_per_step, probability=known.together
        )
