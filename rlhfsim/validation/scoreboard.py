"""Figures of every kind from its outcomes, and the figures that were published with this version.

Published rows are predicted by `python -m lab.scoreboard` in a checkout; the result is
`reports/accuracy.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim.resources import shipped
from rlhfsim.validation import statistics
from rlhfsim.validation.cases.oom_settings import FITTED
from rlhfsim.validation.intervals import with_intervals
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row
from rlhfsim.validation.tables import ORDER, SECTIONS, run

SCHEMA = "rlhfsim.validate/1"
REFERENCE = "aiconfigurator"
"""Another planner, whose prediction of some published rows is in their `Outcome.detail`."""
WORST_ROWS = 5
RECORDED = ("file", "line", "label", "source", "measured", "predicted", "error", "unit")
"""What is said of a single row."""


def collect(rows: Sequence[Row]) -> list[Outcome]:
    """Outcomes of a user's rows."""
    by_table = statistics.grouped(rows, lambda row: row.table)
    found = {section: by_table[table] for section, table in SECTIONS.items() if table in by_table}
    return with_intervals([o for section, of in found.items() for o in run(section, of)])


def board(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The figures as plain data: what `--json` prints."""
    outcomes = list(outcomes)
    figures = {
        "schema": SCHEMA,
        "kinds": {kind: kind_figures(kind, rows) for kind, rows in by_kind(outcomes).items()},
        "sources": {s: source_figures(rows) for s, rows in statistics.by_source(outcomes).items()},
    }
    rounded_figures: dict[str, Any] = rounded(figures)
    return rounded_figures


def by_kind(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes by kind, in the order of the sections, the step of a run first."""
    groups = statistics.grouped(outcomes, lambda o: o.kind)
    section = ORDER.index
    return {
        kind: groups[kind]
        for kind in sorted(groups, key=lambda k: (section(k.split(".")[0]), not k.endswith(".step"), k))
    }


def is_of(kind: str, kinds: Sequence[str]) -> bool:
    """Whether a kind is one of those asked for (`memory` or `memory.weights`); all are when none is."""
    return not kinds or any(kind == one or kind.startswith(f"{one}.") for one in kinds)


def committed_file() -> Path:
    """Where the published figures lie."""
    return shipped("reports") / "accuracy.json"


def committed(kinds: Sequence[str] = ()) -> dict[str, Any]:
    """The published figures, of some kinds where any is given."""
    figures: dict[str, Any] = json.loads(committed_file().read_text(encoding="utf-8"))
    of_kinds = {kind: its for kind, its in figures["kinds"].items() if is_of(kind, kinds)}
    return {**figures, "kinds": of_kinds, "targets": [t for t in figures["targets"] if t["kind"] in of_kinds]}


def figures_of(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    """Errors of a kind; rates of its verdicts where they are verdicts."""
    figures = statistics.score(rows)
    if kind != "oom":
        return figures
    verdicts = statistics.verdicts(rows)
    dropped = [key for key in figures if "error" in key or "factor" in key or "source_" in key]
    return {k: v for k, v in figures.items() if k not in (*dropped, "bias", "coverage")} | {
        "recall": verdicts.recall.value,
        "false_alarms": verdicts.false_alarms.value,
        "brier": verdicts.brier,
        "recall_counts": asdict(verdicts.recall),
        "false_alarm_counts": asdict(verdicts.false_alarms),
    }


def kind_figures(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    """Figures of one kind, with and without assumptions, by publication and with its worst rows."""
    figures = {
        **figures_of(kind, rows),
        "skip_reasons": statistics.skip_reasons(rows),
        "without_assumptions": figures_of(kind, [o for o in rows if not o.assumptions]),
        "with_assumptions": figures_of(kind, [o for o in rows if o.assumptions]),
        "sources": {s: figures_of(kind, r) for s, r in statistics.by_source(rows).items()},
        **order_figures(rows),
    }
    if kind == "oom":
        for name, key in (
            ("frameworks", lambda o: str(o.detail.get("framework", o.source))),
            ("halves", lambda o: str(o.detail.get("half", FITTED))),
        ):
            groups = statistics.grouped(rows, key)
            figures[name] = {group: figures_of(kind, groups[group]) for group in sorted(groups)}
        return figures
    return {**figures, "worst": [row_record(o) for o in statistics.worst(rows, WORST_ROWS)]}


def order_figures(rows: list[Outcome]) -> dict[str, Any]:
    """Order of plans for one job, of one release and of any; nothing where no two rows compare."""
    same_release = statistics.order(rows)
    anywhere = statistics.order(rows, same_release=False)
    if not anywhere.right.of:
        return {}
    return {
        "right_order": same_release.right.value,
        "order_counts": asdict(same_release.right),
        "order_counts_any_release": asdict(anywhere.right),
        "wrong_order": [[row_record(a), row_record(b)] for a, b in same_release.wrong],
        "wrong_order_any_release": [[row_record(a), row_record(b)] for a, b in anywhere.wrong],
    }


def source_figures(rows: list[Outcome]) -> dict[str, Any]:
    """Figures of one publication over all kinds but verdicts, which are rates."""
    times = [o for o in rows if o.kind != "oom"]
    figures = statistics.score(times) if times else figures_of("oom", rows)
    return {"kinds": sorted({o.kind for o in rows})} | figures


def row_record(outcome: Outcome) -> dict[str, Any]:
    """One row with its prediction."""
    return {name: getattr(outcome, name) for name in RECORDED}


def dumps(figures: Mapping[str, Any]) -> str:
    """The figures as JSON text; NaN and infinity are a bug."""
    return json.dumps(figures, indent=1, allow_nan=False) + "\n"


def rounded(data: Any) -> Any:
    """Six significant digits: two machines write the same bytes."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list | tuple) else data
