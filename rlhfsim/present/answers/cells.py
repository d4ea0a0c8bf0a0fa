"""What a cell of a table holds that is drawn: bars, lines of values, words in a colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhfsim.units import percent, significant


class Word(NamedTuple):
    """A text that has the look of what it names."""

    text: str
    look: str
    """A resource, a group of memory, or a mark."""

    def __str__(self) -> str:
        """The text alone."""
        return self.text


class Stretch(NamedTuple):
    """A stretch of a bar."""

    amount: float
    """In the unit of the bar's scale."""
    look: str


class Bar(NamedTuple):
    """Stretches side by side from `start` on."""

    stretches: Sequence[Stretch]
    scale: float
    """Amount that the full width stands for."""
    start: float = 0.0
    limit: float | None = None
    """Amount beyond which there is nothing to be had; the title of the column stands above it."""
    faint: bool = False

    def __str__(self) -> str:
        """Its share of what there is."""
        return percent(sum(stretch.amount for stretch in self.stretches) / (self.limit or self.scale))


class Spark(NamedTuple):
    """Values in a row, between the smallest and the largest."""

    values: Sequence[float]

    def __str__(self) -> str:
        """The first and the last."""
        return " to ".join(map(significant, (self.values[0], self.values[-1])))
