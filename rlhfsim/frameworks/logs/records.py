"""What a framework logged, step by step, and what of it could not be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(
    r"\s*(?:np\.\w+\(|tensor\()?\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))\s*\)?s?\s*$"
)
"""A number as Python prints it, also `np.float64(1.5)`, as NumPy 2 does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Metrics of one logged step."""

    step: int
    """As the framework counts."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """All records of a run, in the order of their steps."""

    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()
    """What was left out or mended, a sentence each."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every metric, in the order of its first step."""
        return tuple(dict.fromkeys(name for record in self.records for name in record.values))


def number(value: object) -> float | None:
    """A finite or infinite float from JSON or printed text; None for what is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.match(value) if isinstance(value, str) else None
    return float(found[1]) if found else None


def merged(parts: Sequence[Log]) -> Log:
    """Several files of one run as one log; the same step in two of them is one record.

    A step that stands twice with other times was run again after a restart: the later one counts.
    """
    values: dict[int, dict[str, float]] = {}
    again: set[int] = set()
    for record in (record for part in parts for record in part.records):
        known = values.setdefault(record.step, {})
        if any(not _same(known[name], value) for name, value in record.values.items() if name in known):
            again.add(record.step)
        known.update(record.values)
    notes = [note for part in parts for note in part.notes]
    if again:
        notes.append(f"{_steps(sorted(again))} stand twice with other values: the later ones count")
    records = tuple(Record(step=step, values=found) for step, found in sorted(values.items()))
    return Log(records=records, notes=tuple(notes))


def _same(one: float, other: float) -> bool:
    """Alike to the float32 of TensorBoard; NaN is like NaN."""
    return math.isclose(one, other, rel_tol=1e-5) or (math.isnan(one) and math.isnan(other))


def _steps(steps: Iterable[int]) -> str:
    """`steps 3, 4`; long lists are cut."""
    shown = list(steps)
    rest = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"step{'s' * (len(shown) > 1)} {', '.join(map(str, shown[:8]))}{rest}"
