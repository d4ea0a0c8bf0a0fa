"""slime: `perf/*_time` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import Record, pairs
from rlhfsim.interchange.slime.configuration import CONFIGURATION
from rlhfsim.interchange.slime.keys import POLICY, TABLE

NAMES = metrics_of("slime")
STEP = NAMES["step"]
TOTAL, RESPONSE = "rollout/total_lengths", "rollout/response_lengths"
_LINE = re.compile(r"\b(?:perf|rollout) (\d{1,9}): (\{.*)$")


def record_of_line(line: str) -> Record | None:
    """Part of a record: `perf 3: {...}` or `rollout 3: {...}`, of which several processes print one each."""
    match = _LINE.search(line)
    return Record(step=int(match[1]), values=pairs(match[2])) if match else None


def as_today(values: Mapping[str, float]) -> Mapping[str, float]:
    """With the step under its name since October 2025; nothing where it has none."""
    named = {STEP if name == "perf/total_train_time" else name: value for name, value in values.items()}
    return named if STEP in named else {}


def prompt(s: FrameworkSettings, records: Sequence[Record]) -> float | None:
    """Mean of all tokens of a sample less those of its response; None: not logged."""
    both = [r.values[TOTAL] - r.values[RESPONSE] for r in records if {TOTAL, RESPONSE} <= r.values.keys()]
    return max(1.0, sum(both) / len(both)) if both else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **NAMES,
    as_today=as_today,
    console=lambda: record_of_line,
    prompts_of=prompt,
    keys=TABLE.batch | {"model": POLICY},
)
