"""Cells of tables, how columns share a width, and numbers as figures and JSON hold them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Fit(NamedTuple):
    """How a column shares the width of a terminal."""

    overflow: Literal["never", "words", "fold", "cut"] = "never"
    """What becomes of text that is too long: the column grows, or lines break, or an ellipsis ends it."""
    ratio: int | None = None
    """Share of the room that is left; None: as wide as its text."""
    width: int | None = None
    max_width: int | None = None


NEVER, WORDS, FOLD = Fit(), Fit("words"), Fit("fold")
REST, CUT = Fit("words", ratio=1), Fit("cut", ratio=1)
"""The room that is left, with lines that break, or with an ellipsis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: Any
    """A string, or what is drawn of a value."""
    value: float | None = None
    """The number behind the text, in the unit of the column, as a figure draws it; None: no number."""


def worth(value: float, text: str) -> Cell:
    """A cell with a number that is written as given."""
    return Cell(text=text, value=rounded(value))


def rounded(value: float) -> float:
    """Six significant digits: what figures draw and tables hold."""
    return float(f"{value:.6g}")


def compact(values: Iterable[float | None]) -> list[float | None]:
    """Rounded numbers of a trace."""
    return [None if v is None else rounded(v) for v in values]


def fields(item: object, *names: str) -> dict[str, Any]:
    """The named fields of an item, as `--json` writes them."""
    return {name: getattr(item, name) for name in names}


def each(items: Iterable[object], *names: str) -> list[dict[str, Any]]:
    """The named fields of every item."""
    return [fields(item, *names) for item in items]


def added(items: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Sums by key, in the order in which keys come."""
    sums: dict[K, float] = {}
    for key, amount in items:
        sums[key] = sums.get(key, 0.0) + amount
    return sums
