"""The answer of `rlhfsim whatif` as people read it: points, changes, break-evens, sensitivities, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.changes import leaf_text, mark, mark_of, value_text
from rlhfsim.present.tables import FOLD, REST, Fit, grid
from rlhfsim.present.terminal.bars import FULL, LIGHT, HorizontalBar, Stretch
from rlhfsim.present.terminal.console import NARROW, drawn, filled, indented, new_table
from rlhfsim.present.terminal.diff import STYLES, percent
from rlhfsim.present.terminal.first_screen import wants
from rlhfsim.present.terminal.odds import CERTAIN, chance_titles
from rlhfsim.present.words import layout_labels, likely, signed, span, work_parts
from rlhfsim.what_if.scenarios.against_base import asked, by, chosen, comes_out, relative
from rlhfsim.what_if.scenarios.points import short_names, worded
from rlhfsim.what_if.scenarios.result import PointBreakEven, PointResult, PointTarget, WhatIf

FRONT, OTHER, OTHER_WORK = "*", "!", "#"
FEW = 4
"""Notes of single points that are shown unasked."""
DETAILS = ("layouts", "changes", "notes", "all")
"""What `--detail` adds."""
MOST_CHANGES = 8
"""Points whose changes are shown one by one; of more only those on the front."""
UNKNOWN = "-"


def show(
    console: Console,
    answer: WhatIf,
    folder: Path | None,
    out: Path | None,
    detail: frozenset[str] = frozenset(),
) -> None:
    """Points, break-evens and what holds for all of them; what `detail` names besides."""
    console.print(Text(answer.title, style="bold"))
    if answer.question:
        console.print(answer.question)
    for part in _parts(answer, console.width, detail):
        console.print(part)
    for line in _notes(answer, each=wants(detail, "notes")):
        console.print(indented(Text(line)))
    if left := [name for name in DETAILS if name != "all" and not wants(detail, name)]:
        console.print(Text(f"more: --detail {','.join(left)}", style="dim"))
    console.print(Text(_footer(answer, folder), style="dim"))
    if out is None:
        console.print(Text("keep this result with --out whatif.json", style="dim"))


def _parts(answer: WhatIf, width: int, detail: frozenset[str]) -> Iterator[RenderableType]:
    yield _titled("every point with its best plan")
    yield points_table(answer, width)
    yield Text(_legend(answer), style="dim")
    if wants(detail, "layouts"):
        yield _titled("layouts")
        yield layouts_table(answer, width)
    shown = _shown(answer)
    if shown and wants(detail, "changes"):
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


def points_table(answer: WhatIf, width: int) -> RenderableType:
    """One row a point: what comes out."""
    run = answer.per == "run"
    wide = width >= NARROW or not run
    titles = ["", "point", ">GPUs", "plan", ">step"]
    titles += [">P10 - P90", ">USD/step"] * wide + [">run", ">USD"] * run
    titles += chance_titles([t.quantity for t in _asked_of_all(answer)])
    titles += [">each"] * any(p.other_work for p in answer.points)
    rows = [
        [*_cells(p, answer.base, run=run, wide=wide), *_chances(p, answer), _each(p, answer.base)]
        for p in answer.everything
    ]
    rows = [row[: len(titles)] for row in rows]
    fit = {"": Fit(width=1), "point": Fit("fold", ratio=1)}
    styles = ["bold" if point is answer.base else "" for point in answer.everything]
    return drawn(grid(titles, rows, fit=fit, styles=styles), width)


def _cells(point: PointResult, base: PointResult, *, run: bool, wide: bool) -> list[str]:
    front = OTHER_WORK if point.other_work else FRONT if point.on_front else ""
    if point.plan is None:
        return [front, f"{point.name}: nothing fits", *[UNKNOWN] * (3 + 2 * wide + 2 * run)]
    p = point.plan.prediction
    other = base.plan is not None and base.plan.architecture != point.plan.architecture
    plan = f"{OTHER if other else ' '}{point.plan.architecture}"
    cells = [front, point.name, f"{point.gpus:,}", plan, units.format(p.step_s, "s")]
    if wide:
        low, high = (units.format(x, "s", digits=2) for x in (p.low_s, p.high_s))
        cells += [span(low, high, " - "), _usd(p.usd_per_step)]
    return [*cells, _time(point.run_s), _usd(point.run_usd)] if run else cells


def _asked_of_all(answer: WhatIf) -> Sequence[PointTarget]:
    """The targets, as the first point has them that fits."""
    return next((p.targets for p in answer.everything if p.targets), ())


def _chances(point: PointResult, answer: WhatIf) -> list[str]:
    """The probability of each target; one without a price or a plan has none."""
    drawn_targets = [t for t in point.targets or _asked_of_all(answer) if t.quantity not in CERTAIN]
    return [
        likely(t.probability) if point.targets and t.probability is not None else UNKNOWN
        for t in drawn_targets
    ]


def _each(point: PointResult, base: PointResult) -> str:
    """`+26 %/sample`: time of a sample or a token against the base's, where the work is not the same."""
    change = relative(point, base, lambda p: p.seconds) if point.other_work else None
    return "" if change is None else f"{signed(change)}/{by(point, base)}"


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else units.format(seconds, "s")


