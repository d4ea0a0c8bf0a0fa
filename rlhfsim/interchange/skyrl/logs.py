"""SkyRL: `timing/*` and its console lines."""

from __future__ import annotations

import re
from itertools import count

from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import DECIMAL, LineReader, Record, pairs
from rlhfsim.interchange.skyrl.configuration import CONFIGURATION
from rlhfsim.interchange.skyrl.keys import MODEL, TABLE

# Names of timers: `Timer(..., self.all_timings)` in skyrl/train/trainer.py and fully_async_trainer.py, logged
# as `timing/<name>`; console: skyrl/train/utils/tracking.py (`Step 3:` and a printed dict, floats as text);
# without its console backend `Finished: '<name>', time cost: 1.50s` of skyrl/train/utils/utils.py remains.
# Lengths: `generate/*` in skyrl/train/generators/utils.py (tokens of responses; prompts are not logged).
# NovaSky-AI/SkyRL 0.4.0. Evaluation and checkpoints run outside of `step`.
P = "timing/"
STEP = P + "step"
TIMERS = (
    Timer(
        metric=P + "generate",
        phase="actor.generate",
        covers=("actor.generate", "rules.score", "actor.generate.unload"),
    ),
    Timer(
        metric=P + "fwd_logprobs_values_reward",
        phase="actor.logprob",
        covers=around("reference.logprob", "critic.value", "actor.logprob", "reward.score"),
    ),
    Timer(metric=P + "compute_advantages_and_returns", phase="controller"),
    Timer(metric=P + "critic_train", phase="critic.train", covers=around("critic.train")),
    Timer(metric=P + "policy_train", phase="actor.train", covers=around("actor.train")),
    Timer(
        metric=P + "train_critic_and_policy",
        phase="actor.train",
        covers=around("critic.train", "actor.train"),
        apart={P + "policy_train": around("critic.train", "actor.train")},
    ),
    Timer(metric=P + "sync_weights", phase="actor.sync", covers=("actor.generate.load", "actor.sync")),
    Timer(metric=P + "sync_weights_to_inference_engines", phase="actor.sync"),
)
WAITS = (Timer(metric=P + "wait_for_generation_buffer", phase="actor.generate.wait"),)
INSIDE = (
    "train_critic_and_policy",
    "convert_to_training_input",
    "postprocess_generator_output",
    "apply_reward_kl_penalty",
    "dump_data_batch",
    "offload_policy_model_to_cpu",
    "run_training",
    "eval",
    "save_checkpoints",
    "save_hf_model",
    "load_checkpoints",
    "init_weight_sync_state",
    "update_ref_with_policy",
)
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
    timers=TIMERS,
    waits=WAITS,
    step=STEP,
    times=(P,),
    inside=tuple(P + name for name in INSIDE),
    response=("generate/avg_num_tokens",),
    longest=("generate/max_num_tokens",),
    console=console,
    console_without_step=timers,
    keys=TABLE.batch | {"model": MODEL},
)
