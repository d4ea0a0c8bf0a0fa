"""AReaL: `timeperf/*` and the table of its console."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhfsim.interchange.areal.configuration import CONFIGURATION
from rlhfsim.interchange.areal.keys import POLICY, TABLE
from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import block_reader, numbers, total

# Names: `stats_tracker.record_timing` in areal/trainer/rl_trainer.py (under `timeperf/`), lengths in
# areal/trainer/ppo/actor.py; console: areal/utils/stats_logger.py (`Train step 3/100 done.`, then a table of
# names and values, four pairs a line); inclusionAI/AReaL 1.0.4. No timer is of the whole step: it is their
# sum, without what they call checkpoints and evaluation.
P = "timeperf/"
STEP = P + "step"
TIMERS = (
    Timer(metric=P + "rollout", phase="actor.generate", covers=("actor.generate", "rules.score")),
    Timer(metric=P + "critic_values", phase="critic.value", covers=around("critic.value")),
    Timer(metric=P + "recompute_logp", phase="actor.logprob", covers=around("actor.logprob")),
    Timer(metric=P + "ref_logp", phase="reference.logprob", covers=around("reference.logprob")),
    Timer(metric=P + "compute_advantage", phase="controller"),
    Timer(metric=P + "train_step", phase="actor.train", covers=around("actor.train")),
    Timer(metric=P + "critic_train_step", phase="critic.train", covers=around("critic.train")),
    Timer(metric=P + "update_weights", phase="actor.sync", covers=("actor.generate.load", "actor.sync")),
)
WAITS = (Timer(metric=P + "rollout", phase="actor.generate.wait"),)
"""With stale samples `rollout` times what the trainer waits for."""
BESIDE = tuple(P + name for name in ("save", "eval", "checkpoint_for_recover", "clear_batches"))
SCOPES = ("ppo_actor", "grpo_actor")
RESPONSE = "response_len/avg"
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
            made[RESPONSE] = values[f"{scope}/seq_len/avg"] - values[f"{scope}/prompt_len/avg"]
    return {**values, **made}


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    timers=TIMERS,
    waits=WAITS,
    step=STEP,
    times=(P,),
    inside=BESIDE,
    prompt=tuple(f"{scope}/prompt_len/avg" for scope in SCOPES),
    response=(RESPONSE,),
    clipped=tuple(f"{scope}/no_eos_ratios/avg" for scope in SCOPES),
    longest_prompt=tuple(f"{scope}/prompt_len/max" for scope in SCOPES),
    as_today=as_today,
    console=lambda: block_reader(_DONE, values_of),
    keys=TABLE.batch | {"model": POLICY},
)