def _usd(usd: float | None) -> str:
    return UNKNOWN if usd is None else units.significant(usd)


def _legend(answer: WhatIf) -> str:
    words = []
    if drawn_targets := [t.text for t in _asked_of_all(answer) if t.quantity not in CERTAIN]:
        words.append(f"percentages: probability of {', '.join(drawn_targets)}")
    if any(p.on_front for p in answer.everything):
        words.append(f"{FRONT} no point that does the same work is as fast and as cheap")
    if any(p.other_work for p in answer.points) or any(bar.other_work for bar in answer.tornado):
        words.append(
            f"{OTHER_WORK} other work than the base: compared by what a sample or a token of it takes"
        )
    architectures = {p.plan.architecture for p in answer.everything if p.plan}
    if len(architectures) > 1:
        words.append(f"{OTHER} another architecture than the base")
    return "; ".join(words)


def layouts_table(answer: WhatIf, width: int) -> RenderableType:
    """One row a point: what is chosen."""
    titles = ("point", "pools", "actor", "rollout", "weights by")
    rows = map(_layouts, answer.everything)
    return drawn(grid(titles, rows, fit=dict.fromkeys(titles, FOLD)), width)


def _layouts(point: PointResult) -> tuple[str, ...]:
    if point.plan is None:
        return point.name, point.shortage or "nothing fits", "", "", ""
    p = point.plan.placement
    pools = ", ".join(f"{pool.name} {pool.gpus:,}" for pool in p.pools)
    lag = f", lag {units.significant(p.schedule.staleness)}" if p.schedule.staleness else ""
    return point.name, pools, *layout_labels(point.plan), f"{p.weight_path}{lag}"


def _shown(answer: WhatIf) -> Sequence[PointResult]:
    """Points whose changes are shown: all, or of many those on the front."""
    if len(answer.points) <= MOST_CHANGES:
        return answer.points
    return [p for p in answer.points if p.on_front][:MOST_CHANGES]


# --- break-evens and notes --------------------------------------------------------------------------


def _break_even(even: PointBreakEven) -> RenderableType:
    return indented(Text.assemble((even.question + "\n", "cyan"), even.outcome))


def _notes(answer: WhatIf, *, each: bool) -> Iterator[str]:
    """What is assumed, what holds for all points, and what holds for some: where many, only with `each`."""
    yield from (f"assumed: {text}" for text in answer.assumptions)
    points: dict[str, list[str]] = {}
    for point in answer.everything:
        for note in point.notes:
            points.setdefault(note, []).append(point.name)
    every = len(answer.everything)
    each = each or sum(len(names) < every for names in points.values()) <= FEW
    for note, names in points.items():
        if not each and len(names) < every:
            continue
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"{'all points' if len(names) == every > 1 else listed}: {note}"
    yield from answer.notes


def _footer(answer: WhatIf, folder: Path | None) -> str:
    p = answer.provenance
    parts = [
        f"designs: {p.searched:,} searched, {p.from_cache:,} from an earlier run; "
        f"{units.format(p.seconds, 's')}"
    ]
    if folder is not None and p.searched:
        parts.append(f"kept in {folder}")
    return "; ".join(parts)


# --- changes ----------------------------------------------------------------------------------------

ChangeRow = tuple[str, str, str, str, str]
"""Mark, what, before, after, by how much."""


