"""The answer of `rlhfsim whatif` as people read it: points, changes, break-evens, sensitivities, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.terminal.whatif_changes import changes_of
from rlhfsim.present.terminal.whatif_tornado import tornado_table
from rlhfsim.present.terminal.words import NARROW, new_table
from rlhfsim.what_if.scenarios.result import PointBreakEven, PointResult, WhatIf

FRONT, OTHER = "*", "!"
MOST_CHANGES = 8
"""Points whose changes are shown one by one; of more only those on the front."""
UNKNOWN = "-"


def show(console: Console, answer: WhatIf, folder: Path | None, out: Path | None) -> None:
    """Everything, top to bottom."""
    console.print(Text(answer.title, style="bold"))
    if answer.question:
        console.print(answer.question)
    for part in _parts(answer, console.width):
        console.print(part)
    for line in _notes(answer):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print(Text(_footer(answer, folder), style="dim"))
    if out is None:
        console.print(Text("keep this result with --out whatif.json", style="dim"))


def _parts(answer: WhatIf, width: int) -> Iterator[RenderableType]:
    yield _titled("every point with its best plan")
    yield points_table(answer, width)
    yield Text(_legend(answer), style="dim")
    yield _titled("layouts")
    yield layouts_table(answer, width)
    shown = _shown(answer)
    if shown:
        yield _titled("against the base")
        for point in shown:
            yield changes_of(answer.base, point, width)
        if len(shown) < len(answer.points):
            yield Text(f"{len(answer.points) - len(shown)} more: --only NAME shows one of them", style="dim")
    if answer.break_evens:
        yield _titled("break-evens")
        yield from (_break_even(even) for even in answer.break_evens)
    if answer.tornado:
        yield _titled(f"one input at a time: time and money of the {answer.per}")
        yield tornado_table(answer, width)
    yield _titled("to be known")


def _titled(title: str) -> Rule:
    return Rule(title, align="left", style="dim")


# --- points -----------------------------------------------------------------------------------------


def points_table(answer: WhatIf, width: int) -> Table:
    """One row a point: what comes out."""
    run = answer.per == "run"
    table = new_table(width)
    table.add_column("", no_wrap=True, width=1)
    table.add_column("point", ratio=1, overflow="fold")
    table.add_column("GPUs", justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    if width >= NARROW or not run:
        table.add_column("P10 - P90", justify="right", no_wrap=True)
        table.add_column("USD/step", justify="right", no_wrap=True)
    if run:
        table.add_column("run", justify="right", no_wrap=True)
        table.add_column("USD", justify="right", no_wrap=True)
    columns = len(table.columns)
    for point in answer.everything:
        cells = _cells(point, answer.base, run=run, wide=width >= NARROW or not run)
        table.add_row(*cells[:columns], style="bold" if point is answer.base else "")
    return table


def _cells(point: PointResult, base: PointResult, *, run: bool, wide: bool) -> list[str]:
    mark = FRONT if point.on_front else ""
    if point.plan is None:
        return [
            mark,
            f"{point.name}: nothing fits",
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            *[UNKNOWN] * (2 * wide + 2 * run),
        ]
    p = point.plan.prediction
    other = base.plan is not None and base.plan.architecture != point.plan.architecture
    cells = [
        mark,
        point.name,
        f"{point.gpus:,}",
        f"{OTHER if other else ' '}{point.plan.architecture}",
        units.format(p.step_s, "s"),
    ]
    if wide:
        cells += [_between(p.low_s, p.high_s), _usd(p.usd_per_step)]
    return [*cells, _time(point.run_s), _usd(point.run_usd)] if run else cells


def _between(low: float, high: float) -> str:
    """`14 - 28 s`: the unit once where it is the same."""
    first, last = (units.format(x, "s", digits=2) for x in (low, high))
    number, _, unit = first.rpartition(" ")
    return f"{number} - {last}" if last.endswith(f" {unit}") else f"{first} - {last}"


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else units.format(seconds, "s")


def _usd(usd: float | None) -> str:
    return UNKNOWN if usd is None else units.significant(usd)


def _legend(answer: WhatIf) -> str:
    words = []
    if any(p.on_front for p in answer.everything):
        words.append(f"{FRONT} no point that does the same work is as fast and as cheap")
    architectures = {p.plan.architecture for p in answer.everything if p.plan}
    if len(architectures) > 1:
        words.append(f"{OTHER} another architecture than the base")
    return "; ".join(words)


def layouts_table(answer: WhatIf, width: int) -> Table:
    """One row a point: what is chosen."""
    table = new_table(width)
    for name in ("point", "pools", "actor", "rollout", "weights by"):
        table.add_column(name, overflow="fold")
    for point in answer.everything:
        if point.plan is None:
            table.add_row(point.name, point.shortage or "nothing fits", "", "", "")
            continue
        p = point.plan.placement
        pools = ", ".join(f"{pool.name} {pool.gpus:,}" for pool in p.pools)
        lag = f", lag {units.significant(p.schedule.staleness)}" if p.schedule.staleness else ""
        table.add_row(
            point.name,
            pools,
            p.actor.layout.label,
            p.rollout.layout.label if p.rollout else UNKNOWN,
            f"{p.weight_path}{lag}",
        )
    return table


def _shown(answer: WhatIf) -> Sequence[PointResult]:
    """Points whose changes are shown: all, or of many those on the front."""
    if len(answer.points) <= MOST_CHANGES:
        return answer.points
    return [p for p in answer.points if p.on_front][:MOST_CHANGES]


# --- break-evens and notes --------------------------------------------------------------------------


def _break_even(even: PointBreakEven) -> RenderableType:
    text = Text()
    text.append(even.question + "\n", style="cyan")
    text.append(even.outcome)
    return Padding(text, (0, 0, 0, 2))


def _notes(answer: WhatIf) -> Iterator[str]:
    """What is assumed, what holds for some points, and what holds for all."""
    yield from (f"assumed: {text}" for text in answer.assumptions)
    told: dict[str, list[str]] = {}
    for point in answer.everything:
        for note in point.notes:
            told.setdefault(note, []).append(point.name)
    every = len(answer.everything)
    for note, names in told.items():
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"{'all points' if len(names) == every > 1 else listed}: {note}"
    yield from answer.notes


def _footer(answer: WhatIf, folder: Path | None) -> str:
    p = answer.provenance
    parts = [
        f"designs: {p.searched:,} searched, {p.from_cache:,} from an earlier run; {units.format(p.seconds, 's')}"
    ]
    if folder is not None and p.searched:
        parts.append(f"kept in {folder}")
    return "; ".join(parts)
