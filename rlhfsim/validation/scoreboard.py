"""The scoreboard: figures of every kind from its outcomes, and the comparison with committed ones.

`rlhfsim validate --check reports/accuracy.json` fails when the committed figures are stale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.resources import shipped
from rlhfsim.specs.loading import checked, convert, parse_json, read_text
from rlhfsim.specs.quantities import MAX_MAGNITUDE
from rlhfsim.validation import statistics, transfer
from rlhfsim.validation import tables as registry
from rlhfsim.validation.intervals import with_intervals
from rlhfsim.validation.left_out import publisher
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.reliability import above_median, by_group, groups_covered, odds
from rlhfsim.validation.rows import Row
from rlhfsim.validation.targets import results

SCHEMA = "rlhfsim.validate/1"
TOLERANCE = 0.001
"""Figures that differ by less than 0.1 percentage points are the same."""
REFERENCE = "aiconfigurator"
"""Another planner, whose prediction of the same row stands in `Outcome.detail` as `PEER`."""
PEER = "peer_s"
_ERRORS = ("median_abs_error", "mean_abs_error", "p90_abs_error")
_HIGHER_IS_BETTER = ("within_factor_2", "recall", "right_order")
_WORSE_UP = (*_ERRORS, "false_alarms", "brier")
_COMPARED = ("rows", "predicted", "scored", "fit", *_WORSE_UP, "bias", *_HIGHER_IS_BETTER)
WORST_ROWS = 5

Progress = Callable[[registry.RowKind], None]


def collect(
    sections: Mapping[str, registry.RowKind],
    rows: Sequence[Row] | None = None,
    progress: Progress | None = None,
    *,
    discrepancy: bool = True,
) -> tuple[list[Outcome], list[str]]:
    """Outcomes of the sections, on the shipped rows or on given ones, and the sections not rerun.

    Without `discrepancy` intervals hold what the coefficients say, and no more.
    """
    outcomes: list[Outcome] = []
    not_rerun = []
    for name, section in sections.items():
        table_rows = None if rows is None else [row for row in rows if row.table == section.table]
        if table_rows == []:
            continue
        if progress:
            progress(section)
        if section.runnable:
            outcomes += registry.run(section, table_rows)
        else:
            not_rerun.append(name)
    return (with_intervals(outcomes, own_rows=rows is not None) if discrepancy else outcomes), not_rerun


def board(
    outcomes: Iterable[Outcome], not_rerun: Sequence[str] = (), *, own_rows: bool = False
) -> dict[str, Any]:
    """The figures as plain data: what `--json` prints and the committed file holds.

    `own_rows` says that a user's rows were scored instead of the shipped ones.
    """
    outcomes = list(outcomes)
    by_kind = statistics.grouped(outcomes, lambda o: o.kind)
    order = list(registry.SECTIONS)
    kinds = {
        kind: _kind(kind, by_kind[kind])
        for kind in sorted(by_kind, key=lambda k: (order.index(k.split(".")[0]), _rank(k), k))
    }
    figures = {
        "schema": SCHEMA,
        "kinds": kinds,
        "sources": {s: _source(rows) for s, rows in statistics.by_source(outcomes).items()},
        "odds": odds(outcomes),
        "targets": results(kinds, counts=not own_rows),
        "not_rerun": list(not_rerun),
    }
    rounded: dict[str, Any] = _rounded(figures)
    return rounded


def _rank(kind: str) -> int:
    return 0 if kind.endswith(".step") else 1


def _figures(kind: str, rows: list[Outcome]) -> dict[str, Any]:
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


def _kind(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    figures = _figures(kind, rows)
    figures["skip_reasons"] = statistics.skip_reasons(rows)
    figures["left_out"] = _left_out(kind, rows)
    figures["without_assumptions"] = _figures(kind, [o for o in rows if not o.assumptions])
    figures["with_assumptions"] = _figures(kind, [o for o in rows if o.assumptions])
    figures["sources"] = {s: _figures(kind, r) for s, r in statistics.by_source(rows).items()}
    reference = statistics.reference_errors(rows, PEER)
    if reference["rows"]:
        figures[REFERENCE] = reference
    if kind == transfer.KIND:
        figures |= _transferred(rows)
    figures |= _order(rows)
    if kind == "oom":
        figures["frameworks"] = {
            name: _figures(kind, group)
            for name, group in sorted(statistics.grouped(rows, _framework).items())
        }
    else:
        figures["worst"] = [_row(o) for o in statistics.worst(rows, WORST_ROWS)]
    return figures


def _left_out(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    """Figures with no row of the publisher in any fit; {} where a row of its own calibrates."""
    if kind == transfer.KIND:
        return {}
    unseen = statistics.blind(rows)
    by_publisher = statistics.grouped(unseen, lambda o: publisher(o.source))
    groups = by_group(rows)
    return {
        **_figures(kind, unseen),
        **_order(unseen),
        "above_median": above_median(unseen),
        "groups_covered": groups_covered(groups),
        "groups": groups,
        "publishers": {name: _figures(kind, group) for name, group in by_publisher.items()},
    }


def _transferred(rows: list[Outcome]) -> dict[str, Any]:
    """The same pairs without calibration and with the step's ratio alone, and pairs of one model."""
    same = [o for o in rows if o.detail.get(transfer.SAME)]
    return {
        "cold": statistics.reference_errors(rows, transfer.COLD),
        "ratio": statistics.reference_errors(rows, transfer.RATIO),
        "same_model": _figures(transfer.KIND, same),
        "same_model_cold": statistics.reference_errors(same, transfer.COLD),
        "cold_sources": {
            source: statistics.reference_errors(group, transfer.COLD)
            for source, group in statistics.by_source(rows).items()
        },
    }


