"""Differences as people read them: `~` changed, `+` new, `-` gone, `!` another architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.terminal.words import new_table
from rlhfsim.present.terminal.words import percent as likely
from rlhfsim.what_if.differences import ChangedField, ChangedFigure, Difference, Leaf, Side, Value

STYLES = {"~": "yellow", "+": "green", "-": "red", "!": "bold magenta"}
HASH = 12
"""Characters of a hash that tell it from another."""
MAIN = ("architecture", "role_placement")
"""Fields whose change is another design, not another number."""


def report(found: Difference, width: int) -> Iterator[RenderableType]:
    """Everything, top to bottom."""
    yield Text(f"{_title(found.before)} -> {_title(found.after)}", style="bold")
    if found.empty:
        yield Text("nothing changed")
        return
    for title, rows in (("asked", found.question), ("chosen", found.choice)):
        if rows:
            yield ""
            yield fields(title, rows, width)
    if found.outcome:
        yield ""
        yield outcomes(found, width)
    yield from (Text(note, style="dim") for note in notes(found))


def _title(side: Side) -> str:
    return f"{side.title} ({'measured' if side.measured else 'predicted'})"


def fields(title: str, rows: Sequence[ChangedField], width: int) -> Table:
    """Fields of the question or of the choice."""
    table = _table(title, width)
    for row in rows:
        mark = "!" if row.path in MAIN else _mark(row.before, row.after)
        table.add_row(
            mark, row.path, *(_leaf(x, row.path) for x in (row.before, row.after)), style=STYLES[mark]
        )
    return table


def outcomes(found: Difference, width: int) -> Table:
    """Figures, with the change of each."""
    table = _table("comes out", width)
    table.add_column("change", justify="right", no_wrap=True)
    for row in found.outcome:
        mark = _mark(row.before, row.after)
        cells = mark, row.name, _value(row.before), _value(row.after), percent(row)
        table.add_row(*cells, style="bold" if row.name == "step" else "")
    return table


def _table(title: str, width: int) -> Table:
    table = new_table(width)
    table.add_column("", no_wrap=True, width=1)
    table.add_column(title, ratio=2, overflow="fold")
    table.add_column("before", ratio=1, justify="right", overflow="fold")
    table.add_column("after", ratio=1, justify="right", overflow="fold")
    return table


def _mark(before: object, after: object) -> str:
    if before is None:
        return "+"
    return "-" if after is None else "~"


def _leaf(leaf: Leaf, path: str) -> str:
    if leaf is None:
        return "-"
    if path.endswith("hash"):
        return str(leaf)[:HASH]
    if isinstance(leaf, bool):
        return "yes" if leaf else "no"
    return units.significant(leaf, 6) if isinstance(leaf, float) else str(leaf)


def _value(value: Value | None) -> str:
    if value is None:
        return "-"
    return likely(value.value) if value.likelihood else units.format(value.value, value.unit)


def percent(row: ChangedFigure) -> str:
    """`-21 %`, `3.4 times` from a doubling on; empty where a side is missing."""
    if row.relative is None:
        return ""
    if row.relative >= 1:
        return f"{units.significant(row.relative + 1, 2)} times"
    return f"{100 * row.relative:+.1f} %"


def notes(found: Difference) -> Iterator[str]:
    """What the step's intervals say, and what was left out."""
    step = next((m for m in found.outcome if m.name == "step"), None)
    if step is not None and step.overlaps is not None:
        ends = " and ".join(_interval(side.outcome["step"]) for side in (found.before, found.after))
        said = "overlap" if step.overlaps else "do not overlap"
        yield f"P10-P90 of the step: {ends}; they {said}"
    if found.before.measured != found.after.measured:
        yield "of a plan and a run only seconds are set side by side: rlhfsim compare has more"


def _interval(value: Value) -> str:
    assert value.interval is not None
    return " to ".join(units.format(end, value.unit) for end in value.interval)
