"""verl: its Hydra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, megatron_degrees
from rlhfsim.frameworks.verl.findings import findings
from rlhfsim.frameworks.verl.versions import (
    EAGER,
    KL_IN_REWARD,
    SEQUENCES,
    UNPADDED,
    VERSION,
    default,
    of_each_gpu,
    spelled,
)
from rlhfsim.specs.placement.layout import Recompute, RolloutLayout
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: dict[str, Algorithm] = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++",
    "grpo_passk": "grpo",
}
"""algorithm.adv_estimator (verl/trainer/ppo/core_algos.py, AdvantageEstimator) -> algorithm here."""
ACTOR, ROLL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


# Keys and defaults: verl/trainer/config/_generated_ppo_trainer.yaml and ..._megatron_trainer.yaml, and
# verl/experimental/{one_step_off_policy,fully_async_policy}/config (same commit).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that a Hydra configuration describes."""
    megatron = s.text(f"{ACTOR}.strategy", default="fsdp") == "megatron"
    per_node = s.whole("trainer.n_gpus_per_node", default=8)
    gpus = per_node * s.whole("trainer.nnodes", default=1)
    apart = s.find("rollout.nnodes") is not None
    rollout_gpus = (
        s.whole("rollout.nnodes", default=1) * s.whole("rollout.n_gpus_per_node", default=8)
        if apart
        else None
    )
    prompts = s.whole("data.train_batch_size", default=1024) or s.whole(
        f"{ACTOR}.ppo_mini_batch_size", default=256
    )
    trained = "actor_rollout_ref.actor.megatron" if megatron else f"{ACTOR}.fsdp_config"
    scored = f"{REF}.megatron.param_offload" if megatron else f"{REF}.fsdp_config.param_offload"
    lora = s.whole("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank", default=0)
    beside = lora > 0 and not s.flag("actor_rollout_ref.model.lora.merge")
    return RunDescription(
        algorithm=algorithm(s),
        model=s.text("actor_rollout_ref.model.path"),
        critic=_critic(s),
        reward_model=_reward(s),
        prompts=prompts,
        samples=s.whole(f"{ROLL}.n", default=1),
        epochs=s.whole(f"{ACTOR}.ppo_epochs", default=1),
        mini_batches=max(1, round(prompts / max(1, s.whole(f"{ACTOR}.ppo_mini_batch_size", default=256)))),
        packing=s.flag(UNPADDED, default=bool(default(UNPADDED, s.find(VERSION)))),
        kl=_kl(s),
        recomputes_logprobs=not s.flag("algorithm.rollout_correction.bypass_mode", default=False),
        lora_rank=lora,
        max_response=s.whole("data.max_response_length", default=512),
        max_prompt=s.whole("data.max_prompt_length", default=512),
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=rollout_gpus,
        layout=training_layout(
            gpus,
            **_degrees(s, megatron),
            zero=1 if megatron else 3,
            **_micro_batch(s),
            recompute=_recompute(s, megatron),
        ),
        actor_residency="offloaded" if s.flag(f"{trained}.param_offload") else "resident",
        optimizer_leaves=s.flag(f"{trained}.optimizer_offload"),
        scoring_residency="offloaded" if s.flag(scored) else "resident",
        rollout=_rollout(s, rollout_gpus or gpus),
        sleep=(1 if beside else 2) if s.flag(f"{ROLL}.free_cache_engine", default=True) else 0,
        weight_path="lora" if beside else "broadcast" if apart else "ipc",
        staleness=_staleness(s, apart),
        partial_rollout=apart
        and s.has("async_training")
        and s.flag("async_training.partial_rollout", default=True),
    )


