"""What would meet targets that a design misses: single changes, each asked again before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhfsim.plan import Plan
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request, switched
from rlhfsim.search.requirements import Requirement, most_seconds, narrowed
from rlhfsim.search.scope import ALONE
from rlhfsim.what_if.engine import Change, Question, first_of_each, good, setting
from rlhfsim.what_if.remedies import LARGER, same_vendor
from rlhfsim.what_if.risk.odds import odds
from rlhfsim.what_if.risk.run import outlook
from rlhfsim.what_if.sizing import tokens_of
from rlhfsim.what_if.verdict import refusal

SWITCHES = ("rollout-logprobs", "fp8", "async")
"""Switches that are tried, what changes least of learning first; other weights (LoRA) are no answer."""
MORE = (2, 3, 4, 6, 8)
FEWER = (2, 4)
"""Times and parts of the GPUs that are tried: fewer of them may keep a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One change under which a good plan (not proven) fits and meets all targets."""

    change: str
    """As an option of `rlhfsim design`."""
    step_s: float
    usd_per_step: float | None
    probability: float
    """That it fits and meets all targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is asked of a plan."""

    requirements: tuple[Requirement, ...]
    steps: int | None
    confidence: float


def that_meet(request: Request, targets: Targets) -> tuple[Meeting, ...]:
    """The first change of each family (a switch, more GPUs, fewer, another GPU) that meets the targets.

    Where time is up, those that were found before.
    """
    return first_of_each(_families(request), lambda change: _meeting(request, change, targets))


def _families(request: Request) -> Iterator[Iterator[Change]]:
    for name in SWITCHES:
        if name not in request.switches | request.forbid and request.workload.generates:
            yield iter([_allowed(request, name)])
    group = request.cluster.node_group
    if len(request.cluster.node_groups) == 1:
        yield (_resized(group.gpus * times, request) for times in MORE)
        yield (_resized(group.gpus // part, request) for part in FEWER if group.gpus >= part)
        yield (
            setting(f"--gpu {g.profile.aliases[0]}", {"request.cluster.node_groups": (g,)})
            for g in same_vendor(group, LARGER)
        )


def _allowed(request: Request, name: str) -> Change:
    work = switched(request.workload, frozenset({name} - {"async"}))
    allow = {"request.allow": request.allow | {name}}
    only = {"request.architecture": "async"} if name == "async" else {"request.workload": work}
    return setting(f"--allow {name}", {**allow, **only})


def _resized(gpus: int, request: Request) -> Change:
    group = request.cluster.node_group
    per_node = group.profile.node.gpus if gpus > group.gpus else group.gpus_per_node
    return setting(f"--gpus {gpus}", {"request.cluster.node_groups": (group.sized(gpus, per_node),)})


def _meeting(request: Request, change: Change, targets: Targets) -> Meeting | None:
    there = narrowed(change.apply(Question(request=request)).request, targets.requirements)
    limit = most_seconds(there, targets.requirements, tokens_of(there.workload), targets.steps)
    plan = _good(there) if limit > 0 and refusal(there, suggest=False) is None else None
    if plan is None or plan.prediction.step_s > limit:
        return None
    look = outlook(plan, there.cluster, targets.steps, usd_per_hour=there.price)
    known, p = odds(targets.requirements, look, targets.confidence), plan.prediction
    if not known.meets:
        return None
    return Meeting(
        change=change.name, step_s=p.step_s, usd_per_step=p.usd_per_step, probability=known.together
    )


def _good(request: Request) -> Plan | None:
    question = Question(request=replace(request, time_limit=None), scope=ALONE)
    found = good(question)
    if found is None:
        return None
    return plan_of(found, request.workload, question.models, request.cluster, request.price)
