"""An answer as the page shows it: verdict, plan, time, memory, money, what differs, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from dash import html

from rlhfsim.desk.answer import FINAL, Answer
from rlhfsim.desk.blocks import Component, block, spoken, status, tiles, verdict_line
from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.answers.tree import Block, Changed, Code, Listing, Mark
from rlhfsim.present.basis import basis
from rlhfsim.present.changes import changed_line, figure_line, folded, mark
from rlhfsim.present.changes import summary as sentence
from rlhfsim.present.figures import choice as figures_choice
from rlhfsim.present.figures import iteration as figures_iteration
from rlhfsim.present.figures.picture import picture
from rlhfsim.present.pages.headline import mark as mark_of_plan
from rlhfsim.present.pages.headline import subtitle
from rlhfsim.present.pages.headline import tiles as tiles_of
from rlhfsim.search.requirements import Verdict, meets_all, shown, verdicts_of
from rlhfsim.verdict import verdict
from rlhfsim.what_if.differences import Side, diff, predicted

AT = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
"""Relation of a target in words."""


def answer_view(answer: Answer | None, command: str, base: Answer | None, *, pinned: bool) -> list[Component]:
    """Everything below the state of the search; `command` gives the same answer."""
    if answer is None:
        return []
    if answer.plan is None:
        title = "Why" if answer.stage == "failed" else "Nothing fits"
        why = Listing(tuple(map(words.capital, answer.missing)), title, mark="bad")
        return [block(why)] if answer.missing and answer.stage != "died" else []
    parts = [headline(answer.plan), tiles(tiles_of(answer.plan)), *targets(answer.plan)]
    if pinned:
        first, *more = map(block, against(base, answer))
        parts += [first, *(html.Details([html.Summary("What else differs"), item]) for item in more)]
    figures = [html.Div(block(item), className="card") for item in figures_of(answer)]
    reasons = [block(item) for item in _reasons(answer)]
    again = block(Code("The same answer in plan.json", command))
    return [*parts, html.Div(figures, className="cards"), *reasons, again]


# --- how far the search is --------------------------------------------------------------------------


def progress(answer: Answer | None, searching_s: float) -> list[Component]:
    """The state of the search, how long it has run while it does, and a button where it died."""
    shown = [status("Searching: no plan is found yet.", "busy") if answer is None else state_of(answer)]
    if answer is None or answer.stage not in FINAL:
        elapsed = f"asked {words.plural(int(searching_s), 'second')} ago"
        shown.append(html.Small(elapsed, className="elapsed", **spoken(hidden="true")))
    elif answer.stage == "died":
        shown.append(html.Button("Search again", id={"retry": "now"}))
    return shown


def state_of(answer: Answer) -> Component:
    """Whether the answer is proven, and what is still being worked out."""
    if answer.stage == "died":
        left = "; the plan below is not proven" if answer.plan else ""
        return status(f"The search died: {'; '.join(answer.missing)}{left}.", "bad")
    if answer.stage == "failed":
        return status("This question has no answer.", "bad")
    searched = answer.plan.choice.certificate if answer.plan and answer.plan.choice else None
    if answer.stage == "first":
        left = (
            f": a plan could be up to {words.percent(searched.gap)} faster"
            if searched and searched.gap > 0
            else ""
        )
        return status(f"First answer, not yet proven{left}. The proof is running.", "busy")
    if searched is None:
        return status("Proven: nothing fits.", "bad")
    more = " Reasons and other numbers of GPUs follow." if answer.stage == "proven" else ""
    if searched.unexplored:
        left = f"{words.percent(searched.gap)} could be left.{more}"
        return status(f"Not proven: the time limit ended the search; {left}", "warn")
    return status(f"Proven: none of {words.count(searched.space)} possible plans is better.{more}", "good")


def headline(plan: Plan) -> Component:
    """The verdict in a sentence."""
    line = verdict_line(verdict(plan), mark_of_plan(plan))
    return html.Div([line, html.P(subtitle(plan), className="subtitle")], className="headline")


def targets(plan: Plan) -> Iterator[Component]:
    """Every target: met or missed, how likely, and what the plan reaches."""
    judged = verdicts_of(plan)
    if not judged:
        return
    met = meets_all(plan)
    title, kind = ("Every target is met", "good") if met else ("A target is missed", "bad")
    yield block(Listing(tuple(map(_target, judged)), title, mark=cast(Mark, kind)))


def _target(v: Verdict) -> str:
    likely = "" if v.probability is None else f"; met with a probability of {words.likely(v.probability)}"
    kept = "Met" if v.met else "Missed"
    asked = v.requirement
    quantity, limit = asked.quantity.replace("_", " "), shown(asked, asked.value)
    reached = shown(asked, v.actual)
    return f"{kept}: {quantity} {AT[asked.relation]} {limit}; it is {reached}{likely}"


# --- figures ----------------------------------------------------------------------------------------


def figures_of(answer: Answer) -> Iterator[Block]:
    """Plan, time by phase, what binds, memory, and time against money."""
    plan = answer.plan
    assert plan is not None
    yield picture(plan)
    yield figures_iteration.timeline(plan)
    yield figures_iteration.resources(plan)
    yield from figures_iteration.memory(basis(plan))
    yield figures_choice.pareto(plan, answer.sizes)


def _reasons(answer: Answer) -> Iterator[Block]:
    choice = answer.plan.choice if answer.plan else None
    if choice and choice.reasons:
        reasons = tuple(words.capital(words.called(r)) for r in choice.reasons)
        yield Listing(reasons, "Why this plan")
    if answer.sizes.notes:
        yield Listing(answer.sizes.notes, "Other numbers of GPUs")


# --- against the pinned answer ----------------------------------------------------------------------


def against(base: Answer | None, answer: Answer) -> list[Block]:
    """What differs from the pinned answer: in a sentence, what was asked, then the rest."""
    title = "Against the pinned question"
    if base is None or base.plan is None or answer.plan is None:
        text = "its answer is being searched" if base is None else "nothing fits there"
        return [Changed(title, (("", text),))]
    plans = {"pinned": base.plan, "now": answer.plan}
    found = diff(*(Side(title=t, plan=p, outcome=predicted(p), measured=False) for t, p in plans.items()))
    if found.empty:
        return [Changed(title, (("", "nothing differs"),))]
    moved = ((mark(x.before, x.after), figure_line(x, words.call(x.name))) for x in found.outcome)
    rest = *map(changed_line, folded(found.choice)), *moved
    more = [Changed("Plan and outcome", rest)] if rest else []
    return [
        Changed(
            f"Against the pinned question: {sentence(found)}",
            tuple(map(changed_line, folded(found.question))),
        ),
        *more,
    ]
