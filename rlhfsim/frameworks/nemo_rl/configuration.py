"""NeMo-RL: its YAML configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import (
    ON_HOST,
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.engines import dynamic_sampling, speculation
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, megatron_degrees
from rlhfsim.frameworks.nemo_rl.bases import based_on
from rlhfsim.frameworks.nemo_rl.findings import findings
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Dispatcher, Layout, Recompute, RolloutLayout
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm, GradientSums

ESTIMATORS: dict[str, Algorithm] = {"grpo": "grpo", "reinforce_plus_plus": "reinforce++", "gdpo": "grpo"}
"""grpo.adv_estimator.name -> algorithm here."""
GEN, MEGATRON, DTENSOR = "policy.generation", "policy.megatron_cfg", "policy.dtensor_cfg"

DISPATCHERS: Mapping[Dispatcher, tuple[str, str]] = {
    "alltoall": ("alltoall", ""),
    "allgather": ("allgather", ""),
    "deepep": ("flex", "deepep"),
    "hybridep": ("flex", "hybridep"),
}
"""Dispatcher of experts -> moe_token_dispatcher_type and moe_flex_dispatcher_backend of Megatron-Core."""
ASYNC_ENGINE = 128, 2048
"""Sequences and tokens of a step of `vllm_cfg.async_engine`: vllm_worker_async.py builds it without a
usage context, so vLLM 0.10.0 to 0.17.1 (tags v0.4.0 to v0.6.0) has SchedulerConfig's own defaults."""
CHUNKED = Head(
    train_bytes=12,
    score_bytes=4,
    source="NeMo-RL, distributed/model_utils.py, ChunkedDistributedLogprob: FP32 copies and softmax of a "
    "chunk alone; logits counted in FP32, gradients of chunks and their concatenation",
)
"""Around the logits with `policy.logprob_chunk_size`."""


# Keys and defaults: examples/configs/grpo_math_1B.yaml (same commit), on which the recipes build.
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that a YAML configuration describes."""
    megatron = s.flag(f"{MEGATRON}.enabled", default=False)
    if algorithm(s) == "dpo":
        return _preferences(s, megatron)
    per_node, nodes = (s.whole("cluster.gpus_per_node", default=1), s.whole("cluster.num_nodes", default=1))
    rollout = None if s.flag(f"{GEN}.colocated.enabled", default=True) else _own_gpus(s, per_node, nodes)
    gpus = per_node * nodes - (rollout or 0)
    kind = algorithm(s)
    loop = "ppo" if kind == "ppo" else "grpo"
    prompts = s.whole(f"{loop}.num_prompts_per_step", default=32)
    samples = s.whole(f"{loop}.num_generations_per_prompt", default=16)
    batch = max(1, s.whole("policy.train_global_batch_size", default=512))
    longest = s.whole("policy.max_total_sequence_length", default=512)
    response = min(longest, s.whole(f"{GEN}.max_new_tokens", default=longest))
    asynchronous = f"{loop}.async_{loop}"
    stale = s.flag(f"{asynchronous}.enabled", default=False)
    adapters = f"{MEGATRON}.peft" if megatron else f"{DTENSOR}.lora_cfg"
    return RunDescription(
        algorithm=kind,
        model=s.model("policy.model_name"),
        critic=_critic(s) if kind == "ppo" else None,
        prompts=prompts,
        samples=samples,
        epochs=s.whole("ppo.ppo_epochs", default=1) if kind == "ppo" else 1,
        mini_batches=max(1, round(prompts * samples / batch)),
        packing=_packed(s) or s.flag("policy.dynamic_batching.enabled"),
        kl=s.share("loss_fn.reference_policy_kl_penalty", default=0.01) != 0,
        old_logprobs="reused" if _on_policy(s, prompts * samples, batch) else "recompute",
        lora_rank=s.whole(f"{adapters}.dim", default=8) if s.flag(f"{adapters}.enabled") else 0,
        gradients=_gradients(s, megatron),
        dynamic_sampling=_dynamic_sampling(s, prompts),
        max_prompt=max(1, longest - response) if response < longest else None,
        max_response=response,
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=rollout,
        layout=_layout(s, "policy", gpus, megatron),
        roles=_value(s, gpus, megatron, leaves=rollout is None) if kind == "ppo" else {},
        optimizer_leaves=rollout is None and (megatron or not s.flag(f"{DTENSOR}.cpu_offload")),
        scoring_residency="swapped",
        software=_software(s, megatron),
        train_precision="fp8" if megatron and s.flag(f"{MEGATRON}.fp8_cfg.enabled") else "bf16",
        rollout=_rollout(s, rollout or per_node * nodes),
        sleep=2,
        weight_path="ipc" if rollout is None else _path(s),
        staleness=float(s.whole(f"{asynchronous}.max_trajectory_age_steps", default=1)) if stale else 0.0,
        partial_rollout=stale and s.flag(f"{asynchronous}.in_flight_weight_updates"),
    )


def _on_policy(s: FrameworkSettings, samples: int, batch: int) -> bool:
    """Whether the ratio is that of the training pass with itself, and no forward for old log-probs runs.

    nemo_rl/algorithms/grpo.py at 002cdc2: `seq_logprob_error_threshold` needs them all the same, and more
    than one update a step is refused.
    """
    forced, needed = s.flag("loss_fn.force_on_policy_ratio"), s.find("grpo.seq_logprob_error_threshold")
    return forced and needed is None and samples == batch and s.whole("ppo.ppo_epochs", default=1) == 1


def _preferences(s: FrameworkSettings, megatron: bool) -> RunDescription:
    """DPO (examples/configs/dpo.yaml): batches and micro-batches count pairs, each step is one update."""
    gpus = s.whole("cluster.gpus_per_node", default=1) * s.whole("cluster.num_nodes", default=1)
    layout = _layout(s, "policy", gpus, megatron)
    adapters = f"{MEGATRON}.peft" if megatron else f"{DTENSOR}.lora_cfg"
    return RunDescription(
        algorithm="dpo",
        model=s.model("policy.model_name"),
        prompts=max(1, s.whole("policy.train_global_batch_size", default=128)),
        samples=1,
        packing=_packed(s),
        kl=True,
        lora_rank=s.whole(f"{adapters}.dim", default=8) if s.flag(f"{adapters}.enabled") else 0,
        gradients=_gradients(s, megatron),
        max_response=s.whole("policy.max_total_sequence_length", default=1024),
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=s.whole("cluster.gpus_per_node", default=1),
        layout=replace(layout, micro_batch=2 * layout.micro_batch),
        scoring_residency="swapped",
        software=_software(s, megatron),
        train_precision="fp8" if megatron and s.flag(f"{MEGATRON}.fp8_cfg.enabled") else "bf16",
        rollout=rollout_layout(gpus),
        weight_path="none",
    )


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the loop, of its estimator, and of what that subtracts and divides by."""
    if s.has("dpo"):
        return "dpo"
    if s.has("ppo"):
        return "ppo"
    found = ESTIMATORS.get(s.text("grpo.adv_estimator.name", default="grpo"), "grpo")
    if found != "grpo" or s.flag("grpo.normalize_rewards", default=True):
        return found
    return "rloo" if s.flag("grpo.use_leave_one_out_baseline", default=True) else "dr-grpo"


