"""Differences as people read them: `~` changed, `+` new, `-` gone, `!` another architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhfsim import units
from rlhfsim.present.changes import mark, mark_of
from rlhfsim.present.folded import folded, summary
from rlhfsim.present.tables import Fit, grid, table
from rlhfsim.present.terminal.console import Part, drawn, styled
from rlhfsim.present.words import likely, work_parts
from rlhfsim.what_if.differences import ChangedField, ChangedFigure, Difference, Leaf, Side, Value

STYLES = {"~": "yellow", "+": "green", "-": "red", "!": "bold magenta"}
HASH = 12
"""Characters of a hash that tell it from another."""


def report(difference: Difference, width: int) -> Iterator[Part]:
    """Everything, top to bottom."""
    yield styled(f"{_title(difference.before)} -> {_title(difference.after)}", style="bold")
    if difference.empty:
        yield styled("nothing changed")
        return
    yield styled(summary(difference))
    for title, rows in (("asked", difference.question), ("chosen", difference.choice)):
        if rows:
            yield ""
            yield fields(title, rows, width)
    if difference.outcome:
        yield ""
        yield outcomes(difference, width)
    yield from (styled(note, style="dim") for note in notes(difference))


def _title(side: Side) -> str:
    return f"{side.title} ({'measured' if side.measured else 'predicted'})"


def fields(title: str, rows: Sequence[ChangedField], width: int) -> Part:
    """Fields of the question or of the choice."""
    rows = folded(rows)
    cells = ((mark_of(c), c.path, _leaf(c.before, c.path), _leaf(c.after, c.path)) for c in rows)
    styles = [STYLES[mark_of(c)] for c in rows]
    return drawn(grid(("", title, ">before", ">after"), cells, fit=_fit(title), styles=styles), width)


def outcomes(difference: Difference, width: int) -> Part:
    """Figures, with the change of each."""
    title = "comes out"
    return drawn(
        table(
            "",
            difference.outcome,
            ("", lambda row: mark(row.before, row.after)),
            (title, lambda row: row.name),
            (">before", lambda row: _value(row.before)),
            (">after", lambda row: _value(row.after)),
            (">change", percent),
            style=lambda row: "bold" if row.name == "step" else "",
            fit=_fit(title),
        ),
        width,
    )


def _fit(title: str) -> dict[str, Fit]:
    side = Fit("fold", ratio=1)
    return {"": Fit(width=1), title: Fit("fold", ratio=2), ">before": side, ">after": side}


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
    if row.relative is None or row.relative < 1:
        return "" if row.relative is None else f"{100 * row.relative:+.1f} %"
    return f"{units.significant(row.relative + 1, 2)} times"


def notes(difference: Difference) -> Iterator[str]:
    """What the step's intervals say, and what was left out or is not alike."""
    if difference.other_work:
        parts = work_parts(difference.other_work)
        yield f"not the same work ({parts}): steps are no comparison, only what a sample or a token takes"
    step = next((m for m in difference.outcome if m.name == "step"), None)
    if step is not None and step.overlaps is not None:
        ends = " and ".join(_interval(side.outcome["step"]) for side in (difference.before, difference.after))
        yield f"P10-P90 of the step: {ends}; they {'overlap' if step.overlaps else 'do not overlap'}"
    if difference.before.measured != difference.after.measured:
        yield "of a plan and a run only seconds are set side by side: rlhfsim compare has more"


def _interval(value: Value) -> str:
    assert value.interval is not None
    return " to ".join(units.format(end, value.unit) for end in value.interval)
