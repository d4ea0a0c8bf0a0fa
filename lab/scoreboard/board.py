"""The scoreboard: figures of every kind from its outcomes, and the comparison with committed ones.

`python -m lab.scoreboard --check reports/accuracy.json` fails when the committed figures are stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.decode import kind as decode
from lab.decode import throughput_peer
from lab.scoreboard import transfer
from lab.scoreboard.blind import blind, reference_errors
from lab.scoreboard.intervals import with_intervals
from lab.scoreboard.left_out import refits, without
from lab.scoreboard.reliability import above_median, by_group, groups_covered, odds, order_across_gpus
from lab.scoreboard.rows import part_of, rows_of
from lab.scoreboard.targets import results
from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.specs.loading import checked, convert, parse_json, read_text
from rlhfsim.specs.quantities import MAX_MAGNITUDE
from rlhfsim.validation import assumptions, statistics
from rlhfsim.validation.kinds.weight_sync import framework_of
from rlhfsim.validation.outcome import Outcome, publisher
from rlhfsim.validation.rows import Row
from rlhfsim.validation.scoreboard import (
    REFERENCE,
    SCHEMA,
    by_kind,
    figures_of,
    kind_figures,
    order_figures,
    rounded,
    row_record,
    source_figures,
)
from rlhfsim.validation.tables import ORDER, SECTIONS, run

TOLERANCE = 0.001
"""Figures that differ by less than 0.1 percentage points are the same."""
PEER = "peer_s"
"""Key of `Outcome.detail` with the prediction of another planner."""
_ERRORS = ("median_abs_error", "mean_abs_error", "p90_abs_error")
_HIGHER_IS_BETTER = ("within_factor_2", "recall", "right_order")
_WORSE_UP = (*_ERRORS, "false_alarms", "brier")
_COMPARED = ("rows", "predicted", "scored", "fit", *_WORSE_UP, "bias", *_HIGHER_IS_BETTER)
REFITTED: Mapping[str, Callable[[Row], str | None]] = {
    "training": lambda row: None,
    "rlhf": lambda row: None,
    "weight_sync": lambda row: framework_of(assumptions.apply("weight_sync", row)[0]),
}
"""Sections whose fits are repeated without a publisher, and the framework whose own fit a row was in."""
Progress = Callable[[str], None]


def collect(
    kinds: Sequence[str] = (), progress: Progress | None = None, *, discrepancy: bool = True
) -> tuple[list[Outcome], list[str]]:
    """Outcomes of the published rows of some kinds, and the sections not rerun.

    Without `discrepancy` intervals hold what the coefficients say, and no more.
    """
    outcomes: list[Outcome] = []
    not_rerun = []
    for name in _sections(kinds):
        if progress:
            progress(name)
        if name == "decode" and find_spec("aiconfigurator_core") is None:
            not_rerun.append(name)
        else:
            outcomes += decode.outcomes() if name == "decode" else predicted(name)
    return (with_intervals(outcomes) if discrepancy else outcomes), not_rerun


def _sections(kinds: Sequence[str]) -> list[str]:
    """The sections that score any of `kinds` (`memory` or `memory.weights`); all when empty."""
    for kind in kinds:
        if kind.split(".")[0] not in ORDER:
            raise unknown_name("kind", kind, ORDER)
    return [name for name in ORDER if not kinds or name in {kind.split(".")[0] for kind in kinds}]


def predicted(section: str) -> list[Outcome]:
    """Outcomes of the published rows of one section, with those that its fits give without their publisher."""
    rows = rows_of(SECTIONS[section])
    unseen = _unseen(section, rows)
    outcomes = [_with_blind(o, unseen.get((o.kind, o.file, o.line))) for o in marked(section, rows)]
    return outcomes + (transfer.outcomes(rows, outcomes) if section == "rlhf" else [])


def marked(section: str, rows: Sequence[Row]) -> list[Outcome]:
    """Outcomes of published rows, those of rows that fitted a constant with part `fit`."""
    where = {(row.file, row.line): row for row in rows}
    outcomes = run(section, rows)
    outcomes = [replace(o, part=part_of(o.kind, where[o.file, o.line])) for o in outcomes]
    return throughput_peer.beside(outcomes) if section == "inference" else outcomes


def _unseen(section: str, rows: Sequence[Row]) -> dict[tuple[str, str, int], Outcome]:
    """The outcomes of rows that a fit read, predicted by coefficients that no row of their publisher gave."""
    groups: dict[str, list[Row]] = {}
    for row in rows if section in REFITTED else ():
        if refits(publisher(row.source), REFITTED[section](row)):
            groups.setdefault(publisher(row.source), []).append(row)
    return {
        (o.kind, o.file, o.line): o
        for name, group in groups.items()
        for o in run(section, group, without(name))
    }


def _with_blind(o: Outcome, unseen: Outcome | None) -> Outcome:
    if unseen is None or unseen.predicted is None:
        return o
    return replace(o, blind=unseen.predicted, blind_low=unseen.low, blind_high=unseen.high)


def board(outcomes: Iterable[Outcome], not_rerun: Sequence[str] = ()) -> dict[str, Any]:
    """The figures as plain data: what the committed file holds."""
    outcomes = list(outcomes)
    kinds = {kind: _kind(kind, rows) for kind, rows in by_kind(outcomes).items()}
    figures = {
        "schema": SCHEMA,
        "kinds": kinds,
        "sources": {s: _source(rows) for s, rows in statistics.by_source(outcomes).items()},
        "odds": odds(outcomes),
        "targets": results(kinds),
        "not_rerun": list(not_rerun),
    }
    if step := [o for o in outcomes if o.kind == "rlhf.step" and o.error is not None]:
        figures["steps"] = [_step(o) for o in step]
    result: dict[str, Any] = rounded(figures)
    return result


def _source(rows: list[Outcome]) -> dict[str, Any]:
    """Figures of one publication without the pairs of its rows."""
    alone = source_figures([o for o in rows if o.kind != transfer.KIND])
    return {**alone, "kinds": sorted({o.kind for o in rows})}


def _step(o: Outcome) -> dict[str, Any]:
    """One published step for the figure of an answer's page."""
    return {**row_record(o), "low": o.low, "high": o.high, "part": o.part, "assumptions": o.assumptions}


