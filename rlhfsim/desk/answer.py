"""A question's answer in three stages: a first plan, the proven one, and the best of other sizes.

first    the search ends after `FIRST_S`; what it met by then is simulated, but not proven
proven   what `rlhfsim design` answers
sized    the same, and the best plans of other numbers of GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.present.basis import basis
from rlhfsim.present.words import seconds
from rlhfsim.search import clock
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import CONFIDENCE, Requirement
from rlhfsim.what_if.design import Design, design
from rlhfsim.what_if.risk.odds import asked_run, odds
from rlhfsim.what_if.risk.run import outlook_for
from rlhfsim.what_if.sizing import NO_SIZES, Sizes, other_sizes

FIRST_S = 0.1
"""Longest proof of the first stage; bounds and the warm start come before it."""
SIZES_S = 20.0
"""Longest search of other numbers of GPUs."""
Stage = Literal["first", "proven", "complete", "failed", "died"]
FINAL = ("complete", "failed", "died")
"""Stages after which nothing follows by itself."""


class DeskQuestion(NamedTuple):
    """A question that was read."""

    request: Request
    """Without plans that miss a target on memory, risk or staleness."""
    designed: Callable[[bool], Design]
    """The answer of `rlhfsim design`, with or without its explanations."""
    targets: tuple[Requirement, ...] = ()
    steps: int | None = None
    """Steps of the whole run."""
    confidence: float = CONFIDENCE
    """Probability with which it must fit and meet all targets in one."""


ReadQuestion = Callable[[], DeskQuestion]
"""Reads a question anew: it says who runs its plans, which takes a search."""


@frozen
class Answer:
    """What is known about a question so far."""

    stage: Stage
    plan: Plan | None = None
    """With the run that was asked for, whose odds come once it is proven; None: nothing fits, or the question
    cannot be answered."""
    missing: tuple[str, ...] = ()
    """Where there is no plan: what is missing, and what would mend that; where the search died: why."""
    sizes: Sizes = NO_SIZES


def first(read: ReadQuestion) -> Answer:
    """The best plan that a short search meets; who leads at its size is looked for as shortly."""
    with clock.within(FIRST_S):
        asked = read()
    short = replace(asked.request, time_limit=min(FIRST_S, asked.request.time_limit or FIRST_S))
    return _answer(asked, design(short, explain=False, rivals=False, simplest_s=None), "first")


def proven(read: ReadQuestion) -> Answer:
    """The plan of `rlhfsim design`."""
    asked = read()
    return _answer(asked, asked.designed(False), "proven")


def complete(read: ReadQuestion) -> Answer:
    """The whole answer of `rlhfsim design`, and the best plans of other numbers of GPUs."""
    asked = read()
    answer = _answer(asked, asked.designed(True), "complete")
    if answer.plan is None:
        return answer
    return replace(answer, sizes=other_sizes(answer.plan, basis(answer.plan).cluster, limit_s=SIZES_S))


def failed(error: RlhfsimError) -> Answer:
    """Why a question has no answer."""
    return Answer(stage="failed", missing=tuple(filter(None, (error.message, error.help))))


def died(how: str, known: Answer | None = None) -> Answer:
    """What is left of a question whose search died; `known`: what came before."""
    return replace(known or Answer(stage="died"), stage="died", missing=(how,))


def _answer(asked: DeskQuestion, answer: Design, stage: Stage) -> Answer:
    plan = answer.told
    if plan is None:
        return Answer(stage=stage, missing=tuple(_missing(answer)))
    known = None
    if stage != "first" and (asked.targets or asked.steps):
        known = odds(asked.targets, outlook_for(answer.request, plan, asked.steps), asked.confidence)
    return Answer(stage=stage, plan=replace(plan, run=asked_run(asked.targets, asked.steps, known)))


def _missing(answer: Design) -> Iterator[str]:
    """What is missing, and each change that would mend it."""
    if answer.rejected_by:
        yield answer.rejected_by
    for remedy in answer.remedies:
        other = ", which is other work" if remedy.other_work else ""
        yield f"{remedy.change}: it fits, and a step takes {seconds(remedy.step_s)}{other}"
