"""How the values of a column read: their unit, digits and side, once for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlhfsim.present import words
from rlhfsim.units import format, likely, percent, significant


class ValueKind(NamedTuple):
    """What a column or a figure holds, and how it reads."""

    text: Callable[[Any], str]
    number: bool = True
    """Whether its values are numbers: they stand to the right and a page sorts by them."""
    missing: str = "-"
    """Text in place of None."""

    def shown(self, value: Any) -> str:
        """A value for people."""
        return self.missing if value is None else self.text(value)


TEXT = ValueKind(str, number=False, missing="")
NAMES = ValueKind(lambda names: words.listed(list(names)) or "-", number=False)
PLAN = ValueKind(words.plan_text, number=False, missing="-")
"""A plan by its kind and layouts."""
COUNT = ValueKind(lambda value: f"{value:,.0f}")
NODES = ValueKind(lambda value: f"{value:,}" if value else "-")
SECONDS = ValueKind(lambda value: format(value, "s"))
DURATION = ValueKind(words.seconds)
"""Seconds as `2 min 54 s`, `3 h 5 min`."""
BYTES = ValueKind(words.size)
SHARE = ValueKind(percent)
PROBABILITY = ValueKind(likely)
FACTOR = ValueKind(lambda value: words.signed(value - 1))
"""A ratio as the change against 1."""
START = ValueKind(lambda value: words.seconds(value) if value else "now")
NUMBER = ValueKind(significant)
MONEY = ValueKind(words.money, missing="unknown")
COEFFICIENT = ValueKind(words.value_text)
"""A figure with its own unit."""
