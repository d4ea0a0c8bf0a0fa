"""TRL's GRPOTrainer: `step_time`, `profiling/Time taken: ...` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import LineReader, Record, pairs
from rlhfsim.interchange.trl.configuration import CONFIGURATION
from rlhfsim.interchange.trl.keys import optimizer_steps, samples_of_generation

KEYS = ("'step_time'", "'completions/mean_length'", "profiling/Time taken")
"""What a printed dict must hold to be one of these."""


def console() -> LineReader:
    """A reader of the dicts that a transformers Trainer prints; they carry no step and are counted."""
    steps = count(1)

    def read(line: str) -> Record | None:
        match = re.search(r"\{.*", line)
        if match is None or not any(key in line for key in KEYS):
            return None
        values = pairs(match[0])
        return Record(step=next(steps), values=values) if values else None

    return read


def prompt(s: FrameworkSettings, records: Sequence[Record]) -> float | None:
    """Mean prompt from `num_tokens`, all tokens so far, less the responses; None: not logged."""
    known = [r.values for r in records if {"num_tokens", "completions/mean_length"} <= r.values.keys()]
    if len(known) < 2 or known[-1]["num_tokens"] <= known[0]["num_tokens"]:
        return None
    generations = (len(known) - 1) / optimizer_steps(s)
    tokens = (known[-1]["num_tokens"] - known[0]["num_tokens"]) / (samples_of_generation(s) * generations)
    response = sum(v["completions/mean_length"] for v in known[1:]) / (len(known) - 1)
    return max(1.0, tokens - response)


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **metrics_of("trl"),
    console=console,
    prompts_of=prompt,
    group=optimizer_steps,
)
