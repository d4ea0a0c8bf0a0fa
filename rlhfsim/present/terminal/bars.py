"""Horizontal bars of block characters that fit whatever width their table cell has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from rlhfsim.frozen import frozen
from rlhfsim.present.answers.tree import Legend
from rlhfsim.present.tables import Bar, Spark, Word

MIN_WIDTH = 8
FULL, DARK, MEDIUM, LIGHT, OVER = "\u2588", "\u2593", "\u2592", "\u2591", "X"
"""Fillings from heavy to light, and what lies beyond a limit."""
GLYPHS = {"gradients, optimizer": DARK, "KV cache": MEDIUM, "activations, buffers, rest": LIGHT}
"""Look -> filling; others are full."""
STYLES = {
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "strong": "bold",
    "aside": "dim",
    "key": "cyan",
    "busy": "green",
    "lost": "red",
    "weights": "green",
    "gradients, optimizer": "blue",
    "KV cache": "magenta",
    "activations, buffers, rest": "yellow",
    "compute": "green",
    "hbm": "cyan",
    "nvlink": "blue",
    "network": "magenta",
    "wan": "magenta",
    "bubble": "red",
    "tail": "red",
    "overhead": "bright_black",
    **dict.fromkeys(("pcie", "storage", "host", "environment", "rewards", "controller", "custom"), "yellow"),
}
"""Look of a mark, a part of a bar or a resource -> style."""
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


class CellWide:
    """What fills its cell."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the cell allows."""
        return Measurement(MIN_WIDTH, options.max_width)


@dataclass(frozen=True, slots=True)
class HorizontalBar(CellWide):
    """A bar as block characters; cells beyond its limit show an X."""

    bar: Bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line of exactly the cell's width."""
        width = options.max_width
        limit = self.bar.limit
        edge = width if limit is None else self._column(limit, width)
        cells = self._cells(width)
        if limit is not None and edge < width and cells[edge][0] == " ":
            cells[edge] = (_MARK, "dim")
        for i, (glyph, style) in enumerate(cells):
            over = limit is not None and i >= edge and glyph not in (" ", _MARK)
            shown, colour = (OVER, "bold red") if over else (plain(glyph, options.encoding), style)
            yield Segment(shown, Style.parse(colour))
        yield Segment.line()

    def _column(self, amount: float, width: int) -> int:
        scale = self.bar.scale
        return round(width * min(1.0, amount / scale)) if scale > 0 else 0

    def _cells(self, width: int) -> list[tuple[str, str]]:
        """Glyph and style of each column; a bar that is not empty has one column at least."""
        cells = [(" ", "")] * width
        at = self.bar.start
        for amount, look in self.bar.stretches:
            first, last = self._column(at, width), self._column(at + amount, width)
            cells[first:last] = [self._filling(look)] * (last - first)
            at += amount
        if at > self.bar.start and all(glyph == " " for glyph, _ in cells):
            largest = max(self.bar.stretches, key=lambda p: p.amount)
            cells[min(width - 1, self._column(self.bar.start, width))] = self._filling(largest.look)
        return cells

    def _filling(self, look: str) -> tuple[str, str]:
        return LIGHT if self.bar.faint else GLYPHS.get(look, FULL), STYLES.get(look, "")


@frozen
class Axis(CellWide):
    """The header over a column of bars: 0 at the left, a label at a position."""

    label: str
    at: float
    scale: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line of exactly the cell's width."""
        width = options.max_width
        end = round(width * min(1.0, self.at / self.scale)) if self.scale > 0 else width
        line = "0".ljust(max(1, end - len(self.label))) + self.label
        yield Segment(line[:width].ljust(width))
        yield Segment.line()


@dataclass(frozen=True, slots=True)
class BarLegend:
    """What the fillings of bars mean, in the output's own characters."""

    legend: Legend

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """One line."""
        line = Text(style="dim")
        for look in self.legend.looks:
            line.append(plain(GLYPHS.get(look, FULL), options.encoding) * 2, style=STYLES.get(look, ""))
            line.append(f" {look}  ")
        if self.legend.over:
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


def drawn_value(value: Any) -> Any:
    """A text, or what is drawn of a value."""
    match value:
        case Word():
            return Text(value.text, STYLES.get(value.look, ""))
        case Bar():
            return HorizontalBar(value)
        case Spark():
            return Sparkline(value.values)
    return value


def title_over(title: str, values: Sequence[Any]) -> str | Axis:
    """The title of a column; over bars it is placed where their limit is."""
    bar = next((value for value in values if isinstance(value, Bar)), None)
    return Axis(label=title, at=bar.limit or bar.scale, scale=bar.scale) if bar else title