def changes_of(base: PointResult, point: PointResult, width: int) -> RenderableType:
    """One point: what it sets, what is chosen otherwise, what comes out; settings have no mark."""
    rows = [("", c.path, worded(c.path, c.before), worded(c.path, c.after), "") for c in asked(point)]
    rows += _answers(base, point)
    side = Fit("fold", ratio=1)
    data = grid(
        ("mark", "path", ">before", "arrow", "after", ">by"),
        ((sign, path, old, "->" if old or new else "", new, by) for sign, path, old, new, by in rows),
        fit={
            "mark": Fit(width=1),
            "path": Fit("fold", width=32 if width >= NARROW else 28),  # cluster.node_groups.0.price fits
            ">before": side,
            "arrow": Fit(width=2),
            "after": side,
            ">by": Fit(width=11),
        },
        styles=[STYLES.get(sign, "") for sign, *_ in rows],
    )
    table = new_table(width - 2)
    table.show_header = False
    main = any(sign == "!" for sign, *_ in rows)
    other = f" (other work: {work_parts(point.other_work)})" if point.other_work else ""
    title = Text(f"{'!' if main else '~'} {point.name}{other}", style=STYLES["!"] if main else "bold")
    return Group(title, Padding(filled(table, data), (0, 0, 1, 2)))


def _answers(base: PointResult, point: PointResult) -> Iterator[ChangeRow]:
    if point.plan is None or base.plan is None:
        if point.plan is not None or base.plan is not None:
            before, after = ("fits", "nothing fits")[:: 1 if point.plan is None else -1]
            yield "!", "plan", before, after, ""
        return
    for c in chosen(base.plan, point.plan):
        yield mark_of(c), c.path.replace("_", " "), leaf_text(c.before), leaf_text(c.after), ""
    moved = comes_out(base, point)
    for row in moved:
        by = percent(row)
        values = value_text(row.before), value_text(row.after)
        yield mark(row.before, row.after), row.name, *values, f"({by})" if by else ""
    if not moved:
        yield "", "it comes out the same", "", "", ""


# --- tornado ----------------------------------------------------------------------------------------

Ends = tuple[float | None, float | None, float | None]
"""What comes out at the low value, the base and the high value of an input."""


def tornado_table(answer: WhatIf, width: int) -> RenderableType:
    """One row an input; bars share an axis: light below the base, full above."""
    short = short_names([bar.path for bar in answer.tornado])
    times = [(b.low_s, b.base_s, b.high_s) for b in answer.tornado]
    money = [(b.low_usd, b.base_usd, b.high_usd) for b in answer.tornado]
    by_money = _spread(money) >= _spread(times)
    ends = money if by_money else times
    low, high = _axis(ends)
    base = next((e[1] for e in ends if e[1] is not None), None)
    bars = f"bars around {'' if base is None else units.format(base, 'usd' if by_money else 's')}"
    wide = width >= NARROW
    rows = [
        (
            short[b.path] + (f" {OTHER_WORK}" if b.other_work else ""),
            f"{b.low_label} - {b.high_label}",
            _bar(e, low, high),
            _pair(t, "s"),
            *[_pair(m, "usd")] * wide,
        )
        for b, e, t, m in zip(answer.tornado, ends, times, money, strict=True)
    ]
    titles = ("input", "from - to", bars, ">time", *[">USD"] * wide)
    return drawn(grid(titles, rows, fit={"input": FOLD, "from - to": FOLD, bars: REST}), width)


def _spread(rows: Sequence[Ends]) -> float:
    """The largest relative swing."""
    return max(
        (abs(e / b - 1) for low, b, high in rows if b for e in (low, high) if e is not None), default=0.0
    )


def _axis(rows: Sequence[Ends]) -> tuple[float, float]:
    values = [x for ends in rows for x in ends if x is not None] or [0.0, 1.0]
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, low + 1)


def _bar(ends: Ends, low: float, high: float) -> HorizontalBar | str:
    known = [x for x in ends if x is not None]
    base = ends[1]
    if base is None or len(known) < 2:
        return "nothing fits"
    left, right = min(known), max(known)
    stretches = [
        Stretch(amount=base - left, glyph=LIGHT, style="green"),
        Stretch(amount=right - base, glyph=FULL, style="red"),
    ]
    return HorizontalBar(stretches=stretches, scale=high - low, offset=left - low)


def _pair(ends: Ends, unit: units.Dimension) -> str:
    """What the low and the high value give."""
    shown = [
        ("none" if x is None else units.significant(x) if unit == "usd" else units.format(x, unit))
        for x in (ends[0], ends[2])
    ]
    return " - ".join(shown)
