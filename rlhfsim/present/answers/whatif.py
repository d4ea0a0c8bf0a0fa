"""What `rlhfsim whatif` answers: points, tornado, break-evens, what changes in each plan, assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from rlhfsim.present import words
from rlhfsim.present.answers.tree import (
    Block,
    Changed,
    Code,
    Column,
    Listing,
    Mark,
    Page,
    PageSection,
    Tile,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.changes import asked_leaf, changed_line, figure_line
from rlhfsim.present.figures import crossing as figures_crossing
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures import whatif as figures_whatif
from rlhfsim.present.input_names import input_name
from rlhfsim.present.tables import COUNT, NUMBER
from rlhfsim.what_if.scenarios.against_base import asked, chosen, comes_out
from rlhfsim.what_if.scenarios.result import PointResult, WhatIf

LAYOUTS = ("point", "pools", "actor", "rollout", "weights by")


def whatif_page(result: WhatIf, *, file: str = "", title: str | None = None) -> Page:
    """The answer to one what-if; with the `file` that holds it also what supports it."""
    return Page(
        title=title or f"What if: {result.title}",
        subtitle=result.question,
        verdict=verdict(result),
        mark=mark(result),
        sure=tuple(_sure(result)) if file else (),
        tiles=tuple(_tiles(result)),
        sections=tuple(_sections(result, file)),
        version=result.provenance.rlhfsim_version,
    )


def mark(result: WhatIf) -> Mark:
    """Whether everything fits."""
    fit = [p.plan is not None for p in result.everything]
    return "good" if all(fit) else "warn" if any(fit) else "bad"


def verdict(result: WhatIf) -> str:
    """One sentence: the base, and which points beat it."""
    base = result.base
    if base.plan is None or base.seconds is None:
        return f"The base does not fit: {base.shortage or 'no plan was found'}."
    cost = f" and {words.money(base.usd)}" if base.usd is not None else ""
    as_is = f"As it is, a {result.per} takes {words.seconds(base.seconds)}{cost}"
    return f"{as_is}. {figures_whatif.finding(result)}."


def _sure(result: WhatIf) -> Iterator[str]:
    base = result.base
    if base.plan is not None:
        p = base.plan.prediction
        yield (
            f"8 in 10 that a step of the base takes between {words.seconds(p.low_s)} and "
            f"{words.seconds(p.high_s)}; points on the same GPUs share most of that doubt."
        )
    gaps = [p.name for p in result.everything if p.gap > 0]
    yield (
        f"Not proven where time ran out: {words.listed(gaps)}."
        if gaps
        else "Every point is designed anew, and each plan is proven best of its space."
    )
    count, error = figures_trust.scored()
    yield (
        f"Published RLHF steps were predicted with a median error of {words.percent(error)} "
        f"({count} steps, none used for fitting)."
    )


def _tiles(result: WhatIf) -> Iterator[Tile]:
    known = [p for p in result.everything if p.seconds is not None]
    if not known:
        return
    same = [p for p in known if not p.other_work] or known[:1]
    fastest = min(same, key=lambda p: p.seconds or 0.0)
    if (seconds := result.base.seconds) is None:
        yield Tile("As it is", "does not fit", mark="bad")
    else:
        each = f"a {result.per}, {COUNT.shown(result.base.gpus)} GPUs"
        yield Tile("As it is", words.seconds(seconds), each)
    yield Tile("Fastest", words.seconds(fastest.seconds or 0.0), fastest.name)
    priced = [p for p in same if p.usd is not None]
    if priced:
        cheapest = min(priced, key=lambda p: p.usd or 0.0)
        yield Tile("Cheapest", words.money(cheapest.usd or 0.0), cheapest.name)
    missing = [p.name for p in result.everything if p.plan is None]
    yield Tile(
        "Points that fit",
        f"{len(known)} of {len(result.everything)}",
        detail=(words.listed(missing) and f"not: {words.listed(missing)}") or "all of them",
        mark=mark(result),
    )


def _sections(result: WhatIf, file: str) -> Iterator[PageSection]:
    points = figures_whatif.points(result)
    yield section("points", "Time against money", figures_whatif.pareto(result, points), points)
    columns = (Column(title, i) for i, title in enumerate(LAYOUTS))
    layouts = table_of("Layouts", map(_layouts, result.everything), *columns)
    yield section("layouts", "What is chosen at each point", layouts, asked=True)
    if result.tornado:
        tornado = figures_whatif.tornado(result) or (Listing((), "No input can be drawn"),)
        yield section("tornado", "What moves the answer", *tornado, asked=True)
    if result.break_evens:
        crossings = (figures_crossing.break_even(i, b) for i, b in enumerate(result.break_evens))
        outcomes = Listing(tuple(f"{b.question} {b.outcome}" for b in result.break_evens))
        yield section("break-evens", "Break-evens", outcomes, *crossings)
    yield section(
        "changes",
        "What changes in each plan",
        *(_changed(result.base, p) for p in result.points),
        lead="Against the base: ! another design, ~ another value, + new, - gone; lines without a sign are "
        "what the scenario sets.",
        asked=True,
    )
    notes = tuple(words.capital(note) for note in _notes(result))
    yield section("notes", "Notes", Listing(notes), asked=True)
    if file:
        yield section(
            "calibration", "How right such predictions were", figures_trust.scatter(), appendix=True
        )
        yield section("reproduce", "Reproduce", *_again(result, file), appendix=True)


def _layouts(point: PointResult) -> tuple[str, ...]:
    """What is chosen at a point, in the order of `LAYOUTS`."""
    if point.plan is None:
        return point.name, point.shortage or "nothing fits", "", "", ""
    p = point.plan.placement
    pools = ", ".join(f"{pool.name} {pool.gpus}" for pool in p.pools)
    lag = f", lag {NUMBER.shown(p.schedule.staleness)}" if p.schedule.staleness else ""
    return point.name, pools, *words.layout_labels(point.plan), f"{p.weight_path}{lag}"


def _notes(result: WhatIf) -> Iterator[str]:
    """What holds for all points or for some."""
    points: dict[str, list[str]] = {}
    for point in result.everything:
        for note in point.notes:
            points.setdefault(note, []).append(point.name)
    for note, names in points.items():
        yield f"{'all points' if len(names) == len(result.everything) else ', '.join(names)}: {note}"
    yield from result.notes


def _again(result: WhatIf, file: str) -> Iterator[Block]:
    p = result.provenance
    name = PurePath(p.scenario).name
    yield Code("Commands", f"rlhfsim whatif {name} --out {file}\nrlhfsim report {file}")
    rows = [
        ("rlhfsim", p.rlhfsim_version),
        ("model (code and tables)", p.model_hash),
        ("scenario", p.scenario_hash),
        *((f"point {x.name}", x.input_hash) for x in result.everything),
    ]
    yield pairs("Versions and hashes: equal ones give the same numbers", rows)
    if p.text:
        yield Code(f"The scenario, {name}", p.text)


# --- what changes -----------------------------------------------------------------------------------


def _changed(base: PointResult, point: PointResult) -> Changed:
    """One point in the manner of a plan of changes."""
    lines = [
        ("", f"{input_name(c.path)}: {asked_leaf(c.path, c.before)} -> {asked_leaf(c.path, c.after)}")
        for c in asked(point)
    ]
    if point.plan is None:
        lines.append(("!", f"nothing fits: {point.shortage or 'no plan was found'}"))
    elif base.plan is None:
        lines.append(("!", "fits, which the base does not"))
    else:
        lines += map(changed_line, chosen(base.plan, point.plan))
        lines += (("~", figure_line(moved, moved.name)) for moved in comes_out(base, point))
    other = f" (other work: {words.work_parts(point.other_work)})" if point.other_work else ""
    return Changed(f"{point.name}{other}", tuple(lines))
