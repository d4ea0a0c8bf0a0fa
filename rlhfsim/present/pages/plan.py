"""The page of a plan: verdict, picture, time, memory, candidates, reasons, doubts, assumptions, commands."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.choice import Choice
from rlhfsim.plan import Plan
from rlhfsim.present import assumptions as assumed
from rlhfsim.present import findings, reproduce, words
from rlhfsim.present.answers.tree import Block, Listing, Page, PageSection, TypedTable, pairs, section
from rlhfsim.present.basis import Basis, basis
from rlhfsim.present.figures import choice as figures_choice
from rlhfsim.present.figures import iteration as figures_iteration
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures.picture import picture
from rlhfsim.present.known import known, sampling
from rlhfsim.present.pages.headline import heading, mark, subtitle, tiles
from rlhfsim.search.explain import best_name
from rlhfsim.search.request import STALE
from rlhfsim.verdict import verdict
from rlhfsim.what_if.simplest import CLOSE
from rlhfsim.what_if.sizing import NO_SIZES, Sizes

GIVEN = (
    "This plan was given, not searched: nothing says that it is the best one. "
    "rlhfsim design searches and writes why."
)


def plan_page(
    plan: Plan, *, file: str = "plan.json", title: str | None = None, sizes: Sizes = NO_SIZES
) -> Page:
    """The page of one plan."""
    known = basis(plan)
    return Page(
        title=title or heading(plan),
        subtitle=subtitle(plan),
        verdict=verdict(plan),
        mark=mark(plan),
        sure=tuple(_sure(plan)),
        tiles=tuple(tiles(plan)),
        sections=tuple(sections(known, sizes, file)),
        version=plan.rlhfsim_version,
    )


# --- the verdict ------------------------------------------------------------------------------------


def _sure(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    yield (
        f"8 in 10 that a step takes between {words.seconds(p.low_s)} and {words.seconds(p.high_s)} "
        "(P10 to P90 of everything the time rests on)."
    )
    yield from (f"{text[0].upper()}{text[1:]}." for text in {**sampling(plan), **known(plan)}.values())
    if plan.choice is None:
        yield GIVEN
    else:
        yield from _chosen(plan.choice)
    count, error = figures_trust.scored()
    yield (
        f"Published RLHF steps were predicted with a median error of {words.percent(error)}, "
        f"none of them used for fitting ({count} steps)."
    )


def _chosen(choice: Choice) -> Iterator[str]:
    c = choice.certificate
    aim = "needs less memory" if choice.asked.objective == "memory" else "is predicted to be faster"
    name = "This plan"
    if choice.best is not None:
        best = best_name(choice.asked.objective)
        name = words.capital(best)
        aim += f" than {best}; this one is the simplest within {words.percent(CLOSE)} of it, or of "
        aim += f"{best} that does not sum too many gradients in BF16"
    if c.unexplored:
        yield (
            f"The search ended before its proof: {words.count(c.unexplored)} of {words.count(c.space)} plans "
            f"were not looked at, and one of them could be up to {c.gap:.1%} shorter."
        )
    else:
        up_to = "; among asynchronous plans up to dominance by bounds, not by simulated steps"
        limit = up_to if STALE.intersection(choice.asked.allow) else ""
        yield f"Proven: none of {words.count(c.space)} possible plans {aim}{limit}."
    if choice.confidence is not None and choice.runners_up and choice.asked.objective != "memory":
        yield (
            f"{name} is {words.likely(choice.confidence)} likely to be really faster than the next kind "
            f"of plan ({choice.runners_up[0].label}), given the doubts that the two do not share."
        )


# --- sections ---------------------------------------------------------------------------------------


def sections(known: Basis, sizes: Sizes, file: str) -> Iterator[PageSection]:
    """Top to bottom."""
    plan = known.plan
    yield section("plan", "The plan", picture(plan))
    yield section("time", "One iteration", figures_iteration.timeline(plan))
    yield section("binds", "Where time goes and what binds", figures_iteration.resources(plan))
    yield section("memory", "Memory", *figures_iteration.memory(known))
    yield section("candidates", "Candidates", *_candidates(plan, sizes))
    yield section("why", "Why this one", *_why(plan))
    yield section("doubts", "What the answer is sensitive to", *_doubts(known), appendix=True)
    if plan.choice is not None:
        yield section("proof", "Where every possible plan went", certificate(plan.choice), appendix=True)
    yield section("calibration", "How right such predictions were", figures_trust.scatter(), appendix=True)
    yield section(
        "assumptions",
        "Assumptions and sources",
        assumed.unknowns(known),
        *assumed.tables(known),
        assumed.filled(),
        appendix=True,
    )
    again = reproduce.commands(plan, file), reproduce.hashes(plan)
    yield section("reproduce", "Reproduce", *again, appendix=True)


def _candidates(plan: Plan, sizes: Sizes) -> Iterator[Block]:
    if plan.choice is None and not sizes.tried:
        yield Listing((GIVEN,), "No candidates")
        return
    yield figures_choice.pareto(plan, sizes)
    if sizes.notes:
        yield Listing(sizes.notes, "Notes on other sizes")


def _why(plan: Plan) -> Iterator[Block | None]:
    if plan.choice is None:
        yield Listing((GIVEN,), "Why is not known")
        return
    yield figures_choice.rival(plan, plan.choice)
    reasons = tuple(words.capital(words.called(r)) for r in plan.choice.reasons)
    yield Listing(reasons, "Why it won, and why not another")


def certificate(choice: Choice) -> TypedTable:
    """Where every complete plan went."""
    c = choice.certificate
    rows = {
        "complete plans": c.space,
        "do not fit": c.infeasible,
        "another is as good in everything": c.dominated,
        "cannot be better, by their lower bound": c.bounded,
        "simulated": c.simulated,
        "not looked at": c.unexplored,
    }
    end = "proven" if not c.unexplored else f"not proven: {c.gap:.1%} could be left"
    return pairs(
        f"Certificate of the search: {end}",
        [(what, words.count(number)) for what, number in rows.items()],
        ("where they went", "plans"),
    )


def _doubts(known: Basis) -> Iterator[Block]:
    plan = known.plan
    figure = figures_trust.sensitivity(plan, known.cost) if known.cost is not None else None
    yield figure or Listing(
        known.notes or ("no coefficient of this plan has an interval",),
        "The doubt about the step cannot be split",
        mark="warn",
    )
    if plan.choice is not None and plan.choice.break_evens is None:
        yield Listing((findings.NOT_LOOKED_FOR,), "What would change the choice", mark="warn")
    elif plan.choice is not None:
        yield figures_choice.break_evens(plan.choice) or Listing(
            (
                "Tried one at a time: lengths, samples, prompts, network, GPU memory and number of GPUs, by "
                "factors of 2 to 8 either way.",
            ),
            findings.break_evens(None, 1.0, ""),
        )