def _kind(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    figures = {**kind_figures(kind, rows), "left_out": _left_out(kind, rows)}
    reference = reference_errors(rows, PEER)
    if reference["rows"]:
        figures[REFERENCE] = reference
    return {**figures, **_transferred(rows)} if kind == transfer.KIND else figures


def _left_out(kind: str, rows: list[Outcome]) -> dict[str, Any]:
    """Figures with no row of the publisher in any fit; {} where a row of its own calibrates."""
    if kind == transfer.KIND:
        return {}
    unseen = blind(rows)
    by_publisher = statistics.grouped(unseen, lambda o: publisher(o.source))
    groups = by_group(rows)
    return {
        **figures_of(kind, unseen),
        **order_figures(unseen),
        "above_median": above_median(unseen),
        "groups_covered": groups_covered(groups),
        "order_across_gpus": order_across_gpus(unseen),
        "groups": groups,
        "publishers": {name: figures_of(kind, group) for name, group in by_publisher.items()},
    }


def _transferred(rows: list[Outcome]) -> dict[str, Any]:
    """The same pairs without calibration and with the step's ratio alone, and pairs of one model."""
    same = [o for o in rows if o.detail.get(transfer.SAME)]
    return {
        "cold": reference_errors(rows, transfer.COLD),
        "ratio": reference_errors(rows, transfer.RATIO),
        "same_model": figures_of(transfer.KIND, same),
        "same_model_cold": reference_errors(same, transfer.COLD),
        "cold_sources": {
            source: reference_errors(group, transfer.COLD)
            for source, group in statistics.by_source(rows).items()
        },
    }


# --- committed figures ----------------------------------------------------------------------------


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class _Board:
    """What is compared of committed figures."""

    kinds: dict[str, dict[str, Any]]


def read_board(path: Path) -> dict[str, Any]:
    """Committed figures.

    Raises:
        RlhfsimError: not a file written by `python -m lab.scoreboard --report`.
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