def _path(s: FrameworkSettings) -> WeightPath:
    return "p2p" if s.find(f"{GEN}.refit_transport") == "nixl" else "broadcast"


def _critic(s: FrameworkSettings) -> str | None:
    named = s.find("value.model_name")
    return None if named == s.find("policy.model_name") else named


def _own_gpus(s: FrameworkSettings, per_node: int, nodes: int) -> int:
    """GPUs of the rollout alone: nodes of it, or GPUs of the only node."""
    prefix = f"{GEN}.colocated.resources"
    if nodes == 1:
        s.overruled(f"{prefix}.num_nodes")
        return s.whole(f"{prefix}.gpus_per_node")
    return s.whole(f"{prefix}.num_nodes") * s.whole(f"{prefix}.gpus_per_node", default=per_node)


def _value(s: FrameworkSettings, gpus: int, megatron: bool, *, leaves: bool) -> dict[str, RoleDescription]:
    """The value model, which shares the policy's GPUs and is cut by keys of its own."""
    layout = _layout(s, "value", gpus, megatron)
    moves = leaves and layout.offload_params == "none"
    return {"critic": RoleDescription(layout=layout, optimizer_leaves=moves)}


def _layout(s: FrameworkSettings, model: str, gpus: int, megatron: bool) -> Layout:
    """Of the policy or the value model."""
    degrees = _degrees(s, model, megatron)
    adam = f"{model}.megatron_cfg.optimizer"
    offloads = s.flag(f"{model}.dtensor_cfg.cpu_offload")
    hosted: dict[str, Any] = dict(ON_HOST) if not megatron and offloads else {}
    if megatron and s.flag(f"{adam}.optimizer_cpu_offload"):
        away = s.share(f"{adam}.optimizer_offload_fraction", default=1.0)
        hosted = {"offload_optimizer": "cpu", "offload_fraction": away} if away else {}
    return training_layout(
        gpus,
        **degrees,
        zero=1 if megatron else 3,
        **_micro_batch(s, model, degrees["cp"]),
        recompute=_recompute(s, model, megatron),
        dispatcher=_dispatcher(s, f"{model}.megatron_cfg") if megatron and degrees["ep"] > 1 else None,
        **hosted,
    )


def _dispatcher(s: FrameworkSettings, prefix: str) -> Dispatcher | None:
    """None: no key says it."""
    backend = s.find(f"{prefix}.moe_flex_dispatcher_backend")
    if s.flag(f"{prefix}.moe_enable_deepep"):
        backend = "deepep"
    said = str(s.find(f"{prefix}.moe_token_dispatcher_type") or ""), str(backend or "")
    return next((name for name, keys in DISPATCHERS.items() if keys == said), None)


