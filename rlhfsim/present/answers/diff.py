"""What `rlhfsim diff` answers: `~` changed, `+` new, `-` gone, `!` another architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlhfsim.present.answers.tree import SIGNS, Column, Listing, Page, TypedTable, section, table_of
from rlhfsim.present.changes import folded, leaf_text, mark, mark_of, summary, value_text
from rlhfsim.present.tables import GROWTH, QUANTITY, Fit, ValueKind, fields
from rlhfsim.present.words import work_parts
from rlhfsim.what_if.differences import ChangedField, Difference, Leaf, Side, Value

SIDE = Fit("fold", ratio=1)
LEAF = ValueKind(lambda leaf: leaf_text(leaf, 6))
VALUE = ValueKind(value_text)
HASH = 12
"""Characters of a hash that tell it from another."""


def diff_page(found: Difference) -> Page:
    """Everything, top to bottom."""
    parts = (("asked", found.question), ("chosen", found.choice))
    said = tuple(notes(found))
    return Page(
        schema="rlhfsim.diff/1",
        title=f"{_title(found.before)} -> {_title(found.after)}",
        verdict="nothing changed" if found.empty else summary(found),
        sections=(
            *(section(title, title, _fields(title, folded(rows))) for title, rows in parts if rows),
            *([section("outcome", "comes out", _outcomes(found))] if found.outcome else []),
            *([section("notes", "notes", Listing(said))] if said else []),
        ),
        data={
            "before": _side(found.before),
            "after": _side(found.after),
            "question": [asdict(c) for c in found.question],
            "choice": [asdict(c) for c in found.choice],
            "other_work": found.other_work,
            "outcome": [
                {**asdict(m), "relative": m.relative, "intervals_overlap": m.overlaps} for m in found.outcome
            ],
        },
    )


def _side(side: Side) -> dict[str, Any]:
    return fields(side, path="title", plan_hash="plan.input_hash", measured="measured")


def _title(side: Side) -> str:
    return f"{side.title} ({'measured' if side.measured else 'predicted'})"


def _fields(title: str, rows: Sequence[ChangedField]) -> TypedTable:
    """Fields of the question or of the choice."""
    return table_of(
        title,
        rows,
        Column("", mark_of),
        Column(title, "path", fit=Fit("fold", ratio=2)),
        Column("before", lambda c: _leaf(c.before, c.path), LEAF, fit=SIDE),
        Column("after", lambda c: _leaf(c.after, c.path), LEAF, fit=SIDE),
        style=lambda c: SIGNS[mark_of(c)],
    )


def _outcomes(found: Difference) -> TypedTable:
    """Figures, with the change of each."""
    return table_of(
        "comes out",
        found.outcome,
        Column("", lambda row: mark(row.before, row.after)),
        Column("comes out", "name", fit=Fit("fold", ratio=2)),
        Column("before", kind=VALUE, fit=SIDE),
        Column("after", kind=VALUE, fit=SIDE),
        Column("change", "relative", GROWTH),
        style=lambda row: "bold" * (row.name == "step"),
    )


def _leaf(leaf: Leaf, path: str) -> Leaf:
    return str(leaf)[:HASH] if leaf is not None and path.endswith("hash") else leaf


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
    return " to ".join(QUANTITY.shown((end, value.unit)) for end in value.interval)
