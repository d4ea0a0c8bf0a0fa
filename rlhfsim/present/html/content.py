"""What a page is made of: sections of figures, tables, lists and code; no HTML and no drawing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhfsim.present.tables import TableData

Mark = Literal["good", "warn", "bad", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLane:
    """One role on the GPUs of a node: pieces of `span` GPUs from `start` on, each with a label."""

    role: str
    name: str
    layout: str
    """Short form, as tables have it."""
    pieces: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualNodes:
    """Nodes in a row that look the same."""

    title: str
    gpus: int
    lanes: tuple[RoleLane, ...]


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
    nodes: tuple[EqualNodes, ...] = ()
    """Instead of a plot: a picture of nodes."""
    table: TableData
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFilter:
    """Something that points can be chosen by."""

    label: str
    values: tuple[str, ...]
    at: tuple[int, ...]
    """Of each point: which of the values it has."""
    chosen: int | None = None
    """The value that is chosen at first; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """Many points that a reader filters: a map of two inputs, and time against money."""

    key: str
    title: str
    how: str
    filters: tuple[PointFilter, ...]
    map: tuple[int, int]
    """The filters that span the map at first, across and down."""
    seconds: tuple[float | None, ...]
    """Of each point; None: nothing fits."""
    money: tuple[float | None, ...]
    time_title: str
    money_title: str
    table: TableData
    """The best points, for those who do not see the picture."""
    kind: Literal["explorer"] = "explorer"

    @property
    def data(self) -> dict[str, Any]:
        """What the page reads."""
        return {
            "filters": [
                {"label": a.label, "values": a.values, "at": a.at, "chosen": a.chosen} for a in self.filters
            ],
            "seconds": self.seconds,
            "money": self.money,
            "time": self.time_title,
            "cost": self.money_title,
        }


Block = Figure | TableData | Listing | Code | Changed | Explorer


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """One question and what answers it."""

    key: str
    heading: str
    lead: str = ""
    blocks: tuple[Block, ...]
    appendix: bool = False
    """For those who check: it stands behind everything else."""


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
    sections: tuple[PageSection, ...]
    version: str

    @property
    def figures(self) -> tuple[Figure, ...]:
        """In the order of the page."""
        return tuple(b for s in self.sections for b in s.blocks if isinstance(b, Figure))


def section(
    key: str, heading: str, *blocks: Block | None, lead: str = "", appendix: bool = False
) -> PageSection:
    """A section of the blocks that there are."""
    there = tuple(block for block in blocks if block is not None)
    return PageSection(key=key, heading=heading, lead=lead, blocks=there, appendix=appendix)
