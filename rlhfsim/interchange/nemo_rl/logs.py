"""NeMo-RL: `timing/train/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.logs.framework import Framework, Timer, around
from rlhfsim.interchange.logs.records import DECIMAL, block_reader
from rlhfsim.interchange.nemo_rl.configuration import CONFIGURATION
from rlhfsim.units import TERA

# Names of timers: `timer.time` in nemo_rl/algorithms/grpo.py, ppo.py and distillation.py, logged with prefix
# `timing/train`; what each covers: the same files (NVIDIA-NeMo/RL at 7ea279abf, 2026-08-22). Rewards come
# from environments while the rollout runs; `reward_calculation` reads them off. The rollout's timer covers
# putting the engine to sleep, that of the log-probs policy and reference with the actor's way back. A teacher
# has two timers of its own, and leaves in `training_prep` (distillation.py, line 915).
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
        covers=("actor.generate", "rules.score", *around("reward.score"), "actor.generate.unload"),
    ),
    Timer(metric=P + "value_inference", phase="critic.value", covers=around("critic.value")),
    Timer(
        metric=P + "policy_and_reference_logprobs",
        phase="actor.logprob",
        covers=around("actor.logprob", "reference.logprob"),
    ),
    Timer(metric=P + "teacher_logprob_inference_prep", phase="reference.logprob.load"),
    Timer(metric=P + "teacher_logprob_inference", phase="reference.logprob"),
    Timer(metric=P + "advantage_calculation", phase="controller"),
    Timer(metric=P + "value_training", phase="critic.train", covers=around("critic.train")),
    Timer(
        metric=P + "training_prep",
        phase="actor.train.load",
        covers=("reference.logprob.unload", "actor.train.load"),
        apart={P + "policy_and_reference_logprobs": ("reference.logprob.unload",)},
    ),
    Timer(metric=P + "policy_training", phase="actor.train"),
    Timer(metric=P + "weight_sync", phase="actor.sync"),
)
TFLOPS, UTILIZATION = "train/tflops_per_rank", "train/fp_utilization_percent"
WAITS = (Timer(metric=P + "exposed_generation", phase="actor.generate.wait"),)
_STEP = re.compile(r"= Step (\d{1,9})/")
_TIME = re.compile(rf"^(?=\W)\s*+[^\w\s]?\s*+([\w/][\w/ ]*): ({DECIMAL})s(?: \({DECIMAL}%\))?\s*$")
PEAKS = {
    "h100_sxm": 989.5 * TERA,
    "h200_sxm": 989.5 * TERA,
    "a100_sxm": 312 * TERA,
    "b200_sxm": 2250 * TERA,
    "gb200_nvl72": 2450 * TERA,
}
"""Profile -> BF16 FLOP/s in its table (nemo_rl/utils/flops_tracker.py)."""
_MFU = (
    (re.compile(rf"Training FLOPS: {DECIMAL} TFLOPS \(({DECIMAL}) TFLOPS per rank\)"), TFLOPS),
    (re.compile(rf"Training Model Floating Point Utilization: ({DECIMAL})%"), UTILIZATION),
)
"""FLOP/s of each GPU that trains (`log_training_step`); their quotient is the peak that it counts with."""
_LENGTH = re.compile(rf"Mean Generation Length: ({DECIMAL})\s*$")


def values_of(line: str) -> dict[str, float]:
    """Metrics of a line below `==== Step 3/100 ====`."""
    if match := _TIME.match(line):
        name = "total_step_time" if match[1] == "Total step time" else match[1].strip()
        return {P + name: float(match[2])}
    if length := _LENGTH.search(line):
        return {"train/mean_gen_tokens_per_sample": float(length[1])}
    return {name: float(m[1]) for pattern, name in _MFU if (m := pattern.search(line))}


def peak(run: RunDescription, steps: Sequence[Mapping[str, float]]) -> float | None:
    """FLOP/s of a GPU that were taken for 100 % MFU; None: not logged."""
    both = [(v[TFLOPS], v[UTILIZATION]) for v in steps if v.get(TFLOPS, 0) > 0 and v.get(UTILIZATION, 0) > 0]
    return median(tflops * TERA / (percent / 100) for tflops, percent in both) if both else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    timers=TIMERS,
    waits=WAITS,
    step=P + "total_step_time",
    times=(P,),
    inside=(
        P + "reward_calculation",
        P + "prepare_for_generation/transfer_and_update_weights",
        P + "policy_training/",
        P + "get_logprobs/",
        P + "get_reference_policy_logprobs/",
        P + "get_topk_logits/",
        P + "idle/",
        P + "valid_tokens_per_sec_per_gpu",
        P + "dynamic_sampling",
        P + "offload_before_refit",
    ),
    disturbing=(P + "checkpointing", "timing/validation/total_validation_time"),
    prompt=("train/mean_prompt_length",),
    response=("train/mean_gen_tokens_per_sample", "train/gen_tokens_per_sample/mean"),
    longest=("train/gen_tokens_per_sample/max", "train/max_gen_tokens_per_sample"),
    clipped=("train/truncation_rate",),
    peak=peak,
    peaks=PEAKS,
    console=lambda: block_reader(_STEP, values_of),
)
