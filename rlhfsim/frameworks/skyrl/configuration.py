"""SkyRL: its configuration classes, as overrides of a launch or as a dumped YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import ENTRY_POINT, Configuration
from rlhfsim.frameworks.configuration.described import (
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, megatron_degrees
from rlhfsim.frameworks.skyrl.findings import findings
from rlhfsim.specs.placement.layout import Layout, Recompute, RolloutLayout
from rlhfsim.specs.placement.placement import Residency
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: Mapping[str, Algorithm] = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce++",
}
"""trainer.algorithm.advantage_estimator -> algorithm here."""
PLACE, ALGORITHM = "trainer.placement", "trainer.algorithm"
ENGINE, POLICY = "generator.inference_engine", "trainer.policy"
ROLLOUT_LOSSES = ("rollout_is", "dppo")
"""Losses that need no forward pass for old log-probs (backends/skyrl_train/utils/ppo_utils.py)."""


# Keys and defaults: skyrl/train/config/config.py of 0.4.0.
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that SkyRL's configuration describes."""
    megatron = s.text("trainer.strategy", default="fsdp") == "megatron"
    per_node = s.whole(f"{PLACE}.policy_num_gpus_per_node", default=1)
    gpus = per_node * s.whole(f"{PLACE}.policy_num_nodes", default=1)
    apart = not s.flag(f"{PLACE}.colocate_all", default=True)
    rollout = _rollout(s)
    continuous = s.flag("trainer.fully_async.enabled")
    prompts = s.whole("trainer.train_batch_size", default=1024)
    rank = s.whole(f"{POLICY}.model.lora.rank", default=0)
    kl = _kl(s)
    swapped = not apart or (kl and s.flag(f"{PLACE}.colocate_policy_ref", default=True))
    beside = rank > 0 and not (megatron and s.flag(f"{_MEGATRON}.lora_config.merge_lora", default=True))
    loss = s.text(f"{ALGORITHM}.policy_loss_type", default="regular")
    return RunDescription(
        algorithm=algorithm(s),
        model=s.model(f"{POLICY}.model.path", default="Qwen/Qwen2.5-1.5B-Instruct"),
        critic=_critic(s) if algorithm(s) == "ppo" else None,
        prompts=prompts,
        samples=s.whole("generator.n_samples_per_prompt", default=5),
        epochs=s.whole("trainer.update_epochs_per_batch", default=1),
        mini_batches=max(1, prompts // max(1, s.whole("trainer.policy_mini_batch_size", default=256))),
        packing=s.flag("trainer.remove_microbatch_padding", default=True),
        kl=kl,
        old_logprobs="rollout" if loss in ROLLOUT_LOSSES else "recompute",
        lora_rank=rank,
        max_prompt=s.whole("trainer.max_prompt_length", default=512),
        max_response=s.whole("generator.sampling_params.max_generate_length", default=1024),
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=rollout.gpus if apart else None,
        layout=_layout(s, POLICY, gpus, megatron=megatron),
        roles=_roles(s, gpus, apart=apart, megatron=megatron),
        actor_residency=_residency(s, POLICY, shared=swapped),
        optimizer_leaves=_residency(s, POLICY, shared=swapped) == "offloaded",
        train_precision="fp8" if megatron and s.find(f"{_MEGATRON}.fp8") else "bf16",
        rollout=rollout,
        sleep=0 if apart else 1 if beside else 2,
        weight_path=_weight_path(s, apart=apart, beside=beside),
        staleness=_staleness(s, continuous=continuous),
        partial_rollout=continuous,
    )


_MEGATRON = f"{POLICY}.megatron_config"


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator and the norm of its loss."""
    name = s.text(f"{ALGORITHM}.advantage_estimator", default="grpo")
    if name not in ESTIMATORS:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"{ALGORITHM}.advantage_estimator {name!r} has no counterpart here",
            help=f"priced: {', '.join(ESTIMATORS)}; the nearest: --set {ALGORITHM}.advantage_estimator=grpo",
        )
    if name == "grpo" and not s.flag(f"{ALGORITHM}.grpo_norm_by_std", default=True):
        return "dr-grpo"
    return ESTIMATORS[name]


def _kl(s: FrameworkSettings) -> bool:
    return s.flag(f"{ALGORITHM}.use_kl_loss", default=True) or s.flag(f"{ALGORITHM}.use_kl_in_reward")


def _critic(s: FrameworkSettings) -> str | None:
    named = s.find("trainer.critic.model.path")
    return None if named == s.find(f"{POLICY}.model.path") else named


def _residency(s: FrameworkSettings, role: str, *, shared: bool) -> Residency:
    """What shares GPUs leaves them between its calls, unless FSDP keeps it on the host anyway."""
    hosted = s.flag(f"{role}.fsdp_config.cpu_offload")
    return "offloaded" if shared and not hosted else "resident"


def _roles(s: FrameworkSettings, gpus: int, *, apart: bool, megatron: bool) -> dict[str, RoleDescription]:
    """Reference and critic: on the actor's GPUs, or on their own."""
    beside = s.flag(f"{PLACE}.colocate_policy_ref", default=True)
    with_actor = {"critic": not apart, "ref": not apart or beside}
    roles = {}
    for role, name in (("critic", "critic"), ("reference", "ref")):
        nodes = s.whole(f"{PLACE}.{name}_num_nodes", default=1)
        own = gpus if with_actor[name] else nodes * s.whole(f"{PLACE}.{name}_num_gpus_per_node", default=1)
        trained, shared = role == "critic", with_actor[name]
        roles[role] = RoleDescription(
            layout=_layout(s, f"trainer.{name}", own, megatron=megatron, scores=not trained),
            residency=_residency(s, f"trainer.{name}", shared=shared),
            optimizer_leaves=trained and _residency(s, f"trainer.{name}", shared=shared) == "offloaded",
            pool=None if shared else role,
            gpus=0 if shared else own,
        )
        if shared:
            s.overruled(f"{PLACE}.{name}_num_nodes", f"{PLACE}.{name}_num_gpus_per_node")
    present = {"critic": algorithm(s) == "ppo", "reference": _kl(s)}
    return {role: found for role, found in roles.items() if present[role]}


def _layout(s: FrameworkSettings, role: str, gpus: int, *, megatron: bool, scores: bool = False) -> Layout:
    """Of a role whose keys begin with `role`."""
    micro = _micro_batch(s, scores=scores)
    if megatron:
        degrees = megatron_degrees(s, f"{role}.megatron_config", etp=1)
        kwargs = f"{role}.megatron_config.optimizer_config_kwargs"
        offloads = s.flag(f"{kwargs}.optimizer_cpu_offload")
        share = s.share(f"{kwargs}.optimizer_offload_fraction", default=0.0) if offloads else 0.0
        return training_layout(
            gpus,
            **degrees,
            zero=1,
            recompute=_recompute(s),
            offload_optimizer="cpu" if share > 0 else "none",
            offload_fraction=share if share > 0 else 1.0,
            **_tokens(micro, degrees["cp"]),
        )
    cp = s.whole(f"{role}.sequence_parallel_size", default=1, least=1)
    shards = int(s.share(f"{role}.fsdp_config.fsdp_size", default=-1))
    host = "cpu" if s.flag(f"{role}.fsdp_config.cpu_offload") else "none"
    return training_layout(
        gpus,
        cp=cp,
        zero=3 if s.flag(f"{role}.fsdp_config.reshard_after_forward", default=True) else 2,
        shards=shards if 1 < shards < gpus else None,
        recompute="full" if s.flag("trainer.gradient_checkpointing", default=True) else "none",
        offload_optimizer=host,
        offload_params=host,
        **_tokens(micro, cp),
    )


def _micro_batch(s: FrameworkSettings, *, scores: bool) -> tuple[int, int]:
    """(sequences of a micro-batch, tokens of one where that is what counts, else 0)."""
    tokens = int(s.share("trainer.max_tokens_per_microbatch", default=-1))
    kind = "forward" if scores else "train"
    return s.whole(f"trainer.micro_{kind}_batch_size_per_gpu", default=1), max(0, tokens)


def _tokens(micro: tuple[int, int], cp: int) -> dict[str, int]:
    sequences, tokens = micro
    return {"pack_tokens": max(1, tokens // cp)} if tokens else {"micro_batch": max(1, sequences)}


def _recompute(s: FrameworkSettings) -> Recompute:
    if not s.flag("trainer.gradient_checkpointing", default=True):
        return "none"
    kind = s.text(f"{_MEGATRON}.transformer_config_kwargs.recompute_granularity", default="full")
    return cast(Recompute, kind) if kind in ("full", "selective") else "none"


def _rollout(s: FrameworkSettings) -> RolloutLayout:
    degrees = {
        "tp": s.whole(f"{ENGINE}.tensor_parallel_size", default=1),
        "pp": s.whole(f"{ENGINE}.pipeline_parallel_size", default=1),
    }
    wide = s.whole(f"{ENGINE}.data_parallel_size", default=1)
    engines = s.whole(f"{ENGINE}.num_engines", default=1)
    eight = s.find(f"{ENGINE}.fp8_weight_sync_mode") is not None
    cache = str(s.find(f"{ENGINE}.engine_init_kwargs.kv_cache_dtype") or "")
    return rollout_layout(
        degrees["tp"] * degrees["pp"] * engines,
        **degrees,
        replicas=engines,
        attention_dp=wide,
        ep=s.whole(f"{ENGINE}.expert_parallel_size", default=1),
        max_num_seqs=s.whole(f"{ENGINE}.max_num_seqs", default=1024),
        max_batched_tokens=s.whole(f"{ENGINE}.max_num_batched_tokens", default=8192),
        memory_utilization=s.share(f"{ENGINE}.gpu_memory_utilization", default=0.8),
        cuda_graphs=not s.flag(f"{ENGINE}.enforce_eager"),
        precision="fp8" if eight else "bf16",
        kv_precision="fp8" if cache.startswith("fp8") else "bf16",
    )


def _staleness(s: FrameworkSettings, *, continuous: bool) -> float:
    """Steps of lag; the trainer that is one step off is an entry point of its own."""
    if continuous:
        return float(s.whole("trainer.fully_async.max_staleness_steps", default=4))
    return float(".async." in str(s.find(ENTRY_POINT) or ""))


def _weight_path(s: FrameworkSettings, *, apart: bool, beside: bool) -> WeightPath:
    if beside:
        return "lora"
    if s.text(f"{ENGINE}.weight_sync_backend", default="nccl") in ("sharded_rdt", "rdt"):
        return "p2p"
    return "broadcast" if apart else "ipc"


CONFIGURATION = Configuration(
    name="skyrl",
    title="SkyRL",
    describe=describe,
    findings=findings,
    entries=(r"\bskyrl\.train\.entrypoints\.[\w.]+", r"\bexamples\.train\.[\w.]*main\w*"),
    shown=("skyrl.train.entrypoints.main_base",),
    keys=("trainer.placement.", "trainer.policy.", "generator.inference_engine.", "environment.env_class"),
)