def _rollout(s: FrameworkSettings, gpus: int) -> RolloutLayout:
    vllm, kwargs = f"{GEN}.vllm_cfg", f"{GEN}.vllm_kwargs"
    sequences, tokens = ASYNC_ENGINE if s.flag(f"{vllm}.async_engine") else (1024, 8192)
    ends = ("num_first_layers_in_bf16", "num_last_layers_in_bf16")
    kept = str(s.find(f"{vllm}.quantization_ignored_layer_kws") or "")
    precision: Literal["bf16", "fp8"] = "fp8" if "fp8" in str(s.find(f"{vllm}.precision") or "") else "bf16"
    return rollout_layout(
        gpus,
        tp=s.whole(f"{vllm}.tensor_parallel_size", default=1),
        pp=s.whole(f"{vllm}.pipeline_parallel_size", default=1),
        ep=s.whole(f"{vllm}.expert_parallel_size", default=1),
        memory_utilization=s.share(f"{vllm}.gpu_memory_utilization", default=0.6),
        cuda_graphs=not s.flag(f"{vllm}.enforce_eager"),
        max_num_seqs=s.whole(f"{kwargs}.max_num_seqs", default=sequences),
        max_batched_tokens=s.whole(f"{kwargs}.max_num_batched_tokens", default=tokens),
        precision=precision,
        kv_precision="fp8" if "fp8" in str(s.find(f"{vllm}.kv_cache_dtype") or "") else "bf16",
        bf16_layers=sum(s.whole(f"{vllm}.{end}", default=0) for end in ends) if precision == "fp8" else 0,
        bf16_attention=precision == "fp8" and "o_proj" in kept,
        speculation=speculation(s, f"{kwargs}.speculative_config"),
    )


def _gradients(s: FrameworkSettings, megatron: bool) -> GradientSums:
    """NeMo-RL's configurations sum Megatron's gradients in BF16."""
    fp32 = s.flag(f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32", default=False)
    return "bf16" if megatron and not fp32 else "backend"


def _dynamic_sampling(s: FrameworkSettings, prompts: int) -> DynamicSampling | None:
    if not s.flag("grpo.use_dynamic_sampling"):
        return None
    each = round(prompts * s.share("grpo.batch_multiplier", default=1.0))
    most = s.whole("grpo.dynamic_sampling_max_gen_batches", default=10)
    return dynamic_sampling(s, prompts, each, most)


def _packed(s: FrameworkSettings, model: str = "policy") -> bool:
    return s.flag(f"{model}.sequence_packing.enabled", default=model == "policy")


def _micro_batch(s: FrameworkSettings, model: str, cp: int) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU: limits are of the cp ranks of a sequence together."""
    size = max(1, s.whole(f"{model}.train_micro_batch_size", "policy.train_micro_batch_size", default=4))
    packed = _packed(s, model)
    if not (packed or s.flag(f"{model}.dynamic_batching.enabled")):
        return {"micro_batch": size}
    name = f"{model}.{'sequence_packing' if packed else 'dynamic_batching'}"
    longest = s.whole("policy.max_total_sequence_length", default=512)
    scored = s.whole(f"{model}.logprob_batch_size", default=size) * longest
    limits = {
        "pack_tokens": s.whole(f"{name}.train_mb_tokens", default=size * longest),
        "score_pack_tokens": s.whole(f"{name}.logprob_mb_tokens", default=scored),
    }
    return {field: max(1, math.ceil(tokens / cp)) for field, tokens in limits.items()}


def _degrees(s: FrameworkSettings, model: str, megatron: bool) -> dict[str, Any]:
    prefix = f"{model}.{'megatron' if megatron else 'dtensor'}_cfg"
    if megatron:
        degrees: dict[str, Any] = megatron_degrees(s, prefix, etp=1)
    else:
        keys = {"tp": "tensor", "cp": "context", "ep": "expert"}
        degrees = {d: s.whole(f"{prefix}.{key}_parallel_size", default=1, least=1) for d, key in keys.items()}
    whole = s.flag(f"{prefix}.sequence_parallel", default=False)
    return {**degrees, "sequence_parallel": whole or degrees["tp"] == 1}


def _recompute(s: FrameworkSettings, model: str, megatron: bool) -> Recompute:
    prefix = f"{model}.{'megatron' if megatron else 'dtensor'}_cfg"
    if not s.flag(f"{prefix}.activation_checkpointing"):
        return "none"
    return "selective" if s.find(f"{prefix}.recompute_granularity") == "selective" and megatron else "full"


def _software(s: FrameworkSettings, megatron: bool) -> Software | None:
    """Log-probs in chunks of the sequence; None: of all tokens at once."""
    if not s.find("policy.logprob_chunk_size"):
        return None
    return replace(default_software("megatron" if megatron else "fsdp2"), head=CHUNKED)


CONFIGURATION = Configuration(
    name="nemo-rl",
    title="NeMo-RL",
    describe=describe,
    findings=findings,
    entries=(r"\brun_(grpo|ppo|dpo)\w*\.py",),
    shown=("examples/run_grpo.py",),
    keys=(
        "grpo.num_",
        "dpo.",
        "policy.megatron_cfg.",
        "policy.dtensor_cfg.",
        "policy.generation.",
        "policy.train_global_batch_size",
        "loss_fn.reference_policy_kl_penalty",
    ),
    below=based_on,
)
