"""OpenRLHF: `timing/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import Record, pairs
from rlhfsim.interchange.openrlhf.configuration import CONFIGURATION

# Names of timers: openrlhf/trainer/ppo_trainer.py (train_step, fit) and ppo_trainer_async.py; TensorBoard
# and W&B put `train/` before them (openrlhf/utils/logging_utils.py); OpenRLHF/OpenRLHF at 3c3be623,
# 2026-08-13.
TIMERS = (
    Timer(metric="timing/generation", phase="actor.generate", covers=around("actor.generate")),
    Timer(
        metric="timing/make_experience",
        phase="actor.logprob",
        covers=("rules.score", *around("reward.score", "reference.logprob", "critic.value", "actor.logprob")),
    ),
    Timer(metric="timing/ppo_train", phase="actor.train", covers=around("critic.train", "actor.train")),
    Timer(metric="timing/broadcast", phase="actor.sync"),
)
_LINE = re.compile(r"Global step (\d{1,9}): (\{.*)$")


def record_of_line(line: str) -> Record | None:
    """The record of `Global step 3: {'timing/generation': 1.5, ...}`."""
    match = _LINE.search(line)
    return Record(step=int(match[1]), values=pairs(match[2])) if match else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    timers=TIMERS,
    step="timing/step_total",
    times=("timing/",),
    response=("rollout/response_length_mean", "response_length"),
    clipped=("response_clip_ratio",),
    strip="train/",
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
