"""TRL's GRPOTrainer: `step_time`, `profiling/Time taken: ...` and the arguments of GRPOConfig."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rlhfsim.frameworks.logs.configuration import FrameworkSettings
from rlhfsim.frameworks.logs.framework import Framework, Timer, around
from rlhfsim.frameworks.logs.records import Record, pairs
from rlhfsim.frameworks.logs.run_description import RunDescription, rollout_layout, training_layout
from rlhfsim.specs.workload.workload import Algorithm

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
SEQUENCES = 256
"""Sequences at a time of its vLLM engine."""


def console(lines: Sequence[str]) -> Iterator[Record]:
    """Records of the dicts that a transformers Trainer prints; they carry no step and are counted."""
    step = 0
    for line in lines:
        match = re.search(r"\{.*", line)
        if match is None or not any(key in line for key in KEYS):
            continue
        values = pairs(match[0])
        if values:
            step += 1
            yield Record(step=step, values=values)


# Arguments and defaults: trl/trainer/grpo_config.py (same commit) and transformers' TrainingArguments.
# How many processes run stands in the launcher's configuration (accelerate: num_processes, zero_stage).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the arguments describe."""
    gpus = s.whole("num_processes", "n_gpus", "world_size")
    samples = s.whole("num_generations", default=8)
    batch = s.whole("per_device_train_batch_size", default=8)
    accumulation, per_generation = _accumulation(s), _per_generation(s)
    server = s.flag("use_vllm") and s.text("vllm_mode", default="colocate") == "server"
    tp = s.whole("vllm_tensor_parallel_size", default=1)
    rollout_gpus = s.whole("vllm_gpus", default=tp) if server else None
    zero = s.whole("deepspeed_config.zero_stage", "zero_stage", "zero_optimization.stage", default=0)
    kind: Algorithm = "rloo" if "RLOO" in s.text("trainer", default="GRPOTrainer") else "grpo"
    return RunDescription(
        algorithm=kind,
        model=s.text("model_name_or_path", "model"),
        prompts=max(1, gpus * batch * per_generation // samples),
        samples=samples,
        epochs=s.whole("num_iterations", default=1),
        mini_batches=max(1, per_generation // accumulation),
        packing=False,
        kl=s.share("beta", default=0.0) != 0,
        recomputes_logprobs=group(s) > 1
        or (s.flag("use_vllm") and s.flag("vllm_importance_sampling_correction", default=True)),
        lora_rank=s.whole("lora_r", default=16) if s.flag("use_peft") else 0,
        max_response=s.whole("max_completion_length", default=512),
        backend="fsdp2" if s.has("fsdp_config") or s.find("fsdp") else "deepspeed",
        gpus=gpus,
        gpus_per_node=s.whole("gpus_per_node", default=min(8, gpus)),
        rollout_gpus=rollout_gpus,
        layout=training_layout(
            gpus,
            zero=zero,
            micro_batch=max(1, batch),
            recompute="full" if s.flag("gradient_checkpointing", default=True) else "none",
        ),
        rollout=rollout_layout(
            rollout_gpus or gpus,
            tp=tp if s.flag("use_vllm") else 1,
            max_num_seqs=SEQUENCES,
            memory_utilization=s.share("vllm_gpu_memory_utilization", default=0.3),
        ),
        sleep=2 if s.flag("vllm_enable_sleep_mode") else 0,
        weight_path="broadcast" if server else "ipc" if s.flag("use_vllm") else "none",
    )


def _accumulation(s: FrameworkSettings) -> int:
    return max(1, s.whole("gradient_accumulation_steps", default=1))


def _per_generation(s: FrameworkSettings) -> int:
    """Micro-batches of one process between two generations."""
    given = s.find("steps_per_generation")
    if given:
        return int(given)
    whole = s.find("generation_batch_size")
    each = s.whole("per_device_train_batch_size", default=8) * s.whole(
        "num_processes", "n_gpus", "world_size"
    )
    return max(1, int(whole) // each) if whole else _accumulation(s)


def group(s: FrameworkSettings) -> int:
    """Optimizer steps from one generation to the next: `step_time` is of one."""
    return max(1, _per_generation(s) * s.whole("num_iterations", default=1) // _accumulation(s))


def prompt(s: FrameworkSettings, records: Sequence[Record]) -> float | None:
    """Mean prompt from `num_tokens`, all tokens so far, less the responses; None: not logged."""
    known = [r.values for r in records if {"num_tokens", "completions/mean_length"} <= r.values.keys()]
    if len(known) < 2 or known[-1]["num_tokens"] <= known[0]["num_tokens"]:
        return None
    each = (
        s.whole("num_processes", "n_gpus", "world_size")
        * s.whole("per_device_train_batch_size", default=8)
        * _per_generation(s)
    )
    generations = (len(known) - 1) / group(s)
    tokens = (known[-1]["num_tokens"] - known[0]["num_tokens"]) / (each * generations)
    response = sum(v["completions/mean_length"] for v in known[1:]) / (len(known) - 1)
    return max(1.0, tokens - response)


FRAMEWORK = Framework(
    name="trl",
    title="TRL",
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
    strip="train/",
    console=console,
    describe=describe,
    prompts_of=prompt,
    group=group,
    folds=True,
)
