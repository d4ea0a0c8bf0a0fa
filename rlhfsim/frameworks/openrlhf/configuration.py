"""OpenRLHF: the arguments of train_ppo_ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import (
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.engines import dynamic_sampling
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.frameworks.openrlhf.findings import findings
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: dict[str, Algorithm] = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr-grpo",
}
"""--algo.advantage.estimator -> algorithm here."""
SEQUENCES = 256
"""Sequences at a time of its vLLM engines."""
OLD = ("actor_num_nodes", "actor_num_gpus_per_node", "vllm_num_engines", "pretrain", "zero_stage")
"""Names until 0.9: dots came with 0.10."""


# Arguments and defaults: openrlhf/cli/train_ppo_ray.py (same commit); second names are those of 0.9 and
# before, with the defaults that they had (0.8.11, 0.9.10).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the arguments describe."""
    per_node = s.whole("actor.num_gpus_per_node", "actor_num_gpus_per_node", default=8)
    gpus = per_node * s.whole("actor.num_nodes", "actor_num_nodes", default=1)
    stale = s.flag("train.async_enable", "async_train")
    engines = s.whole("vllm.num_engines", "vllm_num_engines", default=0)
    tp = s.whole("vllm.tensor_parallel_size", "vllm_tensor_parallel_size", default=1)
    shared = _whole(s) and not stale
    if not engines and not shared:
        raise RlhfsimError(
            "no-rollout-engine",
            "the arguments give no vLLM engines, and generation without them is not priced",
            help="add --set vllm.num_engines=N",
        )
    prompts = s.whole("rollout.batch_size", "rollout_batch_size", default=1024)
    samples = s.whole("rollout.n_samples_per_prompt", "n_samples_per_prompt", default=1)
    batch = s.whole("train.batch_size", "train_batch_size", default=128, least=1)
    longest_prompt, longest_response = _longest(s)
    asleep = s.flag("ds.enable_sleep", "deepspeed_enable_sleep")
    return RunDescription(
        algorithm=algorithm(s),
        model=s.model("actor.model_name_or_path", "pretrain"),
        critic=_critic(s),
        reward_model=_reward(s),
        prompts=prompts,
        samples=samples,
        epochs=s.whole("train.max_epochs", "max_epochs", default=1),
        mini_batches=max(1, round(prompts * samples / batch)),
        packing=s.flag("ds.packing_samples", "packing_samples") or _by_tokens(s) or _cp(s) > 1,
        kl=s.share("algo.kl.init_coef", "init_kl_coef", default=0.01) != 0,
        lora_rank=s.whole("ds.lora.rank", "lora_rank", default=0),
        lora_base="nf4" if s.flag("ds.load_in_4bit", "load_in_4bit") else "bf16",
        gradients="fp32" if s.find("ds.grad_accum_dtype", "grad_accum_dtype") == "fp32" else "backend",
        dynamic_sampling=_dynamic_sampling(s, prompts),
        max_prompt=longest_prompt,
        max_response=longest_response,
        backend="deepspeed",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=None if shared else engines * tp,
        layout=_layout(s, gpus, **_micro_batch(s)),
        roles=_roles(s, gpus, asleep),
        optimizer_leaves=asleep,
        rollout=rollout_layout(
            gpus if shared else engines * tp,
            tp=tp,
            replicas=engines or None,
            max_num_seqs=SEQUENCES,
            memory_utilization=s.share(
                "vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization", default=0.95
            ),
            cuda_graphs=not s.flag("vllm.enforce_eager", "enforce_eager"),
        ),
        sleep=1 if s.flag("vllm.enable_sleep", "vllm_enable_sleep") else 0,
        weight_path="ipc" if shared else "broadcast",
        staleness=float(s.whole("train.async_queue_size", "async_queue_size", default=1)) if stale else 0.0,
        partial_rollout=stale and s.flag("train.partial_rollout_enable", "partial_rollout"),
    )


def _whole(s: FrameworkSettings) -> bool:
    """Whether all models that train or score share GPUs."""
    return s.flag("train.colocate_all", "colocate_all_models")


def _old(s: FrameworkSettings) -> bool:
    """Whether the names are those of 0.9 and before."""
    return any(s.find(key) is not None for key in OLD)


def _roles(s: FrameworkSettings, gpus: int, asleep: bool) -> dict[str, RoleDescription]:
    """Critic, reference and reward model: on the actor's GPUs, on others that they share, or on their own."""
    pools = {
        "reference": None if _whole(s) or s.flag("train.colocate_actor_ref", "colocate_actor_ref") else "ref",
        "critic": None if _whole(s) else "critic",
        "reward": None if _whole(s) else "reward",
    }
    pair = s.flag("train.colocate_critic_reward", "colocate_critic_reward")
    if pair and algorithm(s) == "ppo" and not _whole(s):
        pools["reward"] = "critic"
    present = {"reference": True, "critic": algorithm(s) == "ppo", "reward": _reward(s) is not None}
    offloaded = {
        "reference": s.flag("ref.offload", "ref_reward_offload"),
        "reward": s.flag("reward.offload", "ref_reward_offload"),
    }
    roles = {}
    for name, pool in pools.items():
        own = _gpus(s, pool) if pool else gpus
        short = {"reference": "ref"}.get(name, name)
        s.overruled(*(f"{short}{mark}num_{unit}" for mark in "._" for unit in ("nodes", "gpus_per_node")))
        if not present[name]:
            continue
        trained = name == "critic"
        sizes = _micro_batch(s) if trained or _by_tokens(s) else {"micro_batch": _scored(s)}
        roles[name] = RoleDescription(
            layout=_layout(s, own, **sizes),
            residency="offloaded" if offloaded.get(name) else "resident",
            optimizer_leaves=trained and asleep,
            pool=pool,
            gpus=own if pool else 0,
        )
    return roles


