"""A table of points as `whatif` wrote it: by what points can be chosen, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.extras import need
from rlhfsim.frozen import frozen
from rlhfsim.units import HOUR
from rlhfsim.what_if.scenarios.result import COLUMNS, PARQUET

NAME, FIRST = "name", next(iter(COLUMNS))
"""The columns around what points set."""
NUMBERS = ("gpus", "step_s", "usd_per_step", "run_s", "run_usd")
TEXTS = ("architecture", "other_work")
MOST = 1e15
"""Seconds, dollars and GPUs of a point lie below."""
MOST_VALUES = 200
"""Values of a column up to which points can be chosen by it."""


@frozen
class PointColumn:
    """A column in which points differ."""

    name: str
    """A dotted path that points set, or a column of the result."""
    values: tuple[object, ...]
    """In order; None first, where some points have none."""
    at: tuple[int, ...]
    """Place of each point: which of the values it has."""


@frozen
class PointRow:
    """One point of the table."""

    name: str
    gpus: int
    architecture: str
    seconds: float
    money: float | None


@frozen
class PointTable:
    """All points, as columns."""

    count: int
    per_run: bool
    """Whether times and money are those of a run; else those of a step."""
    columns: tuple[PointColumn, ...]
    seconds: tuple[float | None, ...]
    """None: nothing fits."""
    money: tuple[float | None, ...]
    """USD; None: nothing fits, or no price."""
    gpu_hours: tuple[float | None, ...]
    alike: tuple[int, ...]
    """Points that fit and do the base's work."""
    fastest: PointRow | None
    """The fastest of those."""
    cheapest: PointRow | None
    front: tuple[PointRow, ...]
    """Those of them that no other beats in time and money, the fastest first."""


def read_points(path: Path) -> PointTable:
    """The table in a file.

    Raises:
        RlhfsimError: it is no such table.
    """
    points = _read(path)
    alike = points[points["seconds"].notna() & points["other_work"].isna()]
    return PointTable(
        count=len(points),
        per_run=bool(points["run_s"].notna().any()),
        columns=tuple(_columns(points)),
        seconds=tuple(_numbers(points["seconds"])),
        money=tuple(_numbers(points["money"])),
        gpu_hours=tuple(_numbers(points["seconds"] * points["gpus"] / HOUR)),
        alike=tuple(map(int, alike.index)),
        fastest=next(_rows(alike.nsmallest(1, "seconds")), None),
        cheapest=next(_rows(alike.nsmallest(1, "money")), None),
        front=tuple(_rows(_front(alike))),
    )


def _read(path: Path) -> pd.DataFrame:
    if path.suffix == PARQUET:
        need("pyarrow", purpose="Parquet", otherwise="or report the .csv")
    try:
        points = pd.read_parquet(path) if path.suffix == PARQUET else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise _no_table(path, str(error)) from error
    missing = [column for column in (NAME, *NUMBERS, *TEXTS) if column not in points]
    if missing or points.empty:
        raise _no_table(path, f"it has no column {missing[0]}" if missing else "it has no rows")
    points = points.assign(**{name: _checked(points[name], path) for name in NUMBERS})
    sizeless = points["gpus"].isna() & points["step_s"].notna()
    if sizeless.any():
        raise _no_table(path, "a point has seconds and no gpus", int(sizeless.to_numpy().argmax()))
    runs = points["run_s"].notna()
    return points.assign(
        seconds=points["run_s"].where(runs, points["step_s"]),
        money=points["run_usd"].where(runs, points["usd_per_step"]),
    )


def _checked(column: pd.Series[Any], path: Path) -> pd.Series[Any]:
    """The numbers of a column; empty cells stay empty.

    Raises:
        RlhfsimError: a cell that is no number above 0 (of money: at least 0), or an absurd one.
    """
    found = pd.to_numeric(column, errors="coerce")
    usable = (found > 0) | ((found == 0) & ("usd" in str(column.name)))
    wrong = column.notna() & ~(usable & (found < MOST))
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise _no_table(path, f"{column.name} is {str(column.iloc[row])[:40]!r}, no number above 0", row)
    return found


def _no_table(path: Path, reason: str, row: int | None = None) -> RlhfsimError:
    line = None if row is None or path.suffix == PARQUET else row + 2  # below the head, counted from 1
    return RlhfsimError(
        "no-table-of-points",
        f"this is no table of points: {reason[:200]}",
        place=Place(file=str(path), line=line),
        help="write one with: rlhfsim whatif SCENARIO --csv points.csv",
    )


def _front(points: pd.DataFrame) -> pd.DataFrame:
    ordered = points.dropna(subset=["seconds", "money"]).sort_values(["seconds", "money"])
    return ordered[ordered["money"] < ordered["money"].cummin().shift(fill_value=float("inf"))]


def _rows(points: pd.DataFrame) -> Iterator[PointRow]:
    for row in points.to_dict("records"):
        yield PointRow(
            name=str(row["name"]),
            gpus=int(row["gpus"]),
            architecture=str(row["architecture"]),
            seconds=row["seconds"],
            money=None if pd.isna(row["money"]) else row["money"],
        )


def _columns(points: pd.DataFrame) -> Iterator[PointColumn]:
    """What is set, then what was chosen; not a column that does not vary, or has too many values."""
    names = list(points.columns)
    for name in [*names[names.index(NAME) + 1 : names.index(FIRST)], "gpus", *TEXTS]:
        column: pd.Series[Any] = points[name]
        codes, values = pd.factorize(column, sort=column.dropna().map(type).nunique() <= 1)
        there: list[object] = values.tolist()
        if (codes < 0).any():
            codes, there = codes + 1, [None, *there]
        if 1 < len(there) <= MOST_VALUES:
            yield PointColumn(name=name, values=tuple(there), at=tuple(map(int, codes)))


def _numbers(column: pd.Series[Any]) -> Iterator[float | None]:
    return (None if pd.isna(value) else float(value) for value in column)
