"""slime: `perf/*_time` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import Record, pairs
from rlhfsim.interchange.slime.configuration import CONFIGURATION
from rlhfsim.interchange.slime.keys import POLICY, TABLE

# Names: slime/utils/train_metric_utils.py (`perf/<timer>_time`; the step is `train_wait` + `train`),
# slime/backends/megatron_utils/actor.py (timers: all but `train` runs within `train_wait`),
# slime/ray/rollout.py (`perf/rollout_time`, `rollout/response_len/*`), backends/megatron_utils/data.py
# (`rollout/total_lengths`); THUDM/slime at 624b824 and lines in its issues. The first rollout has no wait
# before it and therefore no step.
P = "perf/"
STEP = P + "step_time"
TIMERS = (
    Timer(metric=P + "rollout_time", phase="actor.generate", covers=("actor.generate", "rules.score")),
    Timer(
        metric=P + "wake_up_time", phase="actor.train.load", covers=("actor.logprob.load", "actor.train.load")
    ),
    Timer(metric=P + "ref_log_probs_time", phase="reference.logprob", covers=around("reference.logprob")),
    Timer(
        metric=P + "log_probs_time", phase="actor.logprob", covers=("actor.logprob", "actor.logprob.unload")
    ),
    Timer(metric=P + "values_time", phase="critic.value", covers=around("critic.value")),
    Timer(metric=P + "critic_train_time", phase="critic.train", covers=around("critic.train")),
    Timer(metric=P + "actor_train_time", phase="actor.train"),
    Timer(metric=P + "sleep_time", phase="actor.train.unload"),
    Timer(metric=P + "update_weights_time", phase="actor.sync", covers=("actor.generate.load", "actor.sync")),
)
WAITS = (Timer(metric=P + "train_wait_time", phase="actor.generate.wait"),)
TOTAL, RESPONSE = "rollout/total_lengths", "rollout/response_lengths"
_LINE = re.compile(r"\b(?:perf|rollout) (\d{1,9}): (\{.*)$")


def record_of_line(line: str) -> Record | None:
    """Part of a record: `perf 3: {...}` or `rollout 3: {...}`, of which several processes print one each."""
    match = _LINE.search(line)
    return Record(step=int(match[1]), values=pairs(match[2])) if match else None


def as_today(values: Mapping[str, float]) -> Mapping[str, float]:
    """With the step under its name since October 2025; nothing where it has none."""
    named = {STEP if name == P + "total_train_time" else name: value for name, value in values.items()}
    return named if STEP in named else {}


def prompt(s: FrameworkSettings, records: Sequence[Record]) -> float | None:
    """Mean of all tokens of a sample less those of its response; None: not logged."""
    both = [r.values[TOTAL] - r.values[RESPONSE] for r in records if {TOTAL, RESPONSE} <= r.values.keys()]
    return max(1.0, sum(both) / len(both)) if both else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    timers=TIMERS,
    waits=WAITS,
    step=STEP,
    times=(P + "rollout_time", *(t.metric for t in (*TIMERS[1:], *WAITS))),
    inside=(P + "train_wait_time", P + "train_time", P + "data_preprocess_time"),
    response=("rollout/response_len/mean", RESPONSE),
    longest=("rollout/response_len/max",),
    clipped=("rollout/truncated_ratio",),
    as_today=as_today,
    console=lambda: record_of_line,
    prompts_of=prompt,
    keys=TABLE.batch | {"model": POLICY},
)
