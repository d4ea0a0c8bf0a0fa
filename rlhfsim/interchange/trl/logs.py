"""TRL's GRPOTrainer: `step_time`, `profiling/Time taken: ...` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import LineReader, Record, pairs
from rlhfsim.interchange.trl.configuration import CONFIGURATION
from rlhfsim.interchange.trl.keys import optimizer_steps, samples_of_generation

# Names: trl/extras/profiling.py (`profiling/Time taken: <trainer>.<block>`, sent to W&B, MLflow and
# trackio only), trl/trainer/grpo_trainer.py and rloo_trainer.py (`step_time`, blocks, `completions/*`,
# `num_tokens`); huggingface/trl at f2cd57710, 2026-07-24. TensorBoard puts `train/` before them.
# The forward of log-probs (`_get_per_token_logps_and_entropies`) runs inside `compute_loss` too, under one
# name: it cannot be told apart and is not mapped. Training has no timer of its own: it is the rest of
# `step_time`, which ends before the optimizer's step.
_BLOCKS = (
    ("sync_weights", "actor.sync"),
    ("vLLM.generate", "actor.generate"),
    ("transformers.generate", "actor.generate"),
    ("transformers.generate_batch", "actor.generate"),
    ("_calculate_rewards", "rules.score"),
)
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
TIMERS = tuple(
    Timer(metric=f"profiling/Time taken: {trainer}.{block}", phase=phase)
    for trainer in TRAINERS
    for block, phase in _BLOCKS
)
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
    timers=TIMERS,
    step="step_time",
    times=("profiling/Time taken: ",),
    inside=tuple(
        f"profiling/Time taken: {t}.{name}" for t in TRAINERS for name in ("_prepare_inputs", "compute_loss")
    ),
    rest=Timer(
        metric="step_time",
        phase="actor.train",
        covers=around("reference.logprob", "actor.logprob", "actor.train"),
    ),
    response=("completions/mean_length",),
    longest=("completions/max_length",),
    clipped=("completions/clipped_ratio",),
    strip="train/",
    console=console,
    prompts_of=prompt,
    group=optimizer_steps,
    folds=True,
)
