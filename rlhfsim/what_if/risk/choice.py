"""The plan, among those near the fastest, that most likely fits and meets every target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhfsim.search.requirements import Requirement
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.risk.odds import together
from rlhfsim.what_if.risk.run import outlook_for
from rlhfsim.what_if.work import work_of

NEAR = 0.1
"""Share of the fastest step by which a plan may be slower."""
CLEARLY = 0.01
"""Probability that another plan must add; else the simplest one stays."""


def chances(
    answer: Design, requirements: Sequence[Requirement], steps: int | None
) -> tuple[float, float] | None:
    """Probabilities that the chosen plan and that of the other side fit and meet all; None without either."""
    if answer.chosen is None or answer.other_side is None:
        return None
    mine, its = (outlook_for(answer.request, plan, steps) for plan in (answer.chosen, answer.other_side))
    return together(requirements, mine), together(requirements, its)


def likeliest(answer: Design, requirements: Sequence[Requirement], steps: int | None) -> Design:
    """The answer with the plan that most likely meets the targets, where one is clearly likelier."""
    if answer.chosen is None or answer.best is None or not requirements:
        return answer
    work, most = work_of(answer.best), answer.best.prediction.step_s * (1 + NEAR)
    near = [
        plan
        for plan in (answer.best, *answer.runners_up)
        if work_of(plan).same(work) and plan.prediction.step_s <= most
    ]
    likely = [
        together(requirements, outlook_for(answer.request, plan, steps)) for plan in (answer.chosen, *near)
    ]
    now, best = likely[0], max(likely)
    if best < now + CLEARLY:
        return answer
    chosen = near[likely.index(best) - 1]
    reason = (
        f"of the plans within {NEAR:.0%} of the fastest it most likely fits and meets what is asked: "
        f"{best:.0%}, the simplest one {now:.0%}"
    ).replace("%", " %")
    return replace(answer, chosen=chosen, reasons=(reason, *answer.reasons))
