"""AReaL: `timeperf/*` and the table of its console."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhfsim.interchange.areal.configuration import CONFIGURATION
from rlhfsim.interchange.areal.keys import POLICY, TABLE
from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import block_reader, numbers, total

NAMES = metrics_of("areal")
STEP, BESIDE, P = NAMES["step"], NAMES["inside"], NAMES["times"][0]
SCOPES = ("ppo_actor", "grpo_actor")
_DONE = re.compile(r"\bTrain step (\d{1,9})/\d+ done\b")
_CELL = re.compile(r"[│|]\s*([A-Za-z][\w./-]*)\s*[│|]\s*([-+\w.]+)\s*(?=[│|])")


def values_of(line: str) -> dict[str, float]:
    """Cells of a line of the table below `Train step 3/100 done.`"""
    return numbers(_CELL.findall(line))


def as_today(values: Mapping[str, float]) -> Mapping[str, float]:
    """With the time of the whole step, and the tokens of responses: those of samples less their prompts."""
    times = [value for name, value in values.items() if name.startswith(P) and name not in BESIDE]
    made = {STEP: total(times)} if times and STEP not in values else {}
    for scope in SCOPES:
        if {f"{scope}/seq_len/avg", f"{scope}/prompt_len/avg"} <= values.keys():
            made["response_len/avg"] = values[f"{scope}/seq_len/avg"] - values[f"{scope}/prompt_len/avg"]
    return {**values, **made}


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **NAMES,
    as_today=as_today,
    console=lambda: block_reader(_DONE, values_of),
    keys=TABLE.batch | {"model": POLICY},
)
