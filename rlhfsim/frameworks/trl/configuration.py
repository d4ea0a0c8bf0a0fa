"""TRL: the arguments of GRPOConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.specs.workload.workload import Algorithm

SEQUENCES = 256
"""Sequences at a time of its vLLM engine."""

LAUNCHED: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "zero1": {"deepspeed_config.zero_stage": 1},
    "zero2": {"deepspeed_config.zero_stage": 2},
    "zero3": {"deepspeed_config.zero_stage": 3},
    "fsdp1": {"fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD"},
    "fsdp2": {"fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_reshard_after_forward": True},
}
"""Configurations of accelerate that TRL ships, 8 processes each (trl/accelerate_configs, 1.16.0)."""


def launched_by(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of the shipped configuration of accelerate that `--accelerate_config` names."""
    named = PurePosixPath(str(values.get("accelerate_config") or values.get("config_file"))).stem
    return {"num_processes": 8, **LAUNCHED[named]} if named in LAUNCHED else {}


# Arguments and defaults: trl/trainer/grpo_config.py (same commit) and transformers' TrainingArguments.
# How many processes run stands in the launcher's configuration (accelerate: num_processes, zero_stage).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the arguments describe."""
    gpus = s.whole("num_processes", "n_gpus", "world_size")
    samples = s.whole("num_generations", default=8)
    batch = s.whole("per_device_train_batch_size", default=8)
    accumulation, each = _accumulation(s), per_generation(s)
    server = s.flag("use_vllm") and s.text("vllm_mode", default="colocate") == "server"
    tp = s.whole("vllm_tensor_parallel_size", default=1)
    rollout_gpus = s.whole("vllm_gpus", default=tp) if server else None
    zero = s.whole("deepspeed_config.zero_stage", "zero_stage", "zero_optimization.stage", default=0)
    kind: Algorithm = "rloo" if "RLOO" in s.text("trainer", default="GRPOTrainer") else "grpo"
    return RunDescription(
        algorithm=kind,
        model=s.text("model_name_or_path", "model"),
        prompts=max(1, gpus * batch * each // samples),
        samples=samples,
        epochs=s.whole("num_iterations", default=1),
        mini_batches=max(1, each // accumulation),
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


def per_generation(s: FrameworkSettings) -> int:
    """Micro-batches of one process between two generations."""
    given = s.find("stepsper_generation")
    if given:
        return int(given)
    whole = s.find("generation_batch_size")
    each = s.whole("per_device_train_batch_size", default=8) * s.whole(
        "num_processes", "n_gpus", "world_size"
    )
    return max(1, int(whole) // each) if whole else _accumulation(s)


def group(s: FrameworkSettings) -> int:
    """Optimizer steps from one generation to the next: `step_time` is of one."""
    return max(1, per_generation(s) * s.whole("num_iterations", default=1) // _accumulation(s))


CONFIGURATION = Configuration(
    name="trl",
    title="TRL",
    describe=describe,
    entries=(r"\btrl (grpo|rloo|dpo|kto)\b", r"\b(GRPO|RLOO)(Config|Trainer)\b"),
    shown=("trl grpo",),
    keys=(
        "per_device_train_batch_size",
        "num_generations",
        "steps_per_generation",
        "max_completion_length",
        "vllm_mode",
        "use_vllm",
        "deepspeed_config.",
        "fsdp_config.",
    ),
    below=launched_by,
)
