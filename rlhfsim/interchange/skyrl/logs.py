"""SkyRL: `timing/*` and its console lines."""

from __future__ import annotations

import re
from itertools import count

from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import DECIMAL, LineReader, Record, pairs
from rlhfsim.interchange.skyrl.configuration import CONFIGURATION
from rlhfsim.interchange.skyrl.keys import MODEL, TABLE

NAMES = metrics_of("skyrl")
STEP, P = NAMES["step"], NAMES["times"][0]
_STEP = re.compile(r"\bStep (\d{1,9}): *(\{.*)?$")
_DICT = re.compile(r"^\s*[{'].*")
_FINISHED = re.compile(rf"Finished: '(\w+)', time cost: ({DECIMAL})s")


def console() -> LineReader:
    """A reader of `Step 3:` with the dict that follows it."""
    step: int | None = None

    def read(line: str) -> Record | None:
        nonlocal step
        if head := _STEP.search(line):
            step, values = int(head[1]), pairs(head[2] or "")
        elif step is not None and _DICT.match(line):
            values = pairs(line)
        else:
            step, values = None, {}
        return Record(step=step, values=values) if step is not None and values else None

    return read


def timers() -> LineReader:
    """A reader of the timers' lines as well: a step is what ended since the `step` before it, counted."""
    read_dict, steps, row = console(), count(1), dict[str, float]()

    def read(line: str) -> Record | None:
        nonlocal row
        match = _FINISHED.search(line)
        if match is None:
            return read_dict(line)
        name = P + match[1]
        row[name] = row.get(name, 0.0) + float(match[2])
        if name != STEP:
            return None
        ended, row = row, {}
        return Record(step=next(steps), values=ended)

    return read


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **NAMES,
    console=console,
    console_without_step=timers,
    keys=TABLE.batch | {"model": MODEL},
)
