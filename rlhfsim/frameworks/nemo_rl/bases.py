"""What NeMo-RL's own example configurations set, where it decides a run: users build on them by name.

Keys and values: examples/configs/*.yaml of NVIDIA-NeMo/RL at 7ea279abf (2026-08-22); each over what its
`defaults` names. Those of grpo_math_1B.yaml, on which all build, are the defaults of `configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhfsim.frameworks.configuration.forms import Said

_BATCH = {
    "grpo.num_prompts_per_step": 64,
    "grpo.num_generations_per_prompt": 32,
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 1,
    "policy.max_total_sequence_length": 4096,
    "cluster.gpus_per_node": 8,
}
_FP8 = {"policy.generation.vllm_cfg.precision": "fp8", "policy.megatron_cfg.fp8_cfg.enabled": True}
_MEGATRON = {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False}

BASES: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    "grpo_math_1B": (
        None,
        {
            "policy.model_name": "Qwen/Qwen2.5-1.5B",
            "policy.megatron_cfg.enabled": False,
            "policy.dtensor_cfg.enabled": True,
        },
    ),
    "grpo_math_1B_megatron": ("grpo_math_1B", _MEGATRON),
    "grpo_math_8B": (
        "grpo_math_1B",
        {**_BATCH, "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct", "policy.logprob_batch_size": 2},
    ),
    "grpo_math_8B_megatron": (
        "grpo_math_1B_megatron",
        {
            **_BATCH,
            "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct",
            "policy.logprob_batch_size": 4,
            "policy.megatron_cfg.pipeline_model_parallel_size": 2,
        },
    ),
    "grpo_math_8B_megatron_fp8": (
        "grpo_math_8B_megatron",
        {**_FP8, "policy.generation.vllm_cfg.gpu_memory_utilization": 0.5},
    ),
    "grpo_math_70B_megatron": (
        "grpo_math_1B_megatron",
        {
            **_BATCH,
            "policy.model_name": "meta-llama/Llama-3.3-70B-Instruct",
            "policy.megatron_cfg.tensor_model_parallel_size": 4,
            "policy.megatron_cfg.pipeline_model_parallel_size": 4,
            "policy.generation.vllm_cfg.tensor_parallel_size": 8,
            "cluster.num_nodes": 8,
        },
    ),
    "grpo_math_70B_megatron_fp8": (
        "grpo_math_70B_megatron",
        {**_FP8, "policy.megatron_cfg.pipeline_model_parallel_size": 8},
    ),
    "grpo_math_qwen30ba3b_megatron": (
        "grpo_math_1B_megatron",
        {
            **_BATCH,
            "policy.model_name": "Qwen/Qwen3-30B-A3B",
            "policy.logprob_batch_size": 4,
            "policy.sequence_packing.enabled": False,
            "policy.megatron_cfg.tensor_model_parallel_size": 2,
            "policy.megatron_cfg.expert_model_parallel_size": 8,
            "policy.megatron_cfg.sequence_parallel": True,
            "policy.generation.vllm_cfg.tensor_parallel_size": 4,
            "policy.generation.vllm_cfg.gpu_memory_utilization": 0.7,
            "cluster.num_nodes": 8,
        },
    ),
    "ppo_math_1B": (
        None,
        {
            "policy.model_name": "Qwen/Qwen2.5-1.5B",
            "policy.megatron_cfg.enabled": False,
            "policy.dtensor_cfg.enabled": True,
            "policy.max_total_sequence_length": 16384,
            "ppo.ppo_epochs": 4,
            "loss_fn.reference_policy_kl_penalty": 0.0,
        },
    ),
    "ppo_math_1B_megatron": ("ppo_math_1B", _MEGATRON),
    "dpo": (
        None,
        {
            "dpo.reference_policy_kl_penalty": 0.05,
            "policy.model_name": "meta-llama/Llama-3.2-1B-Instruct",
            "policy.train_global_batch_size": 128,
            "policy.train_micro_batch_size": 2,
            "policy.max_total_sequence_length": 1024,
            "policy.sequence_packing.enabled": False,
            "policy.dynamic_batching.enabled": False,
            "policy.dtensor_cfg.enabled": True,
            "policy.megatron_cfg.enabled": False,
            "policy.megatron_cfg.tensor_model_parallel_size": 2,
            "policy.megatron_cfg.sequence_parallel": True,
        },
    ),
    "prorlv2.v2": (
        "grpo_math_1B",
        {
            "grpo.use_dynamic_sampling": True,
            "grpo.batch_multiplier": 1.5,
            "grpo.adv_estimator.name": "reinforce_plus_plus",
            "loss_fn.reference_policy_kl_penalty": 0.0001,
        },
    ),
}


def based_on(said: Said) -> Mapping[str, Any]:
    """Values of the example configuration that `--config` or `defaults` names; none for another."""
    named = said.values.get("config") or said.values.get("defaults")
    return _whole(PurePosixPath(str(named)).stem) if named else {}


def _whole(name: str | None) -> dict[str, Any]:
    if name is None or name not in BASES:
        return {}
    parent, own = BASES[name]
    return {**_whole(parent), **own}
