"""AReaL 1.0.4: its allocations, and the mini-batches of `PPOActor._ppo_update`."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

ROLES = {"actor": "actor", "reference": "ref", "critic": "critic"}
ENGINES = {
    "vllm": ("max_num_seqs", "gpu_memory_utilization", "enforce_eager", "enable_sleep_mode"),
    "sglang": ("max_running_requests", "mem_fraction_static", "disable_cuda_graph", "enable_memory_saver"),
}
"""Engine -> its fields of sequences at a time, share of memory, no CUDA graphs, sleep."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp")


def derived(config: Any) -> dict[str, Any]:
    """Fields of a plan that AReaL's engines make of a configuration."""
    from areal.api.alloc_mode import ModelAllocation

    said: dict[str, Any] = {}
    for role, name in ROLES.items():
        if (section := getattr(config, name)) is not None:
            said |= {f"{role}.{key}": value for key, value in _role(config, section, role).items()}
    said |= _leaving(config, said)
    allocated = ModelAllocation.from_str(config.rollout.backend, name="rollout")
    rollout = allocated.parallel
    shared = config.rollout.scheduling_strategy.type == "colocation"
    engine, (sequences, share, eager, sleeps) = getattr(config, allocated.backend), ENGINES[allocated.backend]
    return said | {
        "train.gpus": said["actor.gpus"],
        "rollout.gpus": rollout.world_size,
        **{f"rollout.layout.{name}": getattr(rollout, f"{name}_size") for name in ("tp", "pp", "dp")},
        "rollout.layout.max_num_seqs": getattr(engine, sequences),
        "rollout.layout.memory_utilization": getattr(engine, share),
        "rollout.layout.cuda_graphs": not getattr(engine, eager),
        "rollout.sleeps": shared and getattr(engine, sleeps),
        "workload.prompts": config.train_dataset.batch_size,
        "workload.samples": config.gconfig.n_samples,
    }


def _leaving(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Whether states leave between calls, as the beginning of `PPOTrainer` decides it.

    Those lines of trainer/rl_trainer.py are run by themselves: its imports need CUDA's packages.
    """
    trainer = _beginning()
    trainer.begin(config)
    asked = {role: getattr(trainer, f"_should_offload_{name}") for role, name in ROLES.items()}
    assert config.enable_offload or not any(asked.values()), "refused (rl_trainer.py, 1295)"
    if config.actor.fsdp.offload_params:
        del asked["actor"]  # all of it is on the host as it is: what leaves makes no difference
    return {f"{role}.leaves": bool(leaves) for role, leaves in asked.items() if f"{role}.gpus" in said}


@cache
def _beginning() -> Any:
    """An object with what `PPOTrainer` decides of offload, and nothing else of it."""
    from areal.api import cli_args

    package = Path(cli_args.__file__).parents[1]
    tree = ast.parse((package / "trainer" / "rl_trainer.py").read_text())
    [theirs] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PPOTrainer"]
    methods = {n.name: n for n in theirs.body if isinstance(n, ast.FunctionDef)}
    decides = [n for n in methods["__init__"].body if "self._should_offload_" in ast.unparse(n)[:25]]
    begin = ast.parse("def begin(self, config): pass").body[0]
    assert isinstance(begin, ast.FunctionDef)
    begin.body = list(decides)
    kept = [methods["_is_colocation"], methods["_is_actor_rollout_colocated"], begin]
    own = ast.ClassDef(name="Beginning", bases=[], keywords=[], body=list(kept), decorator_list=[])
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {"SchedulingStrategyType": cli_args.SchedulingStrategyType}
    exec(compile(ast.fix_missing_locations(ast.Module([*future, own], [])), "rl_trainer.py", "exec"), space)
    return space["Beginning"]()


def _role(config: Any, section: Any, role: str) -> dict[str, Any]:
    from areal.api.alloc_mode import FSDPParallelStrategy, ModelAllocation

    allocated = ModelAllocation.from_str(section.backend, name=role)
    parallel, tokens = allocated.parallel, section.mb_spec.max_tokens_per_mb
    said: dict[str, Any] = {
        "gpus": parallel.world_size,
        **{f"layout.{name}": getattr(parallel, f"{name}_size") for name in DEGREES},
        "score_pack_tokens": tokens // parallel.cp_size if tokens else None,
    }
    if role != "reference":
        kind = section.megatron.recompute_granularity if allocated.backend == "megatron" else "full"
        said["layout.recompute"] = kind if section.gradient_checkpointing else "none"
        said |= {"train_pack_tokens": said["score_pack_tokens"], **_updates(config, section, parallel)}
        if tokens is None:
            said["train_micro_batch"] = said["rank_samples"] // section.mb_spec.n_mbs
    if allocated.backend == "megatron":
        stages = section.megatron.virtual_pipeline_parallel_size
        return said | {"layout.vp": stages}
    FSDPParallelStrategy(**dataclasses.asdict(parallel))
    return said


def _updates(config: Any, section: Any, parallel: Any) -> dict[str, Any]:
    import torch
    from areal.api.cli_args import MicroBatchSpec
    from areal.utils.data import split_padded_tensor_dict_into_mb_list

    rows = config.train_dataset.batch_size * config.gconfig.n_samples // parallel.dp_size
    spec = MicroBatchSpec(n_mbs=section.ppo_n_minibatches)
    parts = split_padded_tensor_dict_into_mb_list({"attention_mask": torch.ones(rows, 1)}, spec).mbs
    return {"updates": len(parts), "rank_samples": len(parts[0]["attention_mask"])}
