"""Keys of verl whose defaults hold where a typed plan leaves a field open; micro-batches have none."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.frameworks.verl.configuration import ACTOR, REF, ROLL

_ENGINES = tuple(f"{role}.{engine}" for role in (ACTOR, REF) for engine in ("fsdp_config", "megatron"))
LEFT_OPEN: Mapping[str, tuple[str, ...]] = {
    "rollout.memory_utilization": (f"{ROLL}.gpu_memory_utilization",),
    "actor.recompute": ("actor_rollout_ref.model.enable_gradient_checkpointing",),
    "actor.offload_optimizer": tuple(
        f"{engine}.{what}_offload" for engine in _ENGINES for what in ("param", "optimizer")
    ),
    "rollout.ep": (f"{ROLL}.expert_parallel_size",),
    "rollout.max_num_seqs": (f"{ROLL}.max_num_seqs", f"{ROLL}.max_num_batched_tokens"),
    "rollout.cuda_graphs": (f"{ROLL}.enforce_eager",),
    "rollout.sleep": (f"{ROLL}.free_cache_engine",),
}
