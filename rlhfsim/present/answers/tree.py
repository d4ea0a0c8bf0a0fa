"""What an answer is made of: sections of typed tables, figures, lists and code; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Literal, NamedTuple

from rlhfsim.frozen import frozen
from rlhfsim.present.tables import COUNT, SECONDS, TEXT, Fit, ValueKind, at, each
from rlhfsim.provenance import installed_version

SIGNS = {"~": "yellow", "+": "green", "-": "red", "!": "bold magenta"}
"""Sign of a change -> style in a terminal."""
Look = Literal["ruled", "bare", "plain"]
Data = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""What JSON says, or what makes it where it is asked for."""
Mark = Literal["good", "warn", "bad", "plain", "strong", "aside", "key"]


class RoleLane(NamedTuple):
    """One role on the GPUs of a node: pieces of `span` GPUs from `start` on, each with a label."""

    role: str
    name: str
    layout: str
    """Short form, as tables have it."""
    pieces: tuple[tuple[int, int, str], ...]


class EqualNodes(NamedTuple):
    """Nodes in a row that look the same."""

    title: str
    gpus: int
    lanes: tuple[RoleLane, ...]


class Column(NamedTuple):
    """A column of a table: its title, what it holds of an item, and the key of that in JSON."""

    title: str | None
    """None: in JSON alone."""
    of: Any = ""
    """Name of the item's field, with dots into fields of fields, or a function of the item.

    A number or a name is the place of an entry where the item is a row or a mapping; empty: the title.
    """
    kind: ValueKind = TEXT
    key: str = ""
    """Key in JSON; empty: the last name of `of`, or none where that is no name."""
    fit: Fit | None = None
    """How it shares the width of a terminal; None: as its kind."""
    spare: int = 0
    """Where a narrow terminal has no room the column with the smallest one is left out first; 0: never."""
    narrow: str | None = None
    """Its title in a terminal of few columns; None: the same, empty: it is left out there."""
    narrow_fit: Fit | None = None
    """Its fit there; None: the same."""


GPUS, STEP_TIME = Column("GPUs", "gpus", COUNT), Column("step", "plan.prediction.step_s", SECONDS)
"""Columns that many answers have."""


class TypedTable(NamedTuple):
    """Values under typed columns; walkers give them units and digits."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    """A value a column; None: unknown."""
    name: str = ""
    """Key of its rows in JSON; empty: JSON has them elsewhere or not at all."""
    styles: tuple[str, ...] = ()
    """Styles of the rows in a terminal."""
    notes: tuple[str, ...] = ()
    most: int | None = None
    """Rows that people see; JSON has all."""
    kind: Literal["table"] = "table"
    open: bool = True
    """Shown at once; else behind a summary that opens it."""
    look: Look = "ruled"
    """In a terminal: with a rule below its titles, without, or without titles."""
    apart: bool = True
    """A terminal leaves a blank line above it."""
    wide: bool = False
    """As wide as the terminal, even where no column takes the room that is left."""
    summed: bool = False
    """The last row is the sum of those above it."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its rows in JSON."""
        keys = [_key(column) for column in self.columns]
        return [{key: value for key, value in zip(keys, row, strict=True) if key} for row in self.rows]


def _key(column: Column) -> str:
    name = column.title if column.of == "" else column.of
    return column.key or (name.rpartition(".")[2] if isinstance(name, str) else "")


def _value(item: Any, column: Column) -> Any:
    of = column.title if column.of == "" else column.of
    if callable(of):
        return of(item)
    if isinstance(of, int) or isinstance(item, Mapping):
        return item[of]
    return at(item, str(of))


def table_of(
    caption: str,
    items: Iterable[Any],
    *columns: Column,
    style: Callable[[Any], str] = lambda item: "",
    **more: Any,
) -> TypedTable:
    """A table with a row for every item."""
    every = tuple(items)
    return TypedTable(
        caption=caption,
        columns=columns,
        rows=tuple(tuple(_value(item, column) for column in columns) for item in every),
        styles=tuple(map(style, every)),
        **more,
    )


def pairs(
    caption: str, rows: Iterable[tuple[str, str]], head: tuple[str, str] = ("what", "value")
) -> TypedTable:
    """Names and values."""
    return table_of(caption, rows, *(Column(title, i) for i, title in enumerate(head)))


def hidden(*names: str) -> tuple[Column, ...]:
    """Fields of the items that JSON alone has."""
    return tuple(Column(None, name) for name in names)


class Figure(NamedTuple):
    """One finding with the picture that shows it, in words and as a table too."""

    key: str
    """Name inside the page."""
    title: str
    """The finding."""
    alt: str
    """What the picture shows, for those who do not see it."""
    how: str
    """How to read it."""
    table: TypedTable
    plot: Mapping[str, Any] | None = None
    """Plotly's data and layout; colours are variables of the theme."""
    nodes: tuple[EqualNodes, ...] = ()
    """Instead of a plot: a picture of nodes."""
    zoom: bool = False
    """Whether buttons zoom and move along x."""
    kind: Literal["figure"] = "figure"


