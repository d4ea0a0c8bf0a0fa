"""What a page is made of: sections of figures, tables, lists and code; no HTML and no drawing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mark = Literal["good", "warn", "bad", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: str
    value: float | None = None
    """The number behind the text, in the unit of the column, as a figure draws it; None: no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: Literal["table"] = "table"
    open: bool = True
    """Shown at once; else behind a summary that opens it."""

    @property
    def numbers(self) -> set[float]:
        """Every number in it."""
        return {cell.value for row in self.rows for cell in row if cell.value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One role on the GPUs of a node: pieces of `span` GPUs from `start` on, each with a label."""

    role: str
    name: str
    pieces: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes in a row that look the same."""

    title: str
    gpus: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One finding with the picture that shows it, in words and as a table too."""

    key: str
    """Name inside the page."""
    title: str
    """The finding."""
    alt: str
    """What the picture shows, for those who do not see it."""
    how: str
    """How to read it."""
    plot: Mapping[str, Any] | None = None
    """Plotly's data and layout; colours are variables of the theme."""
    nodes: tuple[NodeGroup, ...] = ()
    """Instead of a plot: a picture of nodes."""
    table: Table
    zoom: bool = False
    """Whether buttons zoom and move along x."""
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Sentences, one under the other."""

    title: str
    items: tuple[str, ...]
    mark: Mark = "plain"
    kind: Literal["listing"] = "listing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text to copy."""

    title: str
    text: str
    kind: Literal["code"] = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What differs from a base, in lines that begin with a sign."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Sign (`~`, `+`, `-`, `!`, or blank) and text."""
    kind: Literal["changed"] = "changed"


Block = Figure | Table | Listing | Code | Changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One question and what answers it."""

    key: str
    heading: str
    lead: str = ""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure of the verdict."""

    label: str
    value: str
    detail: str
    mark: Mark = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that one file shows."""

    title: str
    subtitle: str
    verdict: str
    mark: Mark
    sure: tuple[str, ...]
    """How sure that is, and why."""
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    version: str

    @property
    def figures(self) -> tuple[Figure, ...]:
        """In the order of the page."""
        return tuple(b for s in self.sections for b in s.blocks if isinstance(b, Figure))


def words(text: str) -> Cell:
    """A cell without a number."""
    return Cell(text=text)


def number(value: float | None, text: str | None = None) -> Cell:
    """A cell with a number, written as given or as it is; `unknown` without one."""
    if value is None:
        return Cell(text="unknown" if text is None else text)
    return Cell(text=f"{value:g}" if text is None else text, value=rounded(value))


def rounded(value: float) -> float:
    """Six significant digits: what figures draw and tables hold."""
    return float(f"{value:.6g}")


def compact(values: Sequence[float | None]) -> list[float | None]:
    """Rounded numbers of a trace."""
    return [None if v is None else rounded(v) for v in values]