def _gpus(s: FrameworkSettings, role: str) -> int:
    nodes = s.whole(f"{role}.num_nodes", f"{role}_num_nodes", default=1)
    return nodes * s.whole(f"{role}.num_gpus_per_node", f"{role}_num_gpus_per_node", default=8)


def _layout(s: FrameworkSettings, gpus: int, **sizes: int) -> Layout:
    tp = s.whole("ds.tensor_parallel_size", "ds_tensor_parallel_size", default=1)
    return training_layout(
        gpus,
        tp=tp,
        sequence_parallel=tp == 1,  # DeepSpeed's AutoTP cuts no activations
        cp=_cp(s),
        zero=s.whole("ds.zero_stage", "zero_stage", default=2),
        **sizes,
        recompute="full"
        if s.flag("actor.gradient_checkpointing_enable", "gradient_checkpointing")
        else "none",
        offload_optimizer="cpu" if s.flag("ds.adam_offload", "adam_offload") else "none",
    )


def _cp(s: FrameworkSettings) -> int:
    return s.whole("ds.ring_attn_size", "ring_attn_size", default=1)


def _by_tokens(s: FrameworkSettings) -> bool:
    return s.flag("train.dynamic_batch_enable", "use_dynamic_batch")


def _micro_batch(s: FrameworkSettings) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU."""
    if not _by_tokens(s):
        usual = 4 if _old(s) else 1
        size = s.whole("train.micro_batch_size", "micro_train_batch_size", default=usual)
        return {"micro_batch": max(1, size)}
    limit = max(1, s.whole("train.max_tokens_per_gpu", "train_max_tokens_per_gpu", default=16192))
    scoring = s.whole("rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu", default=limit)
    return {"pack_tokens": limit, "score_pack_tokens": max(1, scoring)}


def _scored(s: FrameworkSettings) -> int:
    """Sequences of a micro-batch that is scored."""
    usual = 8 if _old(s) else 1
    return max(1, s.whole("rollout.micro_batch_size", "micro_rollout_batch_size", default=usual))


def _longest(s: FrameworkSettings) -> tuple[int | None, int | None]:
    """(prompt, response): limits of their own to 0.8, then one of both together and one of the response."""
    if s.find("prompt_max_len", "generate_max_len") is not None:
        return s.whole("prompt_max_len", default=1024), s.whole("generate_max_len", default=1024)
    both = s.whole("data.max_len", "max_len", default=2048)
    response = s.count("rollout.max_new_tokens", "max_new_tokens")
    return (max(1, both - response), response) if response else (None, both)


def _dynamic_sampling(s: FrameworkSettings, prompts: int) -> DynamicSampling | None:
    if not s.flag("algo.dynamic_filtering_enable", "dynamic_filtering"):
        return None
    names = ("rollout.vllm_generate_batch_size", "vllm_generate_batch_size")
    return dynamic_sampling(s, prompts, s.whole(*names, default=prompts), None)


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator."""
    name = s.text("algo.advantage.estimator", "advantage_estimator", default="gae")
    if name not in ESTIMATORS:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"advantage estimator {name!r} has no counterpart here",
            help=f"priced: {', '.join(ESTIMATORS)}",
        )
    return ESTIMATORS[name]


def _reward(s: FrameworkSettings) -> str | None:
    """The reward model, without a name as the policy; None: a service or a function gives rewards."""
    if s.says("reward.remote_url", "remote_rm_url", "train.agent_func_path", "agent_func_path"):
        return None
    return str(s.find("reward.model_name_or_path", "reward_pretrain") or "same").split(",")[0]


def _critic(s: FrameworkSettings) -> str | None:
    """The critic; without a name it starts from the reward model, or from the policy."""
    if algorithm(s) != "ppo":
        return None
    keys = ("critic.model_name_or_path", "critic_pretrain")
    named, policy = s.find(*keys), s.find("actor.model_name_or_path", "pretrain")
    if s.says(*keys) and named == policy:
        return None
    return str(named) if named else _reward(s)


def _version(values: Mapping[str, Any]) -> str | None:
    """The last version with the names that are used: dots came with 0.10, `max_len` with 0.9."""
    if not any(key in values for key in OLD):
        return None
    return "0.8.11" if {"prompt_max_len", "generate_max_len"} & values.keys() else "0.9.10"


CONFIGURATION = Configuration(
    name="openrlhf",
    title="OpenRLHF",
    describe=describe,
    findings=findings,
    entries=(r"\bopenrlhf\.cli\.\w+",),
    shown=("openrlhf.cli.train_ppo_ray",),
    keys=(
        "actor.num_nodes",
        "actor_num_nodes",
        "actor.num_gpus_per_node",
        "actor_num_gpus_per_node",
        "vllm.",
        "vllm_num_engines",
        "ds.",
        "train.colocate_",
        "colocate_all_models",
        "micro_train_batch_size",
    ),
    version_of=_version,
)
