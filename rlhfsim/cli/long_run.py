"""`rlhfsim design --run FILE`: a plan, or plans one after the other, for a run whose lengths change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhfsim.cli.constraints import requirements
from rlhfsim.cli.params import Given, Output, Told, bad_option, check_output
from rlhfsim.plan import Plan, write_plan
from rlhfsim.present.answers.long_run import long_run_page
from rlhfsim.present.answers.tree import Page
from rlhfsim.search import clock
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import narrowed
from rlhfsim.what_if.long_run.document import read_run
from rlhfsim.what_if.long_run.outlook import run_odds
from rlhfsim.what_if.long_run.replanning import RunPlan, planned_run

LEFT_OUT = ("steps", "why_not", "gains", "pareto", "fastest")
"""Options of `design` that ask about one step."""


def planned_long_run(request: Request, given: Given) -> Told:
    """The answer to `--run`, written.

    Raises:
        RlhfsimError: a file that cannot be read, or options that ask about one step.
    """
    for name in LEFT_OUT:
        if given[name]:
            raise bad_option(
                f"--{name.replace('_', '-')} asks about one step, --run about all", "drop one of the two"
            )
    if request.objective == "memory":
        raise bad_option("--objective memory and --run: a run is planned for time", "drop one of the two")
    answer, page, meets = long_run(request, given)
    for path, plan in _plans(answer, given["out"]):
        check_output(path, Output("plan"))
        write_plan(path, plan)
    return Told(page, meets)


def long_run(request: Request, given: Given) -> tuple[RunPlan, Page, bool]:
    """The answer to the file of `--run`, its page, and whether it fits and meets every target.

    Raises:
        RlhfsimError: a file that cannot be read.
    """
    run, curve = read_run(given["run"])
    targets = requirements({**given, "steps": run.steps}, request)
    with clock.within(request.time_limit):
        answer = planned_run(narrowed(request, targets), run, curve)
    chosen, fixed = run_odds(answer, targets, given["confidence"]) if answer.stretches else (None, None)
    return answer, long_run_page(answer, chosen, fixed), chosen is not None and chosen.meets


def _plans(answer: RunPlan, out: Path) -> Iterator[tuple[Path, Plan]]:
    """The first plan under the name that was given, each later one with its first step."""
    for part in answer.stretches:
        if part.stretch.start == 0:
            yield out, part.plan
        elif part.stretch.start in answer.changes:
            yield out.with_name(f"{out.stem}-{part.stretch.start}{out.suffix}"), part.plan
