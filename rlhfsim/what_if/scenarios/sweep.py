"""A scenario of many points as a CSV table that grows; what is in memory does not grow with them.

Points are made, designed and written in batches of neighbours. What an ended run has designed is recalled
from its store, and the table of the next run is the same, byte by byte. Parquet is made of the whole CSV,
since nobody can read a part of it.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rlhfsim.outputs import csv_cell, growing, write_atomically
from rlhfsim.search.requirements import Requirement
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.points import PointQuestion
from rlhfsim.what_if.scenarios.result import PARQUET, PointResult, parquet, row
from rlhfsim.what_if.scenarios.sensitivity import marked, other_work
from rlhfsim.what_if.scenarios.whole_run import points

BATCH = 100
"""Points that are designed side by side."""
KEPT = 500
"""Designs that are kept in memory: equal questions are mostly near each other."""
SAMPLE = 3
"""Points by which the time of all is judged before the first is written."""
UNKNOWN_YET = ("on_front",)
"""Columns that need all points."""


def swept(
    base: PointQuestion,
    cases: Iterable[PointQuestion],
    paths: tuple[str, ...],
    tables: Sequence[Path],
    designs: Designs,
    requirements: Sequence[Requirement],
    told: Callable[[int], object],
) -> tuple[list[PointResult], Counter[str]]:
    """The base, and the points of its work that none of them beats in time and money; `tables` have all.

    With how many points there are, `fitting`, and `of other work`. `told` hears how many are written.
    """
    [first] = points([base], designs, requirements)
    front, counts = list[PointResult](), Counter[str]()
    packed = [path for path in tables if path.suffix == PARQUET]
    plain = next((path for path in tables if path not in packed), None)
    table = plain or packed[0].with_name(f"{packed[0].name}.csv")
    kinds = defaultdict[str, set[type]](set)

    def cells(point: PointResult) -> Iterable[object]:
        found = {name: csv_cell(cell) for name, cell in _cells(point, paths).items()}
        for name, cell in found.items():
            kinds[name].add(type(cell))
        return found.values()

    with growing(table, "points.csv") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(_cells(first, paths))
        lines.writerow(cells(first))
        for batch in _batches(cases):
            some = [
                replace(point, other_work=other_work(point, first))
                for point in points(batch, designs, requirements)
            ]
            lines.writerows(map(cells, some))
            file.flush()
            alike = [point for point in some if point.plan is not None and not point.other_work]
            front = [point for point in marked([first, *front, *alike])[1:] if point.on_front]
            counts["points"] += len(some)
            counts["fitting"] += sum(point.plan is not None for point in some)
            counts["of other work"] += sum(bool(point.other_work) for point in some)
            told(counts["points"])
            designs.forget(KEPT)
    for path in packed:
        write_atomically(path, parquet(table, kinds))
    if plain is None:
        table.unlink()
    return [*marked([first, *front])], counts


def _batches(cases: Iterable[PointQuestion]) -> Iterator[list[PointQuestion]]:
    left = iter(cases)
    while batch := list(islice(left, BATCH)):
        yield batch


def _cells(point: PointResult, paths: tuple[str, ...]) -> dict[str, object]:
    return {name: cell for name, cell in row(point, paths).items() if name not in UNKNOWN_YET}
