"""What `rlhfsim estimate` shows: the verdict, then header, figures, phases, placement, sureness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present.known import known, nearest_short
from rlhfsim.present.sampling import sampling
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.console import Part, console, labelled, styled
from rlhfsim.present.terminal.first_screen import wants
from rlhfsim.present.terminal.memory import memory_chart
from rlhfsim.present.terminal.odds import asked_data, summary, targets
from rlhfsim.search.requirements import verdicts_of
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.planned import Planned
from rlhfsim.what_if.risk.odds import Odds

SCHEMA = "rlhfsim.estimate/1"


def as_data(answer: Planned, odds: Odds | None = None) -> dict[str, Any]:
    """The same content; the plan in the schema of plan.json (docs/plan.md)."""
    plan = answer.plan.to_dict() if answer.plan else None
    return {
        "schema": SCHEMA,
        "verdict": sentences(answer.plan) if answer.plan else None,
        **verdict_data(answer),
        "notes": [*answer.notes, *answer.far],
        **asked_data(odds),
        "plan": plan,
    }


def verdict_data(answer: Planned) -> dict[str, Any]:
    """Whether the plan can run, what does not fit, and what would."""
    return {
        "fits": answer.fits,
        "rejected_by": answer.rejected_by,
        "remedy": answer.remedy,
        "notes": list(answer.notes),
    }


def report(answer: Planned, detail: frozenset[str] = frozenset()) -> Iterator[Part]:
    """The verdict and the priced plan; what `detail` names below."""
    yield from verdict(answer)
    if (plan := answer.plan) is None:
        return
    width = console().width
    yield from (styled(f"note: {note}", style="yellow") for note in answer.far)
    yield styled(sentences(plan))
    yield styled(view.task(plan), style="bold")
    yield view.batch(plan)
    yield labelled({**_verdict(plan), **({"odds": summary(plan.run)} if plan.run else {})})
    if verdicts_of(plan):
        yield targets(plan)
    timed = first.phases(plan, width, starts=wants(detail, "time"))
    yield from ("", first.roles(plan, width), "", timed)
    if not detail:
        yield labelled({"more": "--detail time,memory,sure,all"})
    if wants(detail, "memory"):
        yield from ("", memory_chart(plan, width))
    if wants(detail, "sure"):
        yield from ("", labelled(known(plan)), view.sureness(plan, width))


def _verdict(plan: Plan) -> dict[str, str]:
    near = {} if plan.nearest is None else {"measured": nearest_short(plan.nearest)}
    kernels = {name: text for name, text in known(plan).items() if name == "kernels"}
    return {**first.verdict(plan), **sampling(plan), **kernels, **near}


def remedy_text(remedy: str | None) -> str:
    """The smallest change that fits, or that none was met."""
    return f"smallest change that fits: {remedy}" if remedy else "no single change that was tried helps"


def verdict(answer: Planned) -> Iterator[Part]:
    """Notes, and what does not fit with its remedy."""
    yield from (styled(f"note: {note}", style="yellow") for note in answer.notes)
    if answer.fits:
        return
    yield styled(f"does not fit: {answer.rejected_by}", style="bold red")
    yield styled(remedy_text(answer.remedy), style="bold")
    if answer.plan is not None:
        yield styled("the plan, priced all the same:\n", style="dim")
