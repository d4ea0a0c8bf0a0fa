"""A what-if from its file to its answers: every question checked first, designed once, then compared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.provenance import content_hash, installed_version
from rlhfsim.search.requirements import Requirement, check_steps
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.units import format
from rlhfsim.what_if.scenarios.break_evens import BreakEvenQuestion
from rlhfsim.what_if.scenarios.designs import Designs, model_hash
from rlhfsim.what_if.scenarios.document import document_of, read_scenario
from rlhfsim.what_if.scenarios.points import BASE, COMMAND_LINE, MAX_POINTS, Cases, PointQuestion
from rlhfsim.what_if.scenarios.result import PointResult, WhatIf, WhatIfProvenance
from rlhfsim.what_if.scenarios.sensitivity import TornadoInputs, ends, marked, tornado
from rlhfsim.what_if.scenarios.sweep import SAMPLE, swept
from rlhfsim.what_if.scenarios.whole_run import points as points_of
from rlhfsim.what_if.scenarios.whole_run import steps_of


@frozen
class ScenarioQuestions:
    """Everything that a scenario asks, ready to be designed."""

    cases: Cases
    count: int
    """Points that are asked, the base left out."""
    wanted: Callable[[str], bool] | None
    """Whether a point of this name is; None: all are."""
    points: tuple[PointQuestion, ...]
    """Empty where they are more than `MAX_POINTS`: then each is made when its turn comes."""
    inputs: TornadoInputs
    break_evens: tuple[BreakEvenQuestion, ...]

    @property
    def everything(self) -> tuple[PointQuestion, ...]:
        """The base, then the points."""
        return (self.cases.base, *self.points)


def asked(
    given: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    *,
    table: bool = False,
) -> ScenarioQuestions:
    """A scenario as questions; `only` keeps points by name (`*` matches), and drops what is not about them.

    More than `MAX_POINTS` points need a `table` that grows.

    Raises:
        RlhfsimError: the first thing wrong, with file and line.
    """
    source = read_scenario(given)
    document = document_of(source)
    cases = Cases(document, source, settings)
    count, wanted = (_count(cases, only), _matching(only)) if only else (cases.count, None)
    if count > MAX_POINTS and not table:
        raise _too_many(cases, count)
    points = tuple(cases.points(wanted)) if count <= MAX_POINTS else ()
    held = {name for one in document.break_even for name in (one.point, one.against) if name is not None}
    by_name = {case.name: case for case in (cases.base, *cases.points(held.__contains__))} if held else {}
    break_evens = [BreakEvenQuestion(one, i, cases, by_name) for i, one in enumerate(document.break_even)]
    inputs = ends(cases)
    if not (count or break_evens or inputs):
        raise RlhfsimError(
            "nothing-varied",
            "the scenario changes nothing",
            place=source.place(),
            help="give points, a grid, break_even or tornado",
        )
    if only:
        kept = _matching(only)
        sides = [{q.text.point, q.text.against or BASE} - {BASE} for q in break_evens]
        break_evens = [q for q, names in zip(break_evens, sides, strict=True) if all(map(kept, names))]
        inputs = {}
    return ScenarioQuestions(
        cases=cases, count=count, wanted=wanted, points=points, inputs=inputs, break_evens=tuple(break_evens)
    )


def _too_many(cases: Cases, count: int) -> RlhfsimError:
    place = cases.source.place(("grid",) if cases.document.grid else ("points",))
    what = f"{count:,} points must be written as they come (above {MAX_POINTS:,} points)"
    return RlhfsimError(
        "many-points", what, place=place, help="give --csv points.csv or --parquet points.parquet, or fewer"
    )


def _matching(only: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(fnmatchcase(name, pattern) for pattern in only)


def _count(cases: Cases, only: Sequence[str]) -> int:
    """How many points have a name that is wanted.

    Raises:
        RlhfsimError: none has, for one of the patterns.
    """
    count, unmatched = 0, set(only)
    for name in cases.names():
        hits = {pattern for pattern in only if fnmatchcase(name, pattern)}
        count, unmatched = count + bool(hits), unmatched - hits
    for pattern in only:
        if pattern in unmatched:
            some = islice(cases.names(), MAX_POINTS)
            raise unknown_name("point", pattern[:60], some, place=COMMAND_LINE)
    return count


def whatif(
    given: str | Path | Mapping[str, Any],
    designs: Designs,
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    requirements: Sequence[Requirement] = (),
    tables: Sequence[Path] = (),
) -> WhatIf:
    """A scenario answered: every point designed anew, compared, and held against `requirements`.

    Of more than `MAX_POINTS` points all are written to `tables` (.csv, .parquet) as they come, and the answer
    has those that no other point beats (see `scenarios.sweep`).

    Raises:
        RlhfsimError: the first thing wrong, with file and line, before anything is searched; or searches that
            take longer.
    """
    begin, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    questions = asked(given, settings, only, table=bool(tables))
    for case in questions.everything:
        # a curve that cannot be read, or a run without a length, is told before the first search
        check_steps(requirements, steps_of(case), "give run.steps in the scenario, or --set run.steps=1000")
    results, counts = list[PointResult](), Counter[str]()
    many = questions.count > MAX_POINTS
    if many:
        results, counts = _swept(questions, tables, designs, requirements)
    designs.ensure(list(_requests(questions)))
    if not many:
        results = points_of(questions.everything, designs, requirements)
    base, *points = marked(results)
    bars = tornado(questions.cases, questions.inputs, base, designs)
    evens = tuple(question.answer(designs) for question in questions.break_evens)
    document, source = questions.cases.document, questions.cases.source
    return WhatIf(
        title=document.title,
        question=document.question,
        per="run" if any(p.run_s is not None for p in results) else "step",
        base=base,
        points=tuple(points),
        tornado=bars,
        break_evens=evens,
        assumptions=document.assumptions,
        notes=(*_counted(counts, tables), *_notes(questions, results)),
        written=counts["points"] or None,
        provenance=WhatIfProvenance(
            rlhfsim_version=installed_version("rlhfsim"),
            model_hash=model_hash(),
            scenario=source.name,
            scenario_hash=content_hash(source.text),
            text=source.text,
            command="",
            started=started,
            seconds=time.perf_counter() - begin,
            searched=designs.searched,
            from_cache=designs.from_cache,
        ),
    )


def _swept(
    questions: ScenarioQuestions,
    tables: Sequence[Path],
    designs: Designs,
    requirements: Sequence[Requirement],
) -> tuple[list[PointResult], Counter[str]]:
    """The base and the best of many points; a few are designed first, which say how long all will take."""
    cases, count, progress = questions.cases, questions.count, designs.progress
    designs.ensure([cases.base.request])
    few = cases.few(SAMPLE) if questions.wanted is None else islice(cases.points(questions.wanted), SAMPLE)
    designs.check_time([case.request for case in few], count)
    done = 0

    def told(points: int) -> None:
        nonlocal done
        done = points
        if progress is not None:
            progress(done, count)

    designs.progress = lambda *_: told(done)
    points = cases.points(questions.wanted)
    return swept(cases.base, points, cases.paths, tables, designs, requirements, told)


def _counted(counts: Counter[str], tables: Sequence[Path]) -> Iterator[str]:
    """What of many points is not here."""
    if counts:
        others = f", {counts['of other work']:,} of other work" if counts["of other work"] else ""
        yield (
            f"{counts['points']:,} points, {counts['fitting']:,} with a plan that fits{others}: all are in "
            f"{' and '.join(map(str, tables))}; here are those of the base's work that no other beats in "
            "time and money"
        )


def _requests(questions: ScenarioQuestions) -> Iterator[Any]:
    """Every question that is known before an answer is."""
    yield from (case.request for case in questions.everything)
    yield from (case.request for pair in questions.inputs.values() for case in pair)
    yield from (request for question in questions.break_evens for request in question.requests)


def _notes(questions: ScenarioQuestions, results: Sequence[PointResult]) -> Iterator[str]:
    """Where prices come from, and what the intervals hold."""
    profiles: dict[str, list[Profile]] = {}
    for case in questions.everything:
        for pool in case.request.cluster.node_groups:
            profiles.setdefault(pool.profile.name, []).append(pool.profile)
    for name, several in profiles.items():
        yield from dict.fromkeys(_price(name, profile) for profile in several)
    if any(p.run_s is not None for p in results):
        yield "P10 to P90 are those of the step; steps of the run and goodput are taken as given"


def _price(name: str, profile: Profile) -> str:
    price = profile.price
    if price is None:
        return f"no price of {name} is known"
    if price.date == "given":
        return f"price of {name}: {format(price.value, 'usd/h')}, given by the scenario"
    source = price.source.split(",")[0]
    value, low, high = (format(usd, "usd/h") for usd in (price.value, price.low, price.high))
    return f"price of {name}: {value}, {low} to {high} ({price.date}, {source})"
