"""verl 0.9.1: its trainer's `_setup` and its workers' `init_model` and `train_mini_batch`, without models.

Replaced are Ray's groups, the loading of models, and Megatron-Core's `parallel_state`, which is not installed:
the one here keeps, as it does, the first sizes with which a process initialises it.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import MagicMock, patch

from tests.frameworks.set_up.world import Groups, without_megatron, world


class Recorded(Exception):
    """What was wanted is known: the rest needs GPUs."""


def derived(trainer: Any) -> dict[str, Any]:
    """Fields of a plan that verl's trainer and workers make of its configuration."""
    without_megatron()
    config = trainer.config
    trainer._resolve_filter_groups_metric()
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    groups = Groups(gpus)
    with (
        world(gpus, config.trainer.n_gpus_per_node),
        patch("verl.workers.engine.megatron.transformer_impl.mpu", groups),
    ):
        workers = _workers(trainer)
        said: dict[str, Any] = {"train.gpus": gpus}
        for role, worker in workers.items():
            said |= _layout(role, worker, groups)
        said |= _updates(config, workers)
        return said | _rollout(config, gpus)


def _workers(trainer: Any) -> dict[str, Any]:
    """The training workers of each role, in the order in which one process builds them."""
    import verl.workers.engine_workers as own
    from verl.trainer.ppo.v1 import trainer_base

    asked: list[dict[str, Any]] = []

    def record(cls: Any, **given: Any) -> Any:
        asked.append(given)
        return MagicMock()

    trainer._init_resource_pool_mgr()
    pool = MagicMock()
    trainer.resource_pool_manager = MagicMock(resource_pool_dict={"pool": pool})
    trainer.resource_pool_manager.get_resource_pool.return_value = pool
    with (
        patch.multiple(
            type(trainer),
            _init_tokenizer=MagicMock(),
            _init_dataloader=MagicMock(),
            _init_dump_executor=MagicMock(),
            _init_resource_pool_mgr=MagicMock(),
        ),
        patch.object(trainer_base, "RayClassWithInitArgs", record),
        patch.object(trainer_base, "create_colocated_worker_cls", MagicMock(side_effect=Recorded)),
        suppress(Recorded),
    ):
        trainer._setup()
    built = {}
    with (
        patch.object(own.TrainingWorker, "reset", MagicMock()),
        patch.object(own, "get_rollout_class", MagicMock()),
        patch.object(own, "CheckpointEngineRegistry", MagicMock()),
        patch.object(own, "FlopsCounter", MagicMock()),
        patch.object(own, "set_numa_affinity", MagicMock()),
    ):
        for given in sorted(asked, key=lambda given: "role" in given):
            if "role" not in given:
                built["critic"] = own.TrainingWorker(config=given["config"])
                continue
            worker = own.ActorRolloutRefWorker(**given)
            worker.init_model()
            both = {"reference": worker.ref, "actor": worker.actor}
            built |= {role: one for role, one in both.items() if one is not None}
    return built


def _layout(role: str, worker: Any, groups: Groups) -> dict[str, Any]:
    """Parallel degrees, micro-batches and where states lie."""
    engine = worker.engine
    config, trained = engine.engine_config, role != "reference"
    derived: dict[str, Any] = {
        f"{role}.layout.dp": engine.get_data_parallel_size(),
        f"{role}.residency": "offloaded" if config.param_offload else "resident",
    }
    if config.strategy == "megatron":
        derived |= {f"{role}.layout.{name}": size for name, size in groups.degrees.items()}
        derived[f"{role}.layout.sequence_parallel"] = config.sequence_parallel
    else:
        shards = engine.device_mesh.shape[-1] if engine.device_mesh.ndim == 2 else None
        derived |= {
            f"{role}.layout.cp": engine.ulysses_sequence_parallel_size,
            f"{role}.layout.shards": shards,
            f"{role}.layout.zero": 3 if config.reshard_after_forward else 2,
            # FSDPEngine._build_fsdp_module: CPUOffloadPolicy or CPUOffload, and nothing leaves between calls
            f"{role}.layout.offload_params": "cpu"
            if config.offload_policy or config.forward_only
            else "none",
        }
        if config.forward_only:
            derived[f"{role}.residency"] = "resident"
    scores = {"pack": config.infer_max_token_len_per_gpu, "batch": config.infer_micro_batch_size_per_gpu}
    trains = {"pack": config.max_token_len_per_gpu, "batch": config.micro_batch_size_per_gpu}
    for kind, sizes in (("score", scores), ("train", trains)):
        if trained or kind == "score":
            derived[f"{role}.{kind}_pack_tokens"] = sizes["pack"] if config.use_dynamic_bsz else None
            derived[f"{role}.{kind}_micro_batch"] = None if config.use_dynamic_bsz else sizes["batch"]
    if trained:
        derived[f"{role}.leaves"] = bool(config.optimizer_offload)
        derived[f"{role}.layout.recompute"] = _recompute(worker)
    derived["workload.packing"] = bool(config.use_remove_padding)
    return derived


