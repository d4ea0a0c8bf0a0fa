"""OpenRLHF 0.11.2: its DeepSpeed strategy in a described world, and the configurations that it hands to DeepSpeed.

Optimizer steps are counted as `ppo_train` counts them: every sample of a rank in micro-batches of
`train.micro_batch_size`, one step after `accumulated_gradient` of them, or, of packs, after each
`train.batch_size` samples (trainer/ppo_utils/replay_buffer.py, `setup_dynamic_batch`).
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.frameworks.set_up.world import without_megatron, world

CALLS = ("actor", "critic", "ref")
ROLES = {"actor": "actor", "critic": "critic", "ref": "reference"}


def derived(args: Any) -> dict[str, Any]:
    """Fields of a plan that OpenRLHF's workers make of its flags."""
    there = {"actor": True, "critic": bool(args.critic.model_name_or_path), "ref": args.algo.kl.init_coef > 0}
    shared = args.train.colocate_all and not args.train.async_enable
    said: dict[str, Any] = {
        "rollout.gpus": args.vllm.num_engines * args.vllm.tensor_parallel_size,
        "rollout.layout.tp": args.vllm.tensor_parallel_size,
        "rollout.layout.dp": args.vllm.num_engines,
        "rollout.layout.memory_utilization": args.vllm.gpu_memory_utilization,
        "rollout.layout.cuda_graphs": not args.vllm.enforce_eager,
        "rollout.sleeps": shared and args.vllm.enable_sleep,
        "workload.prompts": args.rollout.batch_size,
        "workload.samples": args.rollout.n_samples_per_prompt,
    }
    for name in CALLS:
        if there[name]:
            role = ROLES[name]
            said |= {f"{role}.{key}": value for key, value in _role(args, name).items()}
    return said | {"train.gpus": said["actor.gpus"]}


def _role(args: Any, name: str) -> dict[str, Any]:
    """A role's ranks, its micro-batches and its ZeRO configuration."""
    import torch

    without_megatron()  # flash_attn neither
    from openrlhf.utils.deepspeed import deepspeed as own
    from openrlhf.utils.utils import get_strategy

    place = getattr(args, name)
    gpus = place.num_nodes * place.num_gpus_per_node
    mesh = torch.distributed.device_mesh.init_device_mesh
    args.local_rank = -1
    with (
        world(gpus, place.num_gpus_per_node),
        patch.object(own, "init_device_mesh", lambda _, *shape, **names: mesh("cpu", *shape, **names)),
        patch.object(own.deepspeed, "init_distributed"),
        patch.object(own.DeepspeedStrategy, "setup_ring_attn"),
        patch("torch.cuda.set_device"),
    ):
        strategy = get_strategy(args)
        strategy.setup_distributed()
        ranks, cp, tp = strategy.ds_device_mesh.shape
    packs = args.train.max_tokens_per_gpu if args.train.dynamic_batch_enable else None
    scored = (args.rollout.max_tokens_per_gpu or packs) if packs else None
    said: dict[str, Any] = {
        "gpus": gpus,
        "layout.dp": ranks,
        "layout.cp": cp,
        "layout.tp": tp,
        "score_pack_tokens": scored,
        "score_micro_batch": None if packs else args.rollout.micro_batch_size,
    }
    if name == "ref":
        moved = strategy.get_ds_eval_config(offload=place.offload)["zero_optimization"]["offload_param"]
        return said | {"residency": "offloaded" if moved["device"] == "cpu" else "resident"}
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    each = strategy.accumulated_gradient * args.train.micro_batch_size
    steps = samples // args.train.batch_size if packs else samples // ranks // each
    return said | {
        "layout.zero": strategy.stage,
        "layout.recompute": "full" if args.actor.gradient_checkpointing_enable else "none",
        "layout.offload_optimizer": "cpu" if strategy.adam_offload else "none",
        "leaves": bool(args.ds.enable_sleep),  # ppo_actor.py, 581; ppo_critic.py, 247
        "train_pack_tokens": packs,
        "train_micro_batch": None if packs else args.train.micro_batch_size,
        "updates": steps * args.train.max_epochs,
        "rank_samples": args.train.batch_size // ranks,
    }