def _order(rows: list[Outcome]) -> dict[str, Any]:
    """Order of plans for one job, of one release and of any; nothing where no two rows compare."""
    same_release = statistics.order(rows)
    anywhere = statistics.order(rows, same_release=False)
    if not anywhere.right.of:
        return {}
    return {
        "right_order": same_release.right.value,
        "order_counts": asdict(same_release.right),
        "order_counts_any_release": asdict(anywhere.right),
        "wrong_order": [[_row(a), _row(b)] for a, b in same_release.wrong],
        "wrong_order_any_release": [[_row(a), _row(b)] for a, b in anywhere.wrong],
    }


def _framework(outcome: Outcome) -> str:
    return str(outcome.detail.get("framework", outcome.source))


def _source(rows: list[Outcome]) -> dict[str, Any]:
    """Figures of one publication over all kinds but verdicts, which are rates, and pairs of rows."""
    times = [o for o in rows if o.kind not in ("oom", transfer.KIND)]
    figures = statistics.score(times) if times else _figures("oom", rows)
    return {"kinds": sorted({o.kind for o in rows})} | figures


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "file": outcome.file,
        "line": outcome.line,
        "label": outcome.label,
        "source": outcome.source,
        "measured": outcome.measured,
        "predicted": outcome.predicted,
        "error": outcome.error,
        "unit": outcome.unit,
    }


# --- committed figures ----------------------------------------------------------------------------


def committed_file() -> Path:
    """Where the committed figures lie."""
    return shipped("reports") / "accuracy.json"


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class _Board:
    """What is compared of committed figures."""

    kinds: dict[str, dict[str, Any]]


def read_board(path: Path) -> dict[str, Any]:
    """Committed figures.

    Raises:
        RlhfsimError: not a file written by `rlhfsim validate --report`.
    """
    source = parse_json(read_text(path), str(path))
    data = source.data
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise RlhfsimError(
            "not-a-scoreboard",
            f"the file does not say schema {SCHEMA}",
            place=Place(file=str(path)),
            help="write it with --report",
        )
    for kind, figures in convert(_Board, source, {"kinds": data.get("kinds")}).kinds.items():
        for part in (figures, figures.get("left_out", {})):
            for key in _COMPARED:
                if not isinstance(part, Mapping) or not _is_figure(part.get(key)):
                    raise RlhfsimError(
                        "bad-value",
                        f"{kind}: {key} is no number",
                        place=source.place(("kinds", kind)),
                        help="write the file anew with --report",
                    )
    return data


def _is_figure(value: object) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) <= MAX_MAGNITUDE
    return value is None


def keep(fresh: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """`fresh` with the committed figures of the kinds that could not be rerun."""
    committed = {
        kind: {**figures, "rerun": False}
        for kind, figures in old.get("kinds", {}).items()
        if kind.split(".")[0] in fresh["not_rerun"]
    }
    kinds = {**fresh["kinds"], **committed}
    return {**fresh, "kinds": kinds, "targets": results(kinds)}


def differences(fresh: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """What differs from the committed figures beyond the tolerance, worse ones first."""
    worse: list[str] = []
    stale: list[str] = []
    for kind in sorted(fresh["kinds"].keys() | old["kinds"].keys()):
        if kind.split(".")[0] in fresh["not_rerun"]:
            continue
        new_figures, old_figures = fresh["kinds"].get(kind), old["kinds"].get(kind)
        if new_figures is None or old_figures is None:
            stale.append(f"{kind}: only {'committed' if new_figures is None else 'computed'}")
            continue
        for part in ("", "left_out"):
            news, olds = (f.get(part, {}) if part else f for f in (new_figures, old_figures))
            for key in _COMPARED:
                new, was = news.get(key), olds.get(key)
                if new == was or (None not in (new, was) and abs(new - was) <= TOLERANCE):
                    continue
                name = f"{kind}, left out" if part else kind
                line = f"{name}: {key} is {_shown(new)}, committed {_shown(was)}"
                (worse if _worse(key, new, was) else stale).append(line)
    return [f"worse: {line}" for line in worse] + [f"stale: {line}" for line in stale]


def _worse(key: str, new: float | None, was: float | None) -> bool:
    if new is None or was is None:
        return new is None
    if key in _WORSE_UP:
        return new > was
    return key in (*_HIGHER_IS_BETTER, "predicted") and new < was


def _shown(value: float | None) -> str:
    return "none" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def dumps(figures: Mapping[str, Any]) -> str:
    """The figures as JSON text; NaN and infinity are a bug."""
    return json.dumps(figures, indent=1, allow_nan=False) + "\n"


def _rounded(data: Any) -> Any:
    """Six significant digits: two machines write the same bytes."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list | tuple) else data
