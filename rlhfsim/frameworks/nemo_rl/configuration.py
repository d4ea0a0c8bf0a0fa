"""NeMo-RL: its YAML configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, megatron_degrees
from rlhfsim.frameworks.nemo_rl.bases import based_on
from rlhfsim.specs.placement.layout import Recompute
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: dict[str, Algorithm] = {"grpo": "grpo", "reinforce_plus_plus": "reinforce++", "gdpo": "grpo"}
"""grpo.adv_estimator.name -> algorithm here."""


# Keys and defaults: examples/configs/grpo_math_1B.yaml (same commit), on which the recipes build.
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that a YAML configuration describes."""
    megatron = s.flag("policy.megatron_cfg.enabled", default=False)
    per_node, nodes = (s.whole("cluster.gpus_per_node", default=1), s.whole("cluster.num_nodes", default=1))
    rollout = (
        None if s.flag("policy.generation.colocated.enabled", default=True) else _own_gpus(s, per_node, nodes)
    )
    prompts, samples = (
        s.whole("grpo.num_prompts_per_step", "ppo.num_prompts_per_step", default=32),
        s.whole("grpo.num_generations_per_prompt", "ppo.num_generations_per_prompt", default=16),
    )
    gen, adam = "policy.generation.vllm_cfg", "policy.megatron_cfg.optimizer"
    hosted = megatron and s.flag(f"{adam}.optimizer_cpu_offload")
    away = s.share(f"{adam}.optimizer_offload_fraction", default=1.0) if hosted else 0.0
    ppo = s.has("ppo")
    stale = s.flag("grpo.async_grpo.enabled", default=False)
    return RunDescription(
        algorithm="ppo" if ppo else ESTIMATORS.get(s.text("grpo.adv_estimator.name", default="grpo"), "grpo"),
        model=s.text("policy.model_name"),
        prompts=prompts,
        samples=samples,
        mini_batches=max(
            1, round(prompts * samples / max(1, s.whole("policy.train_global_batch_size", default=512)))
        ),
        packing=s.flag("policy.sequence_packing.enabled", default=True)
        or s.flag("policy.dynamic_batching.enabled"),
        kl=s.share("loss_fn.reference_policy_kl_penalty", default=0.01) != 0,
        recomputes_logprobs=not s.flag("loss_fn.force_on_policy_ratio"),
        max_response=s.whole(
            "policy.generation.max_new_tokens", "policy.max_total_sequence_length", default=512
        ),
        backend="megatron" if megatron else "fsdp2",
        gpus=per_node * nodes - (rollout or 0),
        gpus_per_node=per_node,
        rollout_gpus=rollout,
        layout=training_layout(
            per_node * nodes - (rollout or 0),
            **_degrees(s, megatron),
            zero=1 if megatron else 3,
            **_micro_batch(s, _degrees(s, megatron)["cp"]),
            recompute=_recompute(s, megatron),
            offload_optimizer="cpu" if away else "none",
            offload_fraction=away or 1.0,
        ),
        optimizer_leaves=rollout is None,
        scoring_residency="swapped",
        rollout=rollout_layout(
            rollout or per_node * nodes,
            tp=s.whole(f"{gen}.tensor_parallel_size", default=1),
            pp=s.whole(f"{gen}.pipeline_parallel_size", default=1),
            memory_utilization=s.share(f"{gen}.gpu_memory_utilization", default=0.6),
            cuda_graphs=not s.flag(f"{gen}.enforce_eager"),
            max_num_seqs=s.whole("policy.generation.vllm_kwargs.max_num_seqs", default=1024),
            precision="fp8" if "fp8" in str(s.find(f"{gen}.precision") or "") else "bf16",
        ),
        sleep=2,
        weight_path="ipc" if rollout is None else "broadcast",
        staleness=float(s.whole("grpo.async_grpo.max_trajectory_age_steps", default=1)) if stale else 0.0,
        partial_rollout=stale and s.flag("grpo.async_grpo.in_flight_weight_updates"),
    )


def _own_gpus(s: FrameworkSettings, per_node: int, nodes: int) -> int:
    """GPUs of the rollout alone: nodes of it, or GPUs of the only node."""
    prefix = "policy.generation.colocated.resources"
    if nodes == 1:
        return s.whole(f"{prefix}.gpus_per_node")
    return s.whole(f"{prefix}.num_nodes") * s.whole(f"{prefix}.gpus_per_node", default=per_node)


def _micro_batch(s: FrameworkSettings, cp: int) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU: limits are of the cp ranks of a sequence together."""
    size = max(1, s.whole("policy.train_micro_batch_size", default=4))
    packed = s.flag("policy.sequence_packing.enabled", default=True)
    if not (packed or s.flag("policy.dynamic_batching.enabled")):
        return {"micro_batch": size}
    name = f"policy.{'sequence_packing' if packed else 'dynamic_batching'}"
    longest = s.whole("policy.max_total_sequence_length", default=512)
    scored = s.whole("policy.logprob_batch_size", default=size) * longest
    limits = {
        "pack_tokens": s.whole(f"{name}.train_mb_tokens", default=size * longest),
        "score_pack_tokens": s.whole(f"{name}.logprob_mb_tokens", default=scored),
    }
    return {field: max(1, math.ceil(tokens / cp)) for field, tokens in limits.items()}


def _degrees(s: FrameworkSettings, megatron: bool) -> dict[str, int]:
    if not megatron:
        tp, cp = (
            s.whole(f"policy.dtensor_cfg.{name}_parallel_size", default=1) for name in ("tensor", "context")
        )
        return {"tp": tp, "cp": cp}
    return megatron_degrees(s, "policy.megatron_cfg")


def _recompute(s: FrameworkSettings, megatron: bool) -> Recompute:
    part = "megatron_cfg" if megatron else "dtensor_cfg"
    if not s.flag(f"policy.{part}.activation_checkpointing"):
        return "none"
    return (
        "selective"
        if s.find("policy.megatron_cfg.recompute_granularity") == "selective" and megatron
        else "full"
    )


CONFIGURATION = Configuration(
    name="nemo-rl",
    title="NeMo-RL",
    describe=describe,
    entries=(r"\brun_(grpo|ppo)\w*\.py",),
    shown=("examples/run_grpo.py",),
    keys=(
        "grpo.num_",
        "policy.megatron_cfg.",
        "policy.dtensor_cfg.",
        "policy.generation.",
        "policy.train_global_batch_size",
        "loss_fn.reference_policy_kl_penalty",
    ),
    below=based_on,
)
