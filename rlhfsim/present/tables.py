"""A table as data: titled columns over items, and notes; the terminal and the page render it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
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
    """A string; in a terminal also a bar."""
    value: float | None = None
    """The number behind the text, in the unit of the column, as a figure draws it; None: no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    """Rows under titled columns."""

    caption: str = ""
    head: tuple[Any, ...]
    """Titles; `>` before one sets the column to the right in a terminal."""
    rows: tuple[tuple[Cell, ...], ...]
    open: bool = True
    """Shown at once; else behind a summary that opens it."""
    fit: Mapping[Any, Fit]
    """By title; other columns never break."""
    styles: tuple[str, ...]
    """Styles of the rows."""
    notes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    """Titles of columns for which a narrow terminal may have no room, the first to go first."""
    kind: Literal["table"] = "table"

    @property
    def numbers(self) -> set[float]:
        """Every number in it."""
        return {cell.value for row in self.rows for cell in row if cell.value is not None}

    def without(self, title: str) -> TableData:
        """The table without a column."""
        kept = [i for i, known in enumerate(self.head) if known != title]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, head=tuple(self.head[i] for i in kept), rows=rows)


def table(
    caption: str,
    items: Iterable[T],
    *columns: tuple[Any, Callable[[T], Any]],
    style: Callable[[T], str] = lambda item: "",
    fit: Mapping[Any, Fit] | None = None,
    notes: Iterable[str] = (),
    open: bool = True,
) -> TableData:
    """One row an item, one column a title with what it shows of the item: a text, a cell or a bar."""
    known = tuple(items)
    rows = ((shown(item) for _, shown in columns) for item in known)
    styles = [style(item) for item in known]
    data = grid([title for title, _ in columns], rows, fit=fit, styles=styles, notes=notes)
    return replace(data, caption=caption, open=open)


def grid(
    titles: Sequence[Any],
    rows: Iterable[Iterable[Any]],
    *,
    fit: Mapping[Any, Fit] | None = None,
    styles: Sequence[str] = (),
    notes: Iterable[str] = (),
    spare: Sequence[str] = (),
) -> TableData:
    """Rows of texts, cells or bars under titles; without styles all rows are plain."""
    cells = tuple(tuple(_cell(shown) for shown in row) for row in rows)
    return TableData(
        head=tuple(titles),
        rows=cells,
        fit=fit or {},
        styles=tuple(styles) or ("",) * len(cells),
        notes=tuple(notes),
        spare=tuple(spare),
    )


def _cell(shown: Any) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(text=shown)


def number(value: float | None, spec: str = "g", none: str = "unknown") -> Cell:
    """A cell with a number in a format; `none` without one."""
    return Cell(text=none) if value is None else worth(value, format(value, spec))


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
