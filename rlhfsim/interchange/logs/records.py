"""What a framework logged, step by step: from console text, printed dicts and JSON lines.

Accepted forms of a JSON line: `{"step": 3, "data": {...}}` (verl's file logger) and `{"step": 3, "name":
1.5}`; the step may be called as in `STEPS` (exports of Weights & Biases, OpenRLHF, transformers). What is
no number is left out.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import parse_json

STEPS = ("step", "global_step", "train/global_step", "_step")
"""Names of the step, the first that is there counts."""
SHOWN = 3
"""Broken lines that are named by number."""
DECIMAL = r"-?\d+(?:\.\d+)?"
"""A number in the text of a log, for patterns that know what is around it."""
_NUMBER = re.compile(
    r"^\s*+(?:np\.\w+\(|tensor\()?\s*+([-+]?(?:\d++(?:_\d++)*+(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?"
    r"|[-+]?(?:nan|inf))\s*+\)?s?\s*+$"
)
"""A number as Python prints it, also `np.float64(1.5)`, as NumPy 2 does."""
_ITEM = re.compile(r"['\"]([^'\"]+)['\"]: ('[^']*'|\"[^\"]*\"|[^,{}\[\]]{1,200}+)(?=[,}])")
"""A key and a value that ends: of a dict that is cut off the last item does not count. Numbers are short."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07")
_PREFIX = re.compile(r"^\s*\((?:[^()\s]+\s+)?(?:[\w.:-]+\s+)*pid=\d+(?:,\s*ip=[\w.:]+)?\)\s?")
"""`(TaskRunner pid=4242, ip=10.0.0.1) ` and `(main_task pid=17) `."""
_LINE_END = re.compile(r"[\r\n]+|(?=\((?:[^()\s]+\s+){1,4}pid=\d+(?:, ip=[\w.:]+)?\) )")
"""Ray also writes the line of a process behind another's, without an end between them."""
_REPEATED = re.compile(r"\[repeated \d+x across cluster\].*$")


@frozen
class Record:
    """Metrics of one logged step."""

    step: int
    """As the framework counts."""
    values: Mapping[str, float]


@frozen
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
        if abs(value) <= sys.float_info.max:
            return float(value)
        return -math.inf if value < 0 else math.inf
    match = _NUMBER.match(value) if isinstance(value, str) else None
    return float(match[1]) if match else None


def total(values: Iterable[float]) -> float:
    """The sum; NaN where infinities cancel or it is beyond every float: logs hold both."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def numbers(values: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Those of the values that are numbers, by name; no name can drive a terminal."""
    read = ((name, number(value)) for name, value in values)
    return {name: value for name, value in read if value is not None and name.isprintable()}


def merged(parts: Sequence[Log]) -> Log:
    """Several files of one run as one log; the same step in two of them is one record.

    A step that is given twice with other times was run again after a restart: the later one counts.
    """
    values: dict[int, dict[str, float]] = {}
    again: set[int] = set()
    for record in (record for part in parts for record in part.records):
        known = values.setdefault(record.step, {})
        if any(not same(known[name], value) for name, value in record.values.items() if name in known):
            again.add(record.step)
        known.update(record.values)
    notes = [note for part in parts for note in part.notes]
    if again:
        notes.append(f"{_steps(sorted(again))} are given twice with other values: the later ones count")
    records = tuple(Record(step=step, values=record_values) for step, record_values in sorted(values.items()))
    return Log(records=records, notes=tuple(notes))


def same(one: float, other: float) -> bool:
    """Alike to the float32 of TensorBoard; NaN is like NaN."""
    return math.isclose(one, other, rel_tol=1e-5) or (math.isnan(one) and math.isnan(other))


def _steps(steps: Iterable[int]) -> str:
    """`steps 3, 4`; long lists are cut."""
    shown = list(steps)
    rest = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"step{'s' * (len(shown) > 1)} {', '.join(map(str, shown[:8]))}{rest}"


# --- console text ---------------------------------------------------------------------------------


def lines(text: str) -> Iterator[str]:
    """Lines that a job printed, without colours and Ray's prefixes; a carriage return begins a new one."""
    return (line for _, line in process_of(text))


def process_of(text: str) -> Iterator[tuple[str, str]]:
    """Every line with the prefix by which Ray says whose it is; the prefix is empty where there is none."""
    for line in _LINE_END.split(_ANSI.sub("", text)):
        prefix = _PREFIX.match(line)
        clean = _REPEATED.sub("", line[prefix.end() :] if prefix else line).rstrip()
        if clean:
            yield (prefix[0].strip() if prefix else ""), clean


LineReader = Callable[[str], Record | None]
"""Reads the lines of a console log one after the other: the part of a record that each holds."""


def block_reader(head: re.Pattern[str], values_of: Callable[[str], dict[str, float]]) -> LineReader:
    """A reader of logs whose lines belong to the step of the last line that `head` matches."""
    step: int | None = None

    def read(line: str) -> Record | None:
        nonlocal step
        if match := head.search(line):
            step = int(match[1])
        elif step is not None and (values := values_of(line)):
            return Record(step=step, values=values)
        return None

    return read


def pairs(text: str) -> dict[str, float]:
    """Numbers by name from a Python dict as a log prints it: `{'a': 1.5, 'b': np.float64(2.0), 'c': '3'}`."""
    return numbers((key, value.strip().strip("'\"")) for key, value in _ITEM.findall(text))


# --- JSON -----------------------------------------------------------------------------------------


def read_jsonl(text: str, name: str) -> Log:
    """The records of JSON lines.

    Raises:
        RlhfsimError: no line is a JSON object with a step.
    """
    records, broken = [], []
    rows = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for i, line in rows:
        record = record_of_json(line)
        (records.append(record) if record else broken.append(i))
    if not records:
        raise RlhfsimError(
            "no-metrics",
            "no line is a JSON object with a step",
            place=Place(file=name, line=rows[0][0] if rows else None),
            help=f"one object a line, with {', '.join(STEPS[:2])} and numbers by name",
        )
    return Log(records=tuple(records), notes=tuple(_broken(broken, len(rows), rows[-1][0], name)))


def _broken(lines: list[int], total: int, last: int, name: str) -> Iterator[str]:
    if lines == [last]:
        yield f"{Path(name).name}: the last line is cut off and was left out"
    elif lines:
        shown = ", ".join(map(str, lines[:SHOWN])) + (", ..." if len(lines) > SHOWN else "")
        yield f"{Path(name).name}: {len(lines)} of {total} lines are no metrics of a step (line {shown})"


def record_of_json(line: str) -> Record | None:
    """The record of one JSON line; None where it is cut off, or has no step."""
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
    return Record(step=int(step), values=numbers((str(k), v) for k, v in values.items() if k not in STEPS))


def read_trainer_state(text: str, name: str) -> Log:
    """The records of `log_history` in a transformers `trainer_state.json`.

    Raises:
        RlhfsimError: malformed, or without such records.
    """
    data = parse_json(text, name).data
    history = data.get("log_history") if isinstance(data, dict) else None
    rows = [record_of(row) for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    records = tuple(row for row in rows if row is not None)
    if not records:
        raise RlhfsimError(
            "no-metrics",
            "there is no log_history with steps in it",
            place=Place(file=name),
            help="give trainer_state.json of a checkpoint, or JSON lines",
        )
    return Log(records=records)