class Listing(NamedTuple):
    """Sentences, one under the other."""

    items: tuple[str, ...]
    title: str = ""
    mark: Mark = "plain"
    kind: Literal["listing"] = "listing"


class Note(NamedTuple):
    """A sentence."""

    text: str
    mark: Mark = "plain"
    apart: bool = False
    """A terminal leaves a blank line above it."""
    whole: bool = False
    """It stays in one line of any length, to be copied."""
    kind: Literal["note"] = "note"


class FactList(NamedTuple):
    """Labels with what they say."""

    rows: Mapping[str, str]
    apart: bool = False
    """A terminal leaves a blank line above it."""
    whole: bool = False
    """Each stays in one line of any length, to be copied."""
    kind: Literal["facts"] = "facts"


class Legend(NamedTuple):
    """What the looks of bars mean."""

    looks: tuple[str, ...]
    over: bool
    """Whether some bar goes beyond its limit."""
    kind: Literal["legend"] = "legend"


class Code(NamedTuple):
    """Text to copy."""

    title: str
    text: str
    kind: Literal["code"] = "code"


class Changed(NamedTuple):
    """What differs from a base, in lines that begin with a sign."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Sign (`~`, `+`, `-`, `!`, or blank) and text."""
    kind: Literal["changed"] = "changed"


class PointFilter(NamedTuple):
    """Something that points can be chosen by."""

    label: str
    values: tuple[str, ...]
    at: tuple[int, ...]
    """Place of each point: which of the values it has."""
    chosen: int | None = None
    """The value that is chosen at first; None: any."""


class Explorer(NamedTuple):
    """Many points that a reader filters: a map of two inputs, and time against money."""

    key: str
    title: str
    how: str
    filters: tuple[PointFilter, ...]
    map: tuple[int, int]
    """The filters that span the map at first, across and down."""
    seconds: tuple[float | None, ...]
    """Seconds of each point; None: nothing fits."""
    money: tuple[float | None, ...]
    time_title: str
    money_title: str
    table: TypedTable
    """The best points, for those who do not see the picture."""
    kind: Literal["explorer"] = "explorer"

    @property
    def data(self) -> dict[str, Any]:
        """What the page reads."""
        return {
            "filters": each(self.filters, "label", "values", "at", "chosen"),
            "seconds": self.seconds,
            "money": self.money,
            "time": self.time_title,
            "cost": self.money_title,
        }


Block = Figure | TypedTable | Note | FactList | Legend | Listing | Code | Changed | Explorer


class PageSection(NamedTuple):
    """One question and what answers it."""

    key: str
    heading: str
    blocks: tuple[Block, ...]
    lead: str = ""
    appendix: bool = False
    """For those who check: it comes after everything else."""
    asked: bool = False
    """A terminal shows it only where `--detail` names its key."""
    inset: bool = False
    """A terminal shows its blocks further to the right."""


class Tile(NamedTuple):
    """A figure of the verdict."""

    label: str
    value: Any
    detail: str = ""
    mark: Mark = "plain"
    kind: ValueKind = TEXT
    range: tuple[Any, Any] | None = None
    """P10 and P90 of the value."""


@frozen
class Page:
    """Everything that one answer says."""

    title: str = ""
    subtitle: str = ""
    verdict: str = ""
    mark: Mark = "plain"
    sure: tuple[str, ...] = ()
    """How sure that is, and why."""
    tiles: tuple[Tile, ...] = ()
    sections: tuple[PageSection, ...]
    version: str = field(default_factory=lambda: installed_version("rlhfsim"))
    schema: str = ""
    data: Data = field(default_factory=dict)
    """What JSON says next to the rows of the tables."""

    @property
    def as_data(self) -> dict[str, Any]:
        """The same content for machines: schema, data, and the rows of every table that has a name."""
        blocks = [b.table if isinstance(b, Figure) else b for s in self.sections for b in s.blocks]
        tables = {b.name: b.records for b in blocks if isinstance(b, TypedTable) and b.name}
        data = self.data() if callable(self.data) else self.data
        return {**({"schema": self.schema} if self.schema else {}), **data, **tables}

    @property
    def figures(self) -> tuple[Figure, ...]:
        """In the order of the page."""
        return tuple(b for s in self.sections for b in s.blocks if isinstance(b, Figure))


def facts(rows: Mapping[str, str]) -> tuple[Tile, ...]:
    """Labels and texts."""
    return tuple(Tile(label, "", text) for label, text in rows.items())


def section(key: str, heading: str, *blocks: Block | None, **more: Any) -> PageSection:
    """A section of the blocks that there are."""
    there = tuple(block for block in blocks if block is not None)
    return PageSection(key=key, heading=heading, blocks=there, **more)


def answer(schema: str, *blocks: Block | None, data: Data | None = None, **more: Any) -> Page:
    """An answer of one section."""
    return Page(schema=schema, sections=(section("answer", "", *blocks),), data=data or {}, **more)
