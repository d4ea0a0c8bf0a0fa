"""The documented columns of the measurement tables, one schema per table: `columns.yaml`.

A table is recognised by its signature (the columns no other table has together); further
documented columns may be left out of a user's file and then read as blank. A number is checked
when the file is read: finite, and not negative unless the schema says it may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """Columns of one measurement table."""

    name: str
    """File name in `lab/scoreboard/data`, without `.csv`."""
    signature: tuple[str, ...]
    """Columns that must be there and that tell the table from the others."""
    text: frozenset[str]
    """Columns of words."""
    numeric: frozenset[str]
    """Columns of numbers; a cell such as `37-40` is kept and makes only its own row unusable."""
    signed: frozenset[str]
    """Numeric columns that may be negative (a difference of two readings)."""

    @property
    def columns(self) -> frozenset[str]:
        """Every documented column."""
        return self.text | self.numeric


def _tables() -> dict[str, TableSchema]:
    text = (resources.files("rlhfsim.validation") / "columns.yaml").read_text(encoding="utf-8")
    return {
        name: TableSchema(
            name=name,
            signature=tuple(columns["signature"].split()),
            text=frozenset(columns["text"].split()),
            numeric=frozenset(columns["numeric"].split()),
            signed=frozenset(columns.get("signed", "").split()),
        )
        for name, columns in yaml.safe_load(text).items()
    }


TABLES = _tables()
"""In the order in which they are tried."""
