"""Horizontal bars of block characters that fit whatever width their table cell has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

MIN_WIDTH = 8
FULL, DARK, MEDIUM, LIGHT, OVER = "\u2588", "\u2593", "\u2592", "\u2591", "X"
"""Fillings from heavy to light, and what lies beyond a limit."""
_ASCII = {FULL: "#", DARK: "+", MEDIUM: "=", LIGHT: ".", "\u2502": "|"}
_MARK = "\u2502"


def plain(glyph: str, encoding: str) -> str:
    """The glyph, or its ASCII stand-in where the output cannot show blocks."""
    return glyph if encoding.lower().startswith("utf") else _ASCII.get(glyph, glyph)


LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_LEVELS = "_.-=+*%#"
"""Heights of a sparkline where the output has no blocks."""
ALIKE = 1e-6
"""Relative spread below which values are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a bar."""

    amount: float
    """In the unit of the bar's scale."""
    glyph: str = FULL
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalBar:
    """Stretches side by side from `offset` on; cells beyond `limit` show an X."""

    stretches: Sequence[Stretch]
    scale: float
    """Amount that the full width stands for."""
    offset: float = 0.0
    limit: float | None = None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the cell allows."""
        return Measurement(MIN_WIDTH, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line of exactly the cell's width."""
        width = options.max_width
        edge = width if self.limit is None else self._column(self.limit, width)
        cells = self._cells(width)
        if self.limit is not None and edge < width and cells[edge][0] == " ":
            cells[edge] = (_MARK, "dim")
        for i, (glyph, style) in enumerate(cells):
            over = self.limit is not None and i >= edge and glyph not in (" ", _MARK)
            shown, colour = (OVER, "bold red") if over else (plain(glyph, options.encoding), style)
            yield Segment(shown, Style.parse(colour))
        yield Segment.line()

    def _column(self, amount: float, width: int) -> int:
        return round(width * min(1.0, amount / self.scale)) if self.scale > 0 else 0

    def _cells(self, width: int) -> list[tuple[str, str]]:
        """Glyph and style of each column; a bar that is not empty has one column at least."""
        cells = [(" ", "")] * width
        at = self.offset
        for stretch in self.stretches:
            first, last = self._column(at, width), self._column(at + stretch.amount, width)
            cells[first:last] = [(stretch.glyph, stretch.style)] * (last - first)
            at += stretch.amount
        if at > self.offset and all(glyph == " " for glyph, _ in cells):
            largest = max(self.stretches, key=lambda p: p.amount)
            cells[min(width - 1, self._column(self.offset, width))] = (largest.glyph, largest.style)
        return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The header over a column of bars: 0 at the left, a label at a position."""

    label: str
    at: float
    scale: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the bars below."""
        return Measurement(MIN_WIDTH, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line of exactly the cell's width."""
        width = options.max_width
        end = round(width * min(1.0, self.at / self.scale)) if self.scale > 0 else width
        line = "0".ljust(max(1, end - len(self.label))) + self.label
        yield Segment(line[:width].ljust(width))
        yield Segment.line()


@dataclass(frozen=True, slots=True)
class BarLegend:
    """What the fillings of bars stand for, in the output's own characters."""

    looks: Mapping[str, tuple[str, str]]
    """Words -> glyph and colour."""
    over: bool
    """Whether some bar goes beyond its GPU."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """One line."""
        line = Text(style="dim")
        for words, (glyph, colour) in self.looks.items():
            line.append(plain(glyph, options.encoding) * 2, style=colour)
            line.append(f" {words}  ")
        if self.over:
            line.append("XX beyond the GPU", style="red")
        yield line


@dataclass(frozen=True, slots=True)
class Sparkline:
    """One character a value between the smallest and the largest; merged where they do not fit."""

    values: Sequence[float]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As many characters as values, fewer where there is no room."""
        return Measurement(1, min(len(self.values), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment | Text]:
        """One line."""
        levels = LEVELS if options.encoding.lower().startswith("utf") else ASCII_LEVELS
        yield Text(spark(merged(self.values, options.max_width), levels), no_wrap=True)


def spark(values: Sequence[float], levels: str = LEVELS) -> str:
    """Heights in proportion between minimum and maximum; the middle height where all are alike."""
    low, high = min(values), max(values)
    if high - low <= ALIKE * abs(high):
        return levels[len(levels) // 2 - 1] * len(values)
    top = len(levels) - 1
    return "".join(levels[round(top * (v - low) / (high - low))] for v in values)


def merged(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of neighbours."""
    each = -(-len(values) // width)
    groups = [values[i : i + each] for i in range(0, len(values), each)]
    return [sum(g) / len(g) for g in groups]
