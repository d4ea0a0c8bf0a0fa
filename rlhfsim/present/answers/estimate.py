"""What `rlhfsim estimate` answers: the verdict, then header, figures, phases, placement, sureness."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present import plan_words
from rlhfsim.present.answers import plan_blocks as blocks
from rlhfsim.present.answers.odds import asked_data, told
from rlhfsim.present.answers.roles import roles
from rlhfsim.present.answers.tree import Block, FactList, Note, Page, answer
from rlhfsim.present.known import known, nearest_short, sampling
from rlhfsim.search.requirements import verdicts_of
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.estimate import Planned
from rlhfsim.what_if.risk.odds import Odds


def page(planned: Planned, odds: Odds | None = None, detail: Collection[str] = ()) -> Page:
    """The verdict and the priced plan, with what `detail` names; the plan in JSON as in plan.json."""
    plan = planned.plan
    shown = _plan(plan, planned.far, detail) if plan else ()
    return answer("rlhfsim.estimate/1", *blocks.verdict(planned), *shown, data=partial(_data, planned, odds))


def _data(planned: Planned, odds: Odds | None) -> dict[str, Any]:
    plan = planned.plan
    return {
        "verdict": sentences(plan) if plan else None,
        **blocks.verdict_data(planned),
        "notes": [*planned.notes, *planned.far],
        **asked_data(odds),
        "plan": plan.to_dict() if plan else None,
    }


def _plan(plan: Plan, far: Sequence[str], detail: Collection[str]) -> Iterator[Block]:
    yield from blocks.notes(far)
    yield Note(sentences(plan))
    yield Note(plan_words.task(plan), "strong")
    yield Note(plan_words.batch(plan))
    yield FactList(_verdict(plan) | told(plan))
    if verdicts_of(plan):
        yield blocks.targets(plan)
    yield roles(plan)
    yield blocks.phases(plan, starts=blocks.wants(detail, "time"))
    if not detail:
        yield FactList({"more": "--detail time,memory,sure,all"})
    if blocks.wants(detail, "memory"):
        yield from blocks.memory(plan)
    if blocks.wants(detail, "sure"):
        yield FactList(known(plan), apart=True)
        yield blocks.sureness(plan)


def _verdict(plan: Plan) -> dict[str, str]:
    near = {} if plan.nearest is None else {"measured": nearest_short(plan.nearest)}
    kernels = {name: text for name, text in known(plan).items() if name == "kernels"}
    return {**plan_words.verdict(plan), **sampling(plan), **kernels, **near}
