"""OpenRLHF: the arguments of train_ppo_ray."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.specs.placement.layout import Layout
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


# Arguments and defaults: openrlhf/cli/train_ppo_ray.py (same commit); second names are those of v0.8 and
# before.
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the arguments describe."""
    per_node = s.whole("actor.num_gpus_per_node", "actor_num_gpus_per_node", default=8)
    gpus = per_node * s.whole("actor.num_nodes", "actor_num_nodes", default=1)
    whole = s.flag("train.colocate_all", "colocate_all_models")
    stale = s.flag("train.async_enable", "async_train")
    engines = s.whole("vllm.num_engines", "vllm_num_engines", default=0)
    tp = s.whole("vllm.tensor_parallel_size", "vllm_tensor_parallel_size", default=1)
    shared = whole and not stale
    if not engines and not shared:
        raise RlhfsimError(
            "no-rollout-engine",
            "the arguments give no vLLM engines, and generation without them is not priced",
            help="add --set vllm.num_engines=N",
        )
    prompts = s.whole("rollout.batch_size", "rollout_batch_size", default=1024)
    samples = s.whole("rollout.n_samples_per_prompt", "n_samples_per_prompt", default=1)
    batch = s.whole("train.batch_size", "train_batch_size", default=128)
    kind = algorithm(s)
    return RunDescription(
        algorithm=kind,
        model=s.text("actor.model_name_or_path", "pretrain"),
        critic=_named(s, "critic.model_name_or_path", "critic_pretrain") if kind == "ppo" else None,
        reward_model=None
        if s.find("reward.remote_url", "remote_rm_url", "train.agent_func_path")
        else _named(s, "reward.model_name_or_path", "reward_pretrain"),
        prompts=prompts,
        samples=samples,
        epochs=s.whole("train.max_epochs", "max_epochs", default=1),
        mini_batches=max(1, round(prompts * samples / batch)),
        packing=s.flag("ds.packing_samples", "packing_samples"),
        kl=s.share("algo.kl.init_coef", "init_kl_coef", default=0.01) != 0,
        lora_rank=s.whole("ds.lora.rank", "lora_rank", default=0),
        max_response=s.whole("rollout.max_new_tokens", "generate_max_len", default=0) or None,
        max_prompt=_longest_prompt(s),
        backend="deepspeed",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=None if shared else engines * tp,
        layout=_layout(s, gpus),
        optimizer_leaves=s.flag("ds.enable_sleep", "deepspeed_enable_sleep"),
        scoring_residency="offloaded" if s.flag("ref.offload", "ref_reward_offload") else "resident",
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


def _longest_prompt(s: FrameworkSettings) -> int | None:
    """Its own limit until v0.9, then what the limit of both leaves; None: not said."""
    whole, new = s.find("data.max_len"), s.find("rollout.max_new_tokens", "generate_max_len")
    if isinstance(whole, int) and isinstance(new, int):
        return max(1, whole - new)
    return s.whole("prompt_max_len") if s.find("prompt_max_len") else None


def _layout(s: FrameworkSettings, gpus: int) -> Layout:
    return training_layout(
        gpus,
        tp=s.whole("ds.tensor_parallel_size", "ds_tensor_parallel_size", default=1),
        cp=s.whole("ds.ring_attn_size", "ring_attn_size", default=1),
        zero=s.whole("ds.zero_stage", "zero_stage", default=2),
        **_micro_batch(s),
        recompute="full"
        if s.flag("actor.gradient_checkpointing_enable", "gradient_checkpointing")
        else "none",
        offload_optimizer="cpu" if s.flag("ds.adam_offload", "adam_offload") else "none",
    )


def _micro_batch(s: FrameworkSettings) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU."""
    if not s.flag("train.dynamic_batch_enable", "use_dynamic_batch"):
        return {"micro_batch": max(1, s.whole("train.micro_batch_size", "micro_train_batch_size", default=1))}
    limit = max(1, s.whole("train.max_tokens_per_gpu", "train_max_tokens_per_gpu", default=16384))
    scoring = s.whole("rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu", default=limit)
    return {"pack_tokens": limit, "score_pack_tokens": max(1, scoring)}


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


def _named(s: FrameworkSettings, *keys: str) -> str:
    """A model name; without one the policy's shape."""
    return str(s.find(*keys) or "same").split(",")[0]


CONFIGURATION = Configuration(
    name="openrlhf",
    title="OpenRLHF",
    describe=describe,
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
)