def _recompute(worker: Any) -> str:
    """By the engine's own configuration of its model, or of Megatron-Core's transformer."""
    engine = worker.engine
    if engine.engine_config.strategy == "megatron":
        return engine.engine_config.override_transformer_config.get("recompute_granularity") or "none"
    return "full" if engine.model_config.enable_gradient_checkpointing else "none"


def _updates(config: Any, workers: dict[str, Any]) -> dict[str, Any]:
    """Optimizer steps of an iteration, and samples of one on a rank, counted while a worker's loop runs."""
    import torch
    from tensordict import TensorDict
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils

    derived: dict[str, Any] = {}
    syncs = config.trainer.v1.get(config.trainer.v1.trainer_mode, {}).get("parameter_sync_step", 1)
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    for role, ask in (("actor", PPOTrainer._update_actor), ("critic", PPOTrainer._update_critic)):
        if (worker := workers.get(role)) is None:
            continue
        trainer, batch = MagicMock(config=config), MagicMock(extra_info={})
        trainer.actor_rollout_wg.update_actor.side_effect = Recorded
        trainer.critic_wg.train_mini_batch.side_effect = Recorded
        with suppress(Recorded):
            ask(trainer, batch, {})
        rows = sequences // syncs // worker.engine.get_data_parallel_size()
        data = TensorDict({"tokens": torch.zeros(rows, 1)}, batch_size=[rows])
        tensordict_utils.assign_non_tensor(data, **batch.extra_info)
        with (
            patch.object(worker.engine, "train_mode", lambda **_: nullcontext()),
            patch.object(worker, "train_batch") as step,
            patch.object(worker.engine, "is_mp_src_rank_with_outputs", lambda: False),
        ):
            worker.train_mini_batch(data)
        steps = [len(call.args[0]) for call in step.call_args_list]
        derived |= {f"{role}.updates": syncs * len(steps), f"{role}.rank_samples": steps[0]}
    return derived


def _rollout(config: Any, trained: int) -> dict[str, Any]:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerManager

    group = MagicMock(world_size=trained) if config.actor_rollout_ref.hybrid_engine else None
    manager = type("Manager", (LLMServerManager,), {"rollout_replica_class": _Replica})(config, group)
    asyncio.run(manager._initialize_llm_servers(0))
    said = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return {
        "rollout.gpus": trained if group else said.nnodes * said.n_gpus_per_node,
        "rollout.layout.tp": said.tensor_model_parallel_size,
        "rollout.layout.attention_dp": said.data_parallel_size,
        "rollout.layout.ep": said.expert_parallel_size,
        "rollout.layout.dp": len(manager.rollout_replicas),
        "rollout.layout.max_num_seqs": said.max_num_seqs,
        "rollout.layout.max_batched_tokens": said.max_num_batched_tokens,
        "rollout.layout.memory_utilization": said.gpu_memory_utilization,
        "rollout.layout.cuda_graphs": not said.enforce_eager,
        "rollout.sleeps": bool(group) and said.free_cache_engine and said.enable_sleep_mode,
        "workload.samples": said.n,
        "workload.prompts": config.data.train_batch_size,
    }


class _Replica:
    """A server of the rollout that is not started."""

    _server_handle = _server_address = None

    def __init__(self, **given: Any) -> None:
        """It is enough that it is there."""

    async def init_hybrid(self, group: Any) -> None:
        """Nothing to start."""

    async def init_standalone(self) -> None:
        """Nothing to start."""
