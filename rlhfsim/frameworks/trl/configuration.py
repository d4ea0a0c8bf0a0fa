"""TRL: the arguments of GRPOConfig, RLOOConfig and PPOConfig, in a command, a file or a Python script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import (
    ON_HOST,
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.engines import MODULES_SHARE, own_modules
from rlhfsim.frameworks.configuration.forms import Said
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, SettingMissing
from rlhfsim.frameworks.trl.findings import STAGES, findings
from rlhfsim.specs.model.presets import elsewhere, preset_name
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Algorithm, OldLogprobs

SEQUENCES = 256
"""Sequences at a time of its vLLM engine."""

LIGER = Head(
    train_bytes=16,
    score_bytes=10,
    source="LigerFusedLinearGRPOLoss, chunk_size 1: logits of one response in BF16 and FP32, their "
    "log-softmax and gradients (linkedin/Liger-Kernel, src/liger_kernel/chunked_loss/grpo_loss.py)",
)
PROCESSES = ("num_processes", "n_gpus", "world_size")
STAGE_NAMED = re.compile(r"(?:zero|ds_?z|z|stage)[-_]?([0-3])")
"""How names of DeepSpeed's files say their stage: `ds_zero3.json`, `zero2_offload`, `ds_z3_config.json`."""
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


def launched_by(said: Said) -> Mapping[str, Any]:
    """Values of the shipped configuration of accelerate that a command names, and the trainer it starts."""
    named = PurePosixPath(str(said.values.get("accelerate_config") or said.values.get("config_file"))).stem
    started = re.search(r"\b(?:trl (rloo|dpo|kto)\b|(RLOO|PPO|DPO|KTO)(?:Config|Trainer)\b)", said.text)
    trainer: dict[str, Any] = {}
    if started:
        trainer["trainer"] = f"{(started[1] or started[2]).upper()}Trainer"
    rank = said.values.get("LoraConfig.r", 8 if "LoraConfig(" in said.text else None)
    if rank and said.values.get("peft_config"):
        trainer |= {"use_peft": True, "lora_r": rank}
    if named in LAUNCHED:
        return {**trainer, "num_processes": 8, **LAUNCHED[named]}
    stage = STAGE_NAMED.search(named.lower()) if not {*STAGES} & said.values.keys() else None
    return {**trainer, **({"deepspeed_config.zero_stage": int(stage[1])} if stage else {})}


