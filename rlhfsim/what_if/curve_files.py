"""Curves that a user measured: CSV files of step and value."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.loading import read_text


class CurveRow(NamedTuple):
    """One line of a curve."""

    step: float
    value: float


def _cells(path: Path) -> Iterator[list[str]]:
    """The cells of each line.

    Raises:
        RlhfsimError: the line is no CSV.
    """
    reader = csv.reader(read_text(path).splitlines())
    try:
        yield from reader
    except csv.Error as error:
        raise RlhfsimError(
            "bad-row",
            f"not valid CSV: {error}",
            place=Place(file=str(path), line=reader.line_num),
            help="two numbers, separated by a comma",
        ) from error


def rows_of(path: Path) -> Iterator[CurveRow]:
    """Rows of a curve; a first line without numbers is its header.

    Raises:
        RlhfsimError: a row that is not step and value, or steps that do not ascend.
    """
    last = -math.inf
    for i, cells in enumerate(_cells(path)):
        if not cells:
            continue
        place = Place(file=str(path), line=i + 1, column=1, text=",".join(cells))
        try:
            row = CurveRow(float(cells[0]), float(cells[1]))
        except (ValueError, IndexError) as error:
            if i == 0:
                continue
            raise RlhfsimError(
                "bad-row",
                "a row of the curve is not step,value",
                place=place,
                help="two numbers, separated by a comma",
            ) from error
        if not (math.isfinite(row.step) and math.isfinite(row.value)) or row.step <= last:
            raise RlhfsimError(
                "bad-row",
                "steps of the curve do not ascend, or a number is not finite",
                place=place,
                help="one row a step, in order",
            )
        last = row.step
        yield row
