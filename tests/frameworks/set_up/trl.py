"""TRL 1.16.0 on accelerate: the batches of `GRPOConfig.__post_init__`, and the plugin that its launcher's file makes.

Optimizer steps are counted as GRPOTrainer counts them: it generates every steps_per_generation x num_iterations
micro-steps (trainer/grpo_trainer.py, `_prepare_inputs`) and steps after gradient_accumulation_steps of them.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch


def derived(args: Any, launcher: str) -> dict[str, Any]:
    """Fields of a plan that TRL and accelerate make of their files."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(launcher)
    ranks, micro = config.num_processes, args.per_device_train_batch_size
    said: dict[str, Any] = {
        "train.gpus": ranks,
        "actor.gpus": ranks,
        "actor.layout.dp": ranks,
        "actor.layout.cp": 1,
        "actor.train_micro_batch": micro,
        "actor.train_pack_tokens": None,
        "actor.layout.recompute": "full" if args.gradient_checkpointing else "none",
        **_states(launcher),
    }
    if not hasattr(args, "num_generations"):
        return said | {"workload.prompts": micro * ranks * args.gradient_accumulation_steps}
    steps = args.steps_per_generation * args.num_iterations
    return said | {
        "actor.updates": steps // args.gradient_accumulation_steps,
        "actor.rank_samples": micro * args.gradient_accumulation_steps,
        "workload.prompts": args.generation_batch_size // args.num_generations,
        "workload.samples": args.num_generations,
        **(_colocated(args, ranks) if args.use_vllm and args.vllm_mode == "colocate" else {}),
    }


def _states(launcher: str) -> dict[str, Any]:
    """ZeRO stage and offload of the plugin that a process finds in its environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    given = launch_command_parser().parse_args(["--config_file", launcher, "script.py"])
    args, _, _ = _validate_launch_command(given)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""  # as `launch_command` sets it
        _, told = prepare_deepspeed_cmd_env(args)
        with patch.dict(os.environ, told):
            plugin = DeepSpeedPlugin()
        zero = plugin.deepspeed_config["zero_optimization"]
        return {
            "actor.layout.zero": zero["stage"],
            "actor.layout.offload_optimizer": zero["offload_optimizer"]["device"],
            "actor.layout.offload_params": zero["offload_param"]["device"],
        }
    with patch.dict(os.environ, prepare_multi_gpu_env(args)):
        sharded = FullyShardedDataParallelPlugin()
    hosted = type(sharded.cpu_offload).__name__ == "CPUOffloadPolicy"
    return {
        "actor.layout.zero": 3 if sharded.reshard_after_forward else 2,
        "actor.layout.offload_params": "cpu" if hosted else "none",
    }


def _colocated(args: Any, ranks: int) -> dict[str, Any]:
    """Engines in the training processes (generation/vllm_generation.py, `_init_vllm`)."""
    return {
        "rollout.gpus": ranks,
        "rollout.layout.tp": args.vllm_tensor_parallel_size,
        "rollout.layout.dp": ranks // args.vllm_tensor_parallel_size,
        "rollout.layout.memory_utilization": args.vllm_gpu_memory_utilization,
        "rollout.layout.max_num_seqs": args.per_device_train_batch_size
        * args.vllm_tensor_parallel_size
        * args.steps_per_generation,
        "rollout.sleeps": args.vllm_enable_sleep_mode,
    }
