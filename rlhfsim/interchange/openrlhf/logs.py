"""OpenRLHF: `timing/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import Record, pairs
from rlhfsim.interchange.openrlhf.configuration import CONFIGURATION

_LINE = re.compile(r"Global step (\d{1,9}): (\{.*)$")


def record_of_line(line: str) -> Record | None:
    """The record of `Global step 3: {'timing/generation': 1.5, ...}`."""
    match = _LINE.search(line)
    return Record(step=int(match[1]), values=pairs(match[2])) if match else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **metrics_of("openrlhf"),
    console=lambda: record_of_line,
    prompts_of=lambda s, records: _prompt(records),
)


def _prompt(records: Sequence[Record]) -> float | None:
    """`total_length` - `response_length`, which releases up to v0.8 logged; None: not logged."""
    both = [
        r.values["total_length"] - r.values["response_length"]
        for r in records
        if {"total_length", "response_length"} <= r.values.keys()
    ]
    return sum(both) / len(both) if both else None
