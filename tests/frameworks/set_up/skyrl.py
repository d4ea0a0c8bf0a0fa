"""SkyRL 0.4.0: the strategies and meshes of its workers, its dispatch, its mini- and micro-batches."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, patch

from tests.frameworks.set_up.world import Groups, without_megatron, world

ROLES = {"actor": "policy", "reference": "ref", "critic": "critic"}


def derived(cfg: Any) -> dict[str, Any]:
    """Fields of a plan that SkyRL's workers make of a configuration."""
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    without_megatron()
    algorithm, trainer = cfg.trainer.algorithm, cfg.trainer
    there = {
        "actor": True,
        "reference": algorithm.use_kl_loss or algorithm.use_kl_in_reward,
        "critic": trainer.critic.model.path is not None,
    }
    groups = {name: MagicMock() for role, name in ROLES.items() if there[role]}
    dispatch = MagicMock(
        colocate_all=trainer.placement.colocate_all,
        colocate_policy_ref=trainer.placement.colocate_policy_ref,
        _actor_groups=groups,
    )
    said = {"workload.packing": trainer.remove_microbatch_padding, **_rollout(cfg)}
    for role, name in ROLES.items():
        if there[role]:
            managed = WorkerDispatch._should_manage_offload(dispatch, name)
            said |= {f"{role}.{key}": value for key, value in _role(cfg, role, name, managed).items()}
    return said | {"train.gpus": said["actor.gpus"]}


def _role(cfg: Any, role: str, name: str, managed: bool) -> dict[str, Any]:
    section, place = getattr(cfg.trainer, name), cfg.trainer.placement
    each = getattr(place, f"{name}_num_gpus_per_node")
    gpus = each * getattr(place, f"{name}_num_nodes")
    trained = role != "reference"
    with world(gpus, each):
        cut = _megatron(section, gpus) if cfg.trainer.strategy == "megatron" else _fsdp(section, gpus)
    by_hand = cut.pop("by_hand")  # otherwise FSDP keeps them on the host
    said: dict[str, Any] = {"gpus": gpus, **cut}
    if by_hand:
        said["residency"] = "offloaded" if managed else "resident"
    if trained:
        said["layout.recompute"] = _recompute(cfg, section)
        said |= _batches(cfg, name, cut["layout.dp"])
        said |= {"leaves": managed and section.optimizer_config.offload_after_step} if by_hand else {}
    return said | _micro_batches(cfg, cut["layout.cp"], trained=trained)


def _recompute(cfg: Any, section: Any) -> str:
    if not cfg.trainer.gradient_checkpointing:
        return "none"
    if cfg.trainer.strategy != "megatron":
        return "full"
    return (section.megatron_config.transformer_config_kwargs or {}).get("recompute_granularity") or "full"


def _fsdp(section: Any, gpus: int) -> dict[str, Any]:
    """The meshes of `Worker.init_worker_process_group` and `FSDPStrategy.setup_distributed`."""
    import torch
    from skyrl.backends.skyrl_train.distributed import fsdp_strategy, fsdp_utils
    from skyrl.backends.skyrl_train.workers.worker import Worker

    mesh = torch.distributed.device_mesh.init_device_mesh
    here = lambda _, *shape, **names: mesh("cpu", *shape, **names)  # noqa: E731
    worker = MagicMock(_world_size=gpus, sequence_parallel_size=section.sequence_parallel_size)
    strategy = fsdp_strategy.FSDPStrategy(section.fsdp_config, getattr(section, "optimizer_config", None))
    with (
        patch.object(fsdp_utils, "init_device_mesh", here),
        patch.object(torch.distributed.device_mesh, "init_device_mesh", here),
        patch.object(torch.cuda, "set_device"),
    ):
        Worker.init_worker_process_group(worker)
        strategy.setup_distributed()
    shards = strategy.device_mesh.shape[-1] if strategy.device_mesh.ndim == 2 else None
    config = section.fsdp_config
    return {
        "by_hand": strategy.manual_offload,
        "layout.dp": worker.mesh_rank.dp_size,
        "layout.cp": section.sequence_parallel_size,
        "layout.shards": shards,
        "layout.zero": 3 if config.reshard_after_forward else 2,
        "layout.offload_params": "cpu" if config.cpu_offload else "none",
    }


def _megatron(section: Any, gpus: int) -> dict[str, Any]:
    from skyrl.backends.skyrl_train.distributed.megatron import megatron_strategy

    groups, optimizer = Groups(gpus), getattr(section, "optimizer_config", None)
    strategy = megatron_strategy.MegatronStrategy(section.megatron_config, optimizer_config=optimizer)
    with patch.object(megatron_strategy, "mpu", groups), patch("torch.cuda.set_device"):
        strategy.setup_distributed()
    degrees = {f"layout.{name}": size for name, size in groups.degrees.items()}
    host = section.megatron_config.optimizer_config_kwargs or {}
    hosted = bool(host.get("optimizer_cpu_offload"))
    return {
        "by_hand": True,
        "layout.dp": groups.get_data_parallel_world_size(),
        **({} if optimizer is None else {"layout.offload_optimizer": "cpu" if hosted else "none"}),
        **degrees,
    }


def _batches(cfg: Any, name: str, ranks: int) -> dict[str, Any]:
    """Optimizer steps of a batch and samples of one on a rank (`train_critic_and_policy`)."""
    from skyrl.train.dataset.preprocess import compute_prompt_mini_batch_boundaries

    prompts, samples = cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt
    size = getattr(cfg.trainer, f"{name}_mini_batch_size")
    uids = [str(prompt) for prompt in range(prompts) for _ in range(samples)]
    ends = compute_prompt_mini_batch_boundaries(uids, size, prompts, False, samples)
    updates = len(ends) * cfg.trainer.update_epochs_per_batch
    return {"updates": updates, "rank_samples": (ends[0][1] - ends[0][0]) // ranks}


def _micro_batches(cfg: Any, cp: int, *, trained: bool) -> dict[str, Any]:
    """What `get_microbatch_iterator` is handed by `forward` and `forward_backward`."""
    tokens = cfg.trainer.max_tokens_per_microbatch
    packs = tokens // cp if tokens > 0 else None
    sizes = {"score": cfg.trainer.micro_forward_batch_size_per_gpu}
    sizes |= {"train": cfg.trainer.micro_train_batch_size_per_gpu} if trained else {}
    said: dict[str, Any] = {f"{kind}_micro_batch": None if packs else size for kind, size in sizes.items()}
    return said | {f"{kind}_pack_tokens": packs for kind in sizes}


def _rollout(cfg: Any) -> dict[str, Any]:
    engine, shared = cfg.generator.inference_engine, cfg.trainer.placement.colocate_all
    replica = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return {
        "rollout.gpus": engine.num_engines * replica,
        "rollout.layout.dp": engine.num_engines,
        "rollout.layout.tp": engine.tensor_parallel_size,
        "rollout.layout.pp": engine.pipeline_parallel_size,
        "rollout.layout.attention_dp": engine.data_parallel_size,
        "rollout.layout.ep": engine.expert_parallel_size,
        "rollout.layout.max_num_seqs": engine.max_num_seqs,
        "rollout.layout.max_batched_tokens": engine.max_num_batched_tokens,
        "rollout.layout.memory_utilization": engine.gpu_memory_utilization,
        "rollout.layout.cuda_graphs": not engine.enforce_eager,
        "rollout.sleeps": shared,
        "workload.prompts": cfg.trainer.train_batch_size,
        "workload.samples": cfg.generator.n_samples_per_prompt,
    }
