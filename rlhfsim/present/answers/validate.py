"""What `rlhfsim validate` answers and writes: the scoreboard as tables, every row as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim.outputs import csv_cell
from rlhfsim.present.answers.tree import Column, Listing, Page, TypedTable, answer, table_of
from rlhfsim.present.tables import COUNT, FINE_CHANGE, FINE_SHARE, NUMBER, TEXT, WORDS, ValueKind
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.scoreboard import REFERENCE

REASONS = 3
KIND_COLUMNS = ("kind", "rows", "predicted", "fit", "scored", "median", "mean", "P90", "bias", "coverage")
_HIDDEN = ("rows", "scored")
"""Columns of the report that the terminal leaves out."""
percent = FINE_SHARE.shown
"""`12.3 %`, or a dash when unknown."""
_FIGURE = ValueKind(str, missing="")
_STYLES = {"MISSED": "red", "PASS": "green"}


def page(board: Mapping[str, Any]) -> Page:
    """Kinds, targets, then what is to be said about each kind."""
    kinds = [kind_cells(*kind) for kind in board["kinds"].items()]
    targets = [target_cells(target) for target in board.get("targets", ())]
    notes = (f"{kind}: {note}" for kind, figures in board["kinds"].items() for note in _notes(figures))
    shown = _table(("kind", "figure", "target", "reached", ""), targets) if targets else None
    return answer("", _table(KIND_COLUMNS, kinds), shown, Listing(tuple(notes)), data=board)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> TypedTable:
    shown = [i for i, title in enumerate(titles) if title not in _HIDDEN]
    columns = (Column(titles[i], i, _FIGURE if i else TEXT, fit=WORDS) for i in shown)
    return table_of("", lines, *columns, style=lambda line: _STYLES.get(line[-1], ""))


def _notes(figures: Mapping[str, Any]) -> Iterator[str]:
    """Rates of verdicts, why rows were skipped, another planner's error on the same rows."""
    if "recall" in figures:
        yield verdict_text(figures)
        yield from (f"{name}: {verdict_text(half)}" for name, half in figures.get("halves", {}).items())
    if reasons := list(figures["skip_reasons"].items()):
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons[:REASONS])
        more = f"; {len(reasons) - REASONS} more reasons (--json)" if len(reasons) > REASONS else ""
        yield f"{figures['skipped']} skipped: {listed}{more}"
    if other := figures.get(REFERENCE):
        yield f"{REFERENCE} on the same rows: median error {percent(other['median_abs_error'])}"


def target_cells(target: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Kind, figure, limit, value reached and verdict of one target."""
    sign = "<=" if target["at_most"] else ">="
    number = COUNT.shown if target["figure"] == "predicted" else percent
    limit = f"{sign} {number(target['limit'])}"
    if target.get("least") is not None:
        limit = f"{number(target['least'])} to {number(target['limit'])}"
    return target["kind"], target["title"], limit, number(target["value"]), target["verdict"]


def kind_cells(kind: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table of kinds; verdicts have no relative errors (see `verdict_text`)."""
    counts = tuple(str(figures[key]) for key in ("rows", "predicted", "fit", "scored"))
    name = kind if figures.get("rerun", True) else f"{kind} (not rerun)"
    if "recall" in figures:
        return (name, *counts, *("",) * 5)
    errors = (figures["median_abs_error"], figures["mean_abs_error"], figures["p90_abs_error"])
    shown = tuple(percent(value) for value in errors)
    return (name, *counts, *shown, FINE_CHANGE.shown(figures["bias"]), percent(figures["coverage"]))


def verdict_text(figures: Mapping[str, Any]) -> str:
    """Recall, false alarms and Brier score in one sentence."""
    if not figures["scored"]:
        return "no row scored"
    return (
        f"recall {rate_text(figures['recall_counts'])}, false alarms"
        f" {rate_text(figures['false_alarm_counts'])}, Brier score {NUMBER.shown(figures['brier'])}"
    )


def rate_text(rate: Mapping[str, Any]) -> str:
    """A share with its counts and its interval."""
    if rate["value"] is None:
        return "unknown (no rows)"
    interval = f"95 % interval {percent(rate['low'])} to {percent(rate['high'])}"
    return f"{percent(rate['value'])} ({rate['hits']} of {rate['of']}; {interval})"


def rows_text(outcomes: Sequence[Outcome], path: Path) -> str:
    """Every row, as a table or, for a `.json` file, as a list."""
    records = [{**asdict(o), "error": o.error} for o in outcomes]
    if path.suffix == ".json":
        return json.dumps(records, indent=1) + "\n"
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*Outcome.__dataclass_fields__, "error"], lineterminator="\n")
    writer.writeheader()
    for record in records:
        detail = json.dumps(record["detail"]) if record["detail"] else ""
        flat = {**record, "assumptions": "; ".join(record["assumptions"]), "detail": detail}
        writer.writerow({key: "" if value is None else csv_cell(value) for key, value in flat.items()})
    return buffer.getvalue()
