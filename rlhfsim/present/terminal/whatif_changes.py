"""What a point changes against the base, in the manner of a plan of changes: only what is another."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.terminal.diff import MAIN, STYLES, percent
from rlhfsim.present.terminal.words import NARROW, new_table
from rlhfsim.what_if.differences import ChangedField, ChangedFigure, Leaf, Value
from rlhfsim.what_if.scenarios.against_base import asked, chosen, comes_out
from rlhfsim.what_if.scenarios.points import worded
from rlhfsim.what_if.scenarios.result import PointResult

Row = tuple[str, str, str, str, str]
"""Mark, what, before, after, by how much."""


def changes_of(base: PointResult, point: PointResult, width: int) -> RenderableType:
    """One point: what it sets, what is chosen otherwise, what comes out."""
    rows = [*map(_asked, asked(point)), *_answers(base, point)]
    table = new_table(width - 2)
    table.show_header = False
    table.add_column("", no_wrap=True, width=1)
    table.add_column("", width=32 if width >= NARROW else 26, overflow="fold")
    table.add_column("", ratio=1, justify="right", overflow="fold")
    table.add_column("", no_wrap=True, width=2)
    table.add_column("", ratio=1, overflow="fold")
    table.add_column("", justify="right", no_wrap=True, width=11)
    for mark, what, before, after, by in rows:
        table.add_row(
            mark, what, before, "->" if before or after else "", after, by, style=STYLES.get(mark, "")
        )
    main = any(mark == "!" for mark, *_ in rows)
    title = Text(f"{'!' if main else '~'} {point.name}", style=STYLES["!"] if main else "bold")
    return Group(title, Padding(table, (0, 0, 1, 2)))


def _asked(change: ChangedField) -> Row:
    """What the user set stands without a mark."""
    return ("", change.path, worded(change.path, change.before), worded(change.path, change.after), "")


def _answers(base: PointResult, point: PointResult) -> Iterator[Row]:
    if point.plan is None or base.plan is None:
        if point.plan is not None or base.plan is not None:
            fits = "fits", "nothing fits"
            before, after = fits if point.plan is None else fits[::-1]
            yield "!", "plan", before, after, ""
        return
    for change in chosen(base.plan, point.plan):
        mark = "!" if change.path in MAIN else _mark(change.before, change.after)
        yield mark, change.path.replace("_", " "), _plain(change.before), _plain(change.after), ""
    moved = comes_out(base, point)
    for row in moved:
        yield (_mark(row.before, row.after), row.name, _value(row.before), _value(row.after), _by(row))
    if not moved:
        yield "", "it comes out the same", "", "", ""


def _by(row: ChangedFigure) -> str:
    text = percent(row)
    return f"({text})" if text else ""


def _mark(before: object, after: object) -> str:
    return "+" if before is None else "-" if after is None else "~"


def _plain(leaf: Leaf) -> str:
    if leaf is None or leaf is True or leaf is False:
        return {None: "-", True: "yes", False: "no"}[leaf]
    return units.significant(leaf, 4) if isinstance(leaf, float | int) else leaf


def _value(value: Value | None) -> str:
    if value is None:
        return "-"
    return units.significant(value.value, 4) if value.unit == "1" else units.format(value.value, value.unit)
