"""Metrics from JSON lines, or from the `trainer_state.json` of a transformers Trainer.

Accepted forms of a line: `{"step": 3, "data": {...}}` (verl's file logger) and `{"step": 3, "name": 1.5}`;
the step may be called as in `STEPS` (exports of Weights & Biases, OpenRLHF, transformers). What is no
number is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frameworks.logs.records import Log, Record, number
from rlhfsim.specs.loading import parse_json

STEPS = ("step", "global_step", "train/global_step", "_step")
"""Names of the step, the first that is there counts."""
SHOWN = 3
"""Broken lines that are named by number."""


def read_jsonl(text: str, name: str) -> Log:
    """The records of JSON lines.

    Raises:
        RlhfsimError: no line is a JSON object with a step.
    """
    found, broken = [], []
    rows = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for i, line in rows:
        record = _record(line)
        (found.append(record) if record else broken.append(i))
    if not found:
        raise RlhfsimError(
            "no-metrics",
            "no line is a JSON object with a step",
            place=Place(file=name, line=rows[0][0] if rows else None),
            help=f"one object a line, with {', '.join(STEPS[:2])} and numbers by name",
        )
    return Log(records=tuple(found), notes=tuple(_broken(broken, len(rows), rows[-1][0], name)))


def _broken(lines: list[int], total: int, last: int, name: str) -> Iterator[str]:
    if lines == [last]:
        yield f"{Path(name).name}: the last line is cut off and was left out"
    elif lines:
        shown = ", ".join(map(str, lines[:SHOWN])) + (", ..." if len(lines) > SHOWN else "")
        yield f"{Path(name).name}: {len(lines)} of {total} lines are no metrics of a step (line {shown})"


def _record(line: str) -> Record | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record_of(data) if isinstance(data, dict) else None


def record_of(data: Mapping[str, Any]) -> Record | None:
    """A record from one JSON object; None where it has no step."""
    inner = data.get("data")
    values = inner if isinstance(inner, Mapping) else data
    step = next((number(data[name]) for name in STEPS if name in data), None)
    if step is None or step != step or step < 0 or step > 1e12:
        return None
    numbers = {str(k): number(v) for k, v in values.items() if k not in STEPS}
    return Record(step=int(step), values={k: v for k, v in numbers.items() if v is not None})


def read_trainer_state(text: str, name: str) -> Log:
    """The records of `log_history` in a transformers `trainer_state.json`.

    Raises:
        RlhfsimError: malformed, or without such records.
    """
    data = parse_json(text, name).data
    history = data.get("log_history") if isinstance(data, dict) else None
    rows = [record_of(row) for row in history or () if isinstance(row, dict)]
    found = tuple(row for row in rows if row is not None)
    if not found:
        raise RlhfsimError(
            "no-metrics",
            "there is no log_history with steps in it",
            place=Place(file=name),
            help="give trainer_state.json of a checkpoint, or JSON lines",
        )
    return Log(records=found)
