"""NeMo-RL: `timing/train/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlhfsim.frameworks.logs.framework import Framework, Timer, around
from rlhfsim.frameworks.logs.records import Record
from rlhfsim.frameworks.nemo_rl.configuration import CONFIGURATION

# Names of timers: `timer.time` in nemo_rl/algorithms/grpo.py and ppo.py, logged with prefix `timing/train`;
# what each covers: the same files (NVIDIA-NeMo/RL at 7ea279abf, 2026-08-22). The rollout's timer covers
# putting the engine to sleep, that of the log-probs policy and reference with the actor's way back.
P = "timing/train/"
TIMERS = (
    Timer(
        metric=P + "prepare_for_generation/total",
        phase="actor.sync",
        covers=("actor.train.unload", "actor.generate.load", "actor.sync"),
    ),
    Timer(
        metric=P + "generation",
        phase="actor.generate",
        covers=("actor.generate", "rules.score", "actor.generate.unload"),
    ),
    Timer(metric=P + "reward_calculation", phase="reward.score", covers=around("reward.score")),
    Timer(metric=P + "value_inference", phase="critic.value", covers=around("critic.value")),
    Timer(
        metric=P + "policy_and_reference_logprobs",
        phase="actor.logprob",
        covers=around("actor.logprob", "reference.logprob"),
    ),
    Timer(metric=P + "advantage_calculation", phase="controller"),
    Timer(metric=P + "value_training", phase="critic.train", covers=around("critic.train")),
    Timer(metric=P + "training_prep", phase="actor.train.load"),
    Timer(metric=P + "policy_training", phase="actor.train"),
    Timer(metric=P + "weight_sync", phase="actor.sync"),
)
WAITS = (Timer(metric=P + "exposed_generation", phase="actor.generate.wait"),)
_STEP = re.compile(r"=+ Step (\d+)/")
_TIME = re.compile(r"^\s*\W\s*([\w/ ]+): ([-\d.]+)s(?: \([-\d.]+%\))?\s*$")
_LENGTH = re.compile(r"Mean Generation Length: ([\d.]+)\s*$")


def console(lines: Sequence[str]) -> Iterator[Record]:
    """Records of the blocks `==== Step 3/100 ====` with their lists of times."""
    step, values = None, dict[str, float]()
    for line in lines:
        if head := _STEP.search(line):
            if step is not None and values:
                yield Record(step=step, values=values)
            step, values = int(head[1]), {}
        elif match := _TIME.match(line):
            name = "total_step_time" if match[1] == "Total step time" else match[1].strip()
            values[P + name] = float(match[2])
        elif length := _LENGTH.search(line):
            values["train/mean_gen_tokens_per_sample"] = float(length[1])
    if step is not None and values:
        yield Record(step=step, values=values)


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    timers=TIMERS,
    waits=WAITS,
    step=P + "total_step_time",
    times=(P,),
    inside=(
        P + "prepare_for_generation/transfer_and_update_weights",
        P + "policy_training/",
        P + "get_logprobs/",
        P + "get_reference_policy_logprobs/",
        P + "idle/",
        P + "valid_tokens_per_sec_per_gpu",
        P + "dynamic_sampling",
        P + "offload_before_refit",
    ),
    disturbing=(P + "checkpointing", "timing/validation/total_validation_time"),
    prompt=("train/mean_prompt_length",),
    response=("train/mean_gen_tokens_per_sample", "train/gen_tokens_per_sample/mean"),
    longest=("train/gen_tokens_per_sample/max", "train/max_gen_tokens_per_sample"),
    console=console,
)