# Arguments and defaults: trl/trainer/grpo_config.py (same commit) and transformers' TrainingArguments.
# How many processes run stands in the launcher's configuration (accelerate: num_processes, zero_stage).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the arguments describe."""
    s.overruled("args", "processing_class", "callbacks", "num_gpus")
    if s.text("trainer", default="GRPOTrainer").startswith("PPO"):
        return _ppo(s)
    gpus = processes(s)
    samples = s.whole("num_generations", default=8)
    batch = s.whole("per_device_train_batch_size", default=8)
    accumulation, each = _accumulation(s), per_generation(s)
    server = s.flag("use_vllm") and s.text("vllm_mode", default="colocate") == "server"
    rollout = _server(s) if server else _colocated(s, gpus)
    layout = _layout(s, gpus, batch)
    asleep = 2 if s.flag("vllm_enable_sleep_mode") and not server else 0
    path: WeightPath = "broadcast" if server else "ipc"
    corrected = s.flag("use_vllm") and s.flag("vllm_importance_sampling_correction", default=True)
    return RunDescription(
        algorithm=algorithm(s),
        model=s.model("model_name_or_path", "model"),
        reward_model=_reward(s),
        prompts=max(1, gpus * batch * each // max(1, samples)),
        samples=samples,
        epochs=s.whole("num_iterations", default=1),
        mini_batches=max(1, each // accumulation),
        packing=False,
        kl=s.share("beta", default=0.0) != 0,
        old_logprobs=_old_logprobs(s, corrected),
        lora_rank=s.whole("lora_r", default=16) if s.flag("use_peft") else 0,
        lora_base="nf4" if s.flag("load_in_4bit") else "bf16",
        optimizer="adam8bit" if "8bit" in s.text("optim", default="adamw_torch_fused") else "adam",
        max_prompt=_longest_prompt(s),
        max_response=s.whole("max_completion_length", default=512),
        backend="fsdp2" if _fsdp(s) else "deepspeed",
        gpus=gpus,
        gpus_per_node=s.whole("gpus_per_node", default=_per_node(s, gpus)),
        rollout_gpus=rollout.gpus if server else None,
        layout=layout,
        rollout=rollout,
        **(own_modules(layout.zero) if not s.flag("use_vllm") else {"sleep": asleep, "weight_path": path}),
        software=_software(s),
    )


def _reward(s: FrameworkSettings) -> str | None:
    """The reward model among the rewards; None: functions, by their names, or a model that is not known."""
    named = s.find("reward_model_name_or_path", "reward_funcs")
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    return next((name for name in names if preset_name(name) or elsewhere(name)), None)


def _old_logprobs(s: FrameworkSettings, corrected: bool) -> OldLogprobs:
    """Of the training pass where one update follows a generation and nothing corrects for the engine.

    grpo_trainer.py: without `old_per_token_logps` the loss takes its own, detached. Several passes over
    samples within one optimizer step need none either, which a workload cannot say: it has no forward.
    """
    if group(s) > 1 or corrected:
        return "recompute"
    return "reused" if s.whole("num_iterations", default=1) == 1 else "rollout"


# trl/experimental/ppo/ppo_config.py and ppo_trainer.py: the policy's own modules generate, and the value
# model starts from the reward model.
def _ppo(s: FrameworkSettings) -> RunDescription:
    """The run that a PPOConfig describes."""
    gpus = processes(s)
    batch = s.whole("per_device_train_batch_size", default=8)
    layout = _layout(s, gpus, batch)
    scored = replace(layout, micro_batch=max(1, s.whole("local_rollout_forward_batch_size", default=64)))
    reward = s.text("reward_model_path", "reward_model")
    return RunDescription(
        algorithm="ppo",
        model=s.model("sft_model_path", "model_name_or_path", "model"),
        critic=reward,
        reward_model=reward,
        prompts=max(1, gpus * batch * _accumulation(s)),
        samples=1,
        epochs=s.whole("num_ppo_epochs", default=4),
        mini_batches=max(1, s.whole("num_mini_batches", default=1)),
        packing=False,
        kl=True,
        lora_rank=s.whole("lora_r", default=16) if s.flag("use_peft") else 0,
        max_response=s.whole("response_length", default=53),
        backend="fsdp2" if _fsdp(s) else "deepspeed",
        gpus=gpus,
        gpus_per_node=s.whole("gpus_per_node", default=_per_node(s, gpus)),
        layout=layout,
        roles={name: RoleDescription(layout=scored) for name in ("reference", "reward")},
        rollout=rollout_layout(gpus, max_num_seqs=SEQUENCES, memory_utilization=MODULES_SHARE),
        **own_modules(layout.zero),
    )


def _layout(s: FrameworkSettings, gpus: int, batch: int) -> Layout:
    return training_layout(
        gpus,
        **_sharding(s),
        micro_batch=max(1, batch),
        recompute="full" if s.flag("gradient_checkpointing", default=True) else "none",
    )


def _software(s: FrameworkSettings) -> Software | None:
    """Liger's loss goes through one response at a time; None: all logits of a micro-batch stand at once."""
    if not s.flag("use_liger_kernel", "use_liger_loss"):
        return None
    head = replace(LIGER, tokens=s.whole("max_completion_length", default=512))
    return replace(default_software("fsdp2" if _fsdp(s) else "deepspeed"), head=head)


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the trainer and its loss.

    Raises:
        RlhfsimError: it trains on given pairs or labels.
    """
    trainer = s.text("trainer", default="GRPOTrainer")
    if trainer.startswith(("DPO", "KTO")):
        raise RlhfsimError(
            "no-rollout",
            f"{trainer} trains on given pairs or labels, without a rollout",
            help="ask rlhfsim estimate --algorithm dpo, with the layout of the configuration",
        )
    if "RLOO" in trainer:
        return "rloo"
    if s.find("importance_sampling_level") == "sequence":
        return "gspo"
    losses: dict[str, Algorithm] = {"dr_grpo": "dr-grpo", "cispo": "cispo"}
    return losses.get(s.text("loss_type", default=""), "grpo")


def _longest_prompt(s: FrameworkSettings) -> int | None:
    """What the engine's length leaves beside a response: TRL cuts no prompts."""
    both = s.count("vllm_max_model_length", "max_model_len")
    return max(1, both - s.whole("max_completion_length", default=512)) if both else None


def _per_node(s: FrameworkSettings, gpus: int) -> int:
    nodes = s.count("num_machines") or 1
    return max(1, gpus // nodes) if nodes > 1 else min(8, gpus)


def _fsdp(s: FrameworkSettings) -> bool:
    signs = (s.has("fsdp_config"), bool(s.find("fsdp")), s.find("distributed_type") == "FSDP")
    return any(signs)


def _sharding(s: FrameworkSettings) -> dict[str, Any]:
    """ZeRO stage and what lies on the host, from accelerate's or DeepSpeed's own configuration."""
    if _fsdp(s):
        whole = s.text("fsdp_config.fsdp_reshard_after_forward", default="true").lower()
        hosted = s.flag("fsdp_config.fsdp_offload_params")
        return {"zero": 3 if whole in ("true", "full_shard") else 2, **(ON_HOST if hosted else {})}
    stage = _stage(s)
    found = {
        part: s.find(
            f"deepspeed_config.offload_{part}_device",
            f"zero_optimization.offload_{part}.device",
            f"deepspeed.zero_optimization.offload_{part}.device",
        )
        for part in ("optimizer", "param")
    }
    return {
        "zero": stage,
        "offload_optimizer": "cpu" if found["optimizer"] == "cpu" else "none",
        "offload_params": "cpu" if found["param"] == "cpu" and stage == 3 else "none",
    }


def _stage(s: FrameworkSettings) -> int:
    """ZeRO stage, as it is said, or as the file behind `deepspeed` is called; 0 without DeepSpeed."""
    named, said = s.find("deepspeed"), s.find(*STAGES)
    if said is None and named is not None:
        stage = STAGE_NAMED.search(str(named).lower())
        if stage is None:
            raise SettingMissing(STAGES[0], s.name)
        return int(stage[1])
    return s.whole(*STAGES, default=0)


def processes(s: FrameworkSettings) -> int:
    """Processes, one a GPU: accelerate's number of all, or a node's of deepspeed or torchrun."""
    each = s.count("nproc_per_node", "num_gpus")
    nodes = s.count("nnodes", "num_nodes") or 1
    if each and s.find(*PROCESSES) is None:
        return each * nodes
    return s.whole(*PROCESSES)


def _colocated(s: FrameworkSettings, gpus: int) -> RolloutLayout:
    """TRL's own engine holds the samples of a batch on the ranks of a replica at a time."""
    tp = s.whole("vllm_tensor_parallel_size", default=1) if s.flag("use_vllm") else 1
    batch = s.whole("per_device_train_batch_size", default=8) * per_generation(s)
    return rollout_layout(
        gpus,
        tp=tp,
        max_num_seqs=batch * tp if s.flag("use_vllm") else SEQUENCES,
        memory_utilization=s.share("vllm_gpu_memory_utilization", default=0.3),
    )


def _server(s: FrameworkSettings) -> RolloutLayout:
    """The engine that `vllm serve` (or `trl vllm-serve`) starts on GPUs of its own."""
    tp = s.whole("tensor_parallel_size", "vllm_tensor_parallel_size", default=1)
    pp, dp = (s.whole(f"{kind}_parallel_size", default=1) for kind in ("pipeline", "data"))
    return rollout_layout(
        s.whole("vllm_gpus", default=tp * pp * dp),
        tp=tp,
        pp=pp,
        max_num_seqs=s.whole("max_num_seqs", default=SEQUENCES),
        max_batched_tokens=s.whole("max_num_batched_tokens", default=8192),
        memory_utilization=s.share("gpu_memory_utilization", default=0.9),
        cuda_graphs=not s.flag("enforce_eager"),
        precision="fp8" if "fp8" in str(s.find("quantization") or "") else "bf16",
        kv_precision="fp8" if "fp8" in str(s.find("kv_cache_dtype") or "") else "bf16",
    )


def _accumulation(s: FrameworkSettings) -> int:
    return max(1, s.whole("gradient_accumulation_steps", default=1))


def per_generation(s: FrameworkSettings) -> int:
    """Micro-batches of one process between two generations."""
    if given := s.count("steps_per_generation"):
        return given
    whole = s.count("generation_batch_size")
    each = s.whole("per_device_train_batch_size", default=8) * processes(s)
    return max(1, whole // max(1, each)) if whole else _accumulation(s)


def group(s: FrameworkSettings) -> int:
    """Optimizer steps from one generation to the next: `step_time` is of one."""
    return max(1, per_generation(s) * s.whole("num_iterations", default=1) // _accumulation(s))


CONFIGURATION = Configuration(
    name="trl",
    title="TRL",
    describe=describe,
    findings=findings,
    entries=(r"\btrl (grpo|rloo|dpo|kto)\b", r"\b(GRPO|RLOO|PPO)(Config|Trainer)\b"),
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
