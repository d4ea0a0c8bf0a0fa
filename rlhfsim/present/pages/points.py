"""The page of a table of points: thousands to filter, as a map of two inputs and as time against money."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlhfsim.present import words
from rlhfsim.present.answers.tree import (
    GPUS,
    Code,
    Column,
    Explorer,
    Page,
    PointFilter,
    Tile,
    section,
    table_of,
)
from rlhfsim.present.input_names import input_name
from rlhfsim.present.tables import DURATION, FIGURE, compact
from rlhfsim.provenance import installed_version
from rlhfsim.what_if.scenarios.point_table import PointTable, read_points

SHOWN = 30
"""Rows of the table for readers without a browser that draws."""
LABELS = {"gpus": "GPUs", "architecture": "plan", "other_work": "other work"}
ABSENT = {"gpus": "nothing fits", "architecture": "nothing fits", "other_work": "none"}
"""What a point has that has no value in a column; elsewhere it is as the base."""
SIZE = "cluster.node_groups.0.gpus"


def points_page(path: Path, *, title: str | None = None) -> Page:
    """The page of a table that `whatif --csv` or `--parquet` has written.

    Raises:
        RlhfsimError: it is no such table.
    """
    points = read_points(path)
    fits = sum(seconds is not None for seconds in points.seconds)
    return Page(
        title=title or f"What if: {points.count:,} points",
        subtitle=f"from {path.name}",
        verdict=_verdict(points),
        mark="good" if fits == points.count else "warn" if fits else "bad",
        sure=("Every point is designed anew; the table has P10 and P90 of each step.",),
        tiles=(
            Tile("Points", f"{points.count:,}", "the base among them"),
            Tile("With a plan that fits", f"{fits:,}", f"of {points.count:,}"),
            Tile("Of the base's work", f"{len(points.alike):,}", "compared as they are"),
        ),
        sections=(
            section("points", "All points", _explorer(points)),
            section("reproduce", "Reproduce", Code("Commands", f"rlhfsim report {path.name}"), appendix=True),
        ),
        version=installed_version("rlhfsim"),
    )


def _explorer(points: PointTable) -> Explorer:
    per = "run" if points.per_run else "step"
    fitting = [money for money, seconds in zip(points.money, points.seconds, strict=True) if seconds]
    priced = None not in fitting
    filters = tuple(_filters(points))
    return Explorer(
        "explorer",
        "Filter by what points set, and by what was chosen",
        how="Choose values: the map shows the best matching point for each pair of two inputs, the cloud the "
        "time and the money of matching points. The line joins those that none of them beats in both.",
        filters=filters,
        map=_widest(filters, points.alike),
        seconds=tuple(compact(points.seconds)),
        money=tuple(compact(points.money if priced else points.gpu_hours)),
        time_title=f"time of a {per}",
        money_title=f"{'USD' if priced else 'GPU-hours'} per {per}",
        table=table_of(
            f"Points of the base's work that no other beats ({len(points.front):,})",
            points.front[:SHOWN],
            Column("point", "name"),
            GPUS,
            Column("plan", "architecture"),
            Column(f"time of a {per}", "seconds", DURATION),
            Column(f"USD per {per}", "money", FIGURE),
        ),
    )


def _filters(points: PointTable) -> Iterator[PointFilter]:
    """One for each column; the number of GPUs not twice."""
    names = {column.name for column in points.columns}
    for column in points.columns:
        absent = ABSENT.get(column.name, "as in the base")
        if column.name != "gpus" or SIZE not in names:
            yield PointFilter(
                label=LABELS.get(column.name) or input_name(column.name),
                values=tuple(absent if value is None else _text(value) for value in column.values),
                at=column.at,
                chosen=0 if column.name == "other_work" and column.values[0] is None else None,
            )


def _widest(filters: Sequence[PointFilter], rows: Iterable[int]) -> tuple[int, int]:
    """Which two have the most values among these points: what a map shows at first."""
    rows = list(rows)
    spread = sorted(range(len(filters)), key=lambda i: -len({filters[i].at[row] for row in rows}))
    first, second, *_ = *spread, 0, 0
    return min(first, second), max(first, second)


def _text(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _verdict(points: PointTable) -> str:
    fastest, cheapest = points.fastest, points.cheapest
    if fastest is None:
        return f"None of {points.count:,} points does the base's work with a plan that fits."
    said = (
        f"Fastest of {len(points.alike):,} points of the base's work: {fastest.name}, "
        f"{words.seconds(fastest.seconds)} a {'run' if points.per_run else 'step'}"
    )
    if cheapest is None or cheapest.money is None:
        return f"{said}."
    return f"{said}; cheapest: {cheapest.name}, {words.money(cheapest.money)}."
