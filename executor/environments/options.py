"""Options of the shipped environments, which come from run.yaml and have no schema of their own."""

from __future__ import annotations

from typing import Any


def between(name: str, value: Any, low: float, high: float) -> float:
    """The value of a number.

    Raises:
        ValueError: it is none, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"option {name} is {value!r}, not a number from {low:g} to {high:g}")
    return float(value)