def _rollout(s: FrameworkSettings, gpus: int) -> RolloutLayout:
    return rollout_layout(
        gpus,
        tp=s.whole(f"{ROLL}.tensor_model_parallel_size", default=2),
        pp=s.whole(f"{ROLL}.pipeline_model_parallel_size", default=1),
        max_num_seqs=s.whole(SEQUENCES, default=default(SEQUENCES, s.find(VERSION))),
        memory_utilization=s.share(f"{ROLL}.gpu_memory_utilization", default=0.5),
        max_batched_tokens=s.whole(f"{ROLL}.max_num_batched_tokens", default=8192),
        cuda_graphs=not s.flag(EAGER, default=bool(default(EAGER, s.find(VERSION)))),
        precision="fp8" if "fp8" in str(s.find(f"{ROLL}.quantization") or "") else "bf16",
    )


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator."""
    name = s.text("algorithm.adv_estimator", default="gae").rpartition(".")[2].lower()
    if name not in ESTIMATORS:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"algorithm.adv_estimator {name!r} has no counterpart here",
            help=f"priced: {', '.join(ESTIMATORS)}; the nearest one: --set algorithm.adv_estimator=grpo",
        )
    return ESTIMATORS[name]


def _kl(s: FrameworkSettings) -> bool:
    in_reward = bool(default(KL_IN_REWARD, s.find(VERSION)))
    return s.flag(f"{ACTOR}.use_kl_loss") or s.flag(KL_IN_REWARD, default=in_reward)


def _critic(s: FrameworkSettings) -> str | None:
    return s.text("critic.model.path", default="same") if algorithm(s) == "ppo" else None


def _reward(s: FrameworkSettings) -> str | None:
    if not (s.flag("reward_model.enable") or s.flag("reward.reward_model.enable")):
        return None
    return s.text("reward.reward_model.model_path", "reward_model.model.path", default="same")


def _degrees(s: FrameworkSettings, megatron: bool) -> dict[str, int]:
    if not megatron:
        ulysses = "ulysses_sequence_parallel_size"
        return {"cp": s.whole(f"{ACTOR}.{ulysses}", f"{ACTOR}.fsdp_config.{ulysses}", default=1)}
    return megatron_degrees(s, f"{ACTOR}.megatron")


def _micro_batch(s: FrameworkSettings) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU; what scores has a limit of its own."""
    if not s.flag(f"{ACTOR}.use_dynamic_bsz"):
        return {"micro_batch": max(1, s.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu", default=_of_all(s)))}
    limit = max(1, s.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384))
    scoring = s.whole(f"{ROLL}.log_prob_max_token_len_per_gpu", default=limit)
    return {"pack_tokens": limit, "score_pack_tokens": max(1, scoring)}


def _of_all(s: FrameworkSettings) -> int:
    """Sequences of a micro-batch by the deprecated key, which counts those of all ranks (fsdp_workers.py)."""
    ulysses = _degrees(s, megatron=False)["cp"]
    per_node, nodes = s.find("trainer.n_gpus_per_node"), s.find("trainer.nnodes")
    ranks = int(per_node or 8) * int(nodes or 1) // ulysses
    return int(s.find(f"{ACTOR}.ppo_micro_batch_size") or 1) // max(1, ranks) or 1


def _recompute(s: FrameworkSettings, megatron: bool) -> Recompute:
    if not megatron:
        return (
            "full"
            if s.flag("actor_rollout_ref.model.enable_gradient_checkpointing", default=True)
            else "none"
        )
    granularity = s.find(f"{ACTOR}.megatron.override_transformer_config.recompute_granularity")
    return cast(Recompute, granularity) if granularity in ("full", "selective") else "none"


def _staleness(s: FrameworkSettings, apart: bool) -> float:
    """One version in one-step-off; the threshold, at least one, in the fully asynchronous trainer."""
    if not apart:
        return 0.0
    return (
        max(1.0, s.share("async_training.staleness_threshold", default=0.1))
        if s.has("async_training")
        else 1.0
    )


CONFIGURATION = Configuration(
    name="verl",
    title="verl",
    describe=lambda s, means: describe(of_each_gpu(s), means),
    spelled=spelled,
    findings=findings,
    entries=(r"\bverl\.(trainer|experimental|recipe)\.[\w.]*main", r"\brecipe\.\w+\.main\w*"),
    shown=("verl.trainer.main_ppo",),
    keys=("actor_rollout_ref.", "critic.ppo_", "algorithm.adv_estimator", "data.max_response_length"),
)
