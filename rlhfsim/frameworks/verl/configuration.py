"""verl: its Hydra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import (
    ON_HOST,
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.engines import dynamic_sampling, speculation
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, megatron_degrees
from rlhfsim.frameworks.verl.findings import findings
from rlhfsim.frameworks.verl.heads import software
from rlhfsim.frameworks.verl.reward_model import reward_role
from rlhfsim.frameworks.verl.versions import (
    EAGER,
    KL_IN_REWARD,
    REFERENCE_FOLLOWS,
    ROLLOUT_TP,
    SEQUENCES,
    TRAIN_TP,
    UNPADDED,
    VERSION,
    default,
    of_each_gpu,
    spelled,
)
from rlhfsim.specs.placement.layout import Layout, Recompute, RolloutLayout
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm, GradientSums

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
# verl/experimental/{one_step_off_policy,fully_async_policy}/config (same commit); what changed: `versions`.
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that a Hydra configuration describes."""
    megatron = _megatron(s)
    per_node = s.whole("trainer.n_gpus_per_node", default=8)
    gpus, rollout_gpus = per_node * s.whole("trainer.nnodes", default=1), _own_gpus(s, per_node)
    apart = rollout_gpus is not None
    prompts = s.whole("data.train_batch_size", default=1024) or s.whole(
        f"{ACTOR}.ppo_mini_batch_size", default=256
    )
    lora = s.whole("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank", default=0)
    beside = lora > 0 and not s.flag("actor_rollout_ref.model.lora.merge")
    actor = _trained(s, ACTOR, gpus, megatron)
    packing = s.flag(UNPADDED, default=bool(default(UNPADDED, s.find(VERSION), megatron=megatron)))
    return RunDescription(
        algorithm=algorithm(s),
        model=s.model("actor_rollout_ref.model.path"),
        critic=_critic(s),
        reward_model=_reward(s),
        prompts=prompts,
        samples=s.whole(f"{ROLL}.n", default=1),
        epochs=s.whole(f"{ACTOR}.ppo_epochs", default=1),
        mini_batches=max(1, round(prompts / max(1, s.whole(f"{ACTOR}.ppo_mini_batch_size", default=256)))),
        packing=packing,
        kl=_kl(s),
        old_logprobs="rollout" if s.flag("algorithm.rollout_correction.bypass_mode") else "recompute",
        lora_rank=lora,
        gradients=_gradients(s, megatron),
        dynamic_sampling=_dynamic_sampling(s, prompts),
        max_response=s.whole("data.max_response_length", default=512),
        max_prompt=s.whole("data.max_prompt_length", default=512),
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=rollout_gpus,
        layout=actor.layout,
        roles=_roles(s, gpus, actor, megatron),
        actor_residency=actor.residency,
        optimizer_leaves=actor.optimizer_leaves,
        rollout=_rollout(s, rollout_gpus or gpus, megatron),
        sleep=(1 if beside else 2) if s.flag(f"{ROLL}.free_cache_engine", default=True) else 0,
        weight_path="lora" if beside else _path(s, apart),
        staleness=_staleness(s, apart),
        partial_rollout=apart and _interrupts(s),
        software=None if megatron else software(s, packing=packing),
    )


def _megatron(s: FrameworkSettings) -> bool:
    """Whether Megatron-Core trains: its group of the configuration, or its trainer by name."""
    named = str(s.find("config_name") or "")
    chosen = s.find("model_engine", f"{ACTOR}.strategy") or named
    return "megatron" in str(chosen)


def _own_gpus(s: FrameworkSettings, per_node: int) -> int | None:
    """GPUs of the rollout alone; None: it shares those that train."""
    if s.find("rollout.nnodes") is not None:  # one_step_off_policy, fully_async_policy
        return s.whole("rollout.nnodes") * s.whole("rollout.n_gpus_per_node", default=8)
    nodes = s.whole(f"{ROLL}.nnodes", default=0)
    return nodes * s.whole(f"{ROLL}.n_gpus_per_node", default=per_node) if nodes else None


def _trained(
    s: FrameworkSettings, role: str, gpus: int, megatron: bool, like: Layout | None = None
) -> RoleDescription:
    """The policy or the critic, whose keys begin with `role`."""
    engine = f"{role}.megatron" if megatron else _fsdp(s, role)
    return RoleDescription(
        layout=training_layout(
            gpus,
            **_degrees(s, role, megatron, like),
            **_sharding(s, role, megatron),
            **_micro_batch(s, role),
            recompute=_recompute(s, role, megatron),
        ),
        residency="offloaded" if s.flag(f"{engine}.param_offload") else "resident",
        optimizer_leaves=s.flag(f"{engine}.optimizer_offload"),
    )


def _roles(
    s: FrameworkSettings, gpus: int, actor: RoleDescription, megatron: bool
) -> dict[str, RoleDescription]:
    """What critic, reference and reward model have of their own."""
    reference = training_layout(
        gpus,
        **_degrees(s, REF, megatron, actor.layout),
        **_sharding(s, REF, megatron),
        recompute=actor.layout.recompute,
        **_scored(s, REF),
    )
    away = s.flag(f"{REF}.fsdp_config.param_offload")
    if megatron:
        follows = bool(default(REFERENCE_FOLLOWS, s.find(VERSION), megatron=True))
        away = s.flag(REFERENCE_FOLLOWS, default=follows and actor.residency == "offloaded")
    roles = {"reference": RoleDescription(layout=reference, residency="offloaded" if away else "resident")}
    if algorithm(s) == "ppo":
        roles["critic"] = _trained(s, "critic", gpus, megatron)
    else:
        s.overruled("critic.")
    if _reward(s):
        roles["reward"] = reward_role(s, gpus)
    return roles


def _rollout(s: FrameworkSettings, gpus: int, megatron: bool) -> RolloutLayout:
    version = s.find(VERSION)
    tp = s.whole(ROLLOUT_TP, default=int(default(ROLLOUT_TP, version, megatron=megatron)))
    attention_dp = s.whole(f"{ROLL}.data_parallel_size", default=1)
    vllm = f"{ROLL}.engine_kwargs.vllm"
    return rollout_layout(
        gpus,
        tp=tp,
        pp=s.whole(f"{ROLL}.pipeline_model_parallel_size", default=1),
        attention_dp=attention_dp,
        ep=s.whole(f"{ROLL}.expert_parallel_size", default=1),
        max_num_seqs=s.whole(SEQUENCES, default=int(default(SEQUENCES, version))),
        memory_utilization=s.share(f"{ROLL}.gpu_memory_utilization", default=0.5),
        max_batched_tokens=s.whole(f"{ROLL}.max_num_batched_tokens", default=8192),
        cuda_graphs=not s.flag(EAGER, default=bool(default(EAGER, version))),
        precision="fp8" if "fp8" in str(s.find(f"{ROLL}.quantization") or "") else "bf16",
        kv_precision="fp8" if "fp8" in str(s.find(f"{vllm}.kv_cache_dtype") or "") else "bf16",
        speculation=speculation(s, f"{vllm}.speculative_config"),
    )


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator, for GRPO also of the loss; without division by the deviation
    it is Dr. GRPO. DAPO reads as GRPO: what it changes of a step is said by other keys."""
    name = s.text("algorithm.adv_estimator", default="gae").rpartition(".")[2].lower()
    if name not in ESTIMATORS:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"algorithm.adv_estimator {name!r} has no counterpart here",
            help=f"priced: {', '.join(ESTIMATORS)}; the nearest one: --set algorithm.adv_estimator=grpo",
        )
    found = ESTIMATORS[name]
    match found, s.text(f"{ACTOR}.policy_loss.loss_mode", default="vanilla"):
        case "grpo", "gspo":
            return "gspo"
        case "grpo", "cispo":
            return "cispo"
    divided = s.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    return found if divided or found != "grpo" else "dr-grpo"


def _kl(s: FrameworkSettings) -> bool:
    in_reward = bool(default(KL_IN_REWARD, s.find(VERSION)))
    return s.flag(f"{ACTOR}.use_kl_loss") or s.flag(KL_IN_REWARD, default=in_reward)


def _critic(s: FrameworkSettings) -> str | None:
    path = s.find("critic.model.path") if algorithm(s) == "ppo" else None
    return None if path == s.find("actor_rollout_ref.model.path") else path


def _reward(s: FrameworkSettings) -> str | None:
    if not (s.flag("reward_model.enable") or s.flag("reward.reward_model.enable")):
        return None
    return s.text("reward.reward_model.model_path", "reward_model.model.path", default="same")


def _gradients(s: FrameworkSettings, megatron: bool) -> GradientSums:
    fp32 = s.find(f"{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32")
    return "bf16" if megatron and fp32 is False else "backend"


def _dynamic_sampling(s: FrameworkSettings, prompts: int) -> DynamicSampling | None:
    if not s.flag("algorithm.filter_groups.enable"):
        return None
    each = s.whole("data.gen_batch_size", default=prompts)
    most = s.whole("algorithm.filter_groups.max_num_gen_batches", default=0)
    return dynamic_sampling(s, prompts, each or prompts, most or None)


def _fsdp(s: FrameworkSettings, role: str) -> str:
    """Beginning of the keys of FSDP's engine; that of the critic moved in 0.8."""
    if role != "critic":
        return f"{role}.fsdp_config"
    return "critic.model.fsdp_config" if s.has("critic.model.fsdp_config") else "critic.fsdp"


def _degrees(s: FrameworkSettings, role: str, megatron: bool, like: Layout | None = None) -> dict[str, Any]:
    if not megatron:
        ulysses = "ulysses_sequence_parallel_size"
        cp = [s.count(f"{p}.{ulysses}") or 1 for p in (role, _fsdp(s, role))]
        return {"cp": max(*cp, 1 if like is None or s.find(f"{role}.{ulysses}") else like.cp)}
    tp = int(default(TRAIN_TP, s.find(VERSION), megatron=True))
    degrees = megatron_degrees(s, f"{role}.megatron", like, tp=tp)
    whole = s.flag(f"{role}.megatron.sequence_parallel", default=True)
    return {**degrees, "sequence_parallel": whole or degrees["tp"] == 1}


def _sharding(s: FrameworkSettings, role: str, megatron: bool) -> dict[str, Any]:
    """ZeRO stage, copies of shards, and optimizer states that stay on the host."""
    if megatron:
        optimizer = f"{role}.optim.override_optimizer_config"
        if not s.flag(f"{optimizer}.optimizer_cpu_offload"):
            return {"zero": 1}
        fraction = s.share(f"{optimizer}.optimizer_offload_fraction", default=1.0)
        return {"zero": 1, "offload_optimizer": "cpu", "offload_fraction": fraction}
    engine = _fsdp(s, role)
    shards = s.count(f"{engine}.fsdp_size") or -1
    return {
        "zero": 3 if s.flag(f"{engine}.reshard_after_forward", default=True) else 2,
        "shards": shards if shards > 1 else None,
        **(ON_HOST if s.flag(f"{engine}.offload_policy") else {}),
    }


def _micro_batch(s: FrameworkSettings, role: str) -> dict[str, int]:
    """Sequences of a micro-batch, or tokens of a GPU; what scores has a limit of its own."""
    dynamic = s.flag(f"{ACTOR}.use_dynamic_bsz")
    if not s.flag(f"{role}.use_dynamic_bsz", default=dynamic):
        return {"micro_batch": max(1, s.whole(f"{role}.ppo_micro_batch_size_per_gpu", default=1))}
    usual = 32768 if role == "critic" else 16384
    limit = max(1, s.whole(f"{role}.ppo_max_token_len_per_gpu", default=usual))
    scored = "critic.forward_max" if role == "critic" else f"{ROLL}.log_prob_max"
    return {
        "pack_tokens": limit,
        "score_pack_tokens": max(1, s.whole(f"{scored}_token_len_per_gpu", default=limit)),
    }


def _scored(s: FrameworkSettings, role: str) -> dict[str, int]:
    """The same of a role that only scores."""
    dynamic = s.flag(f"{ACTOR}.use_dynamic_bsz")
    if not s.flag(f"{role}.log_prob_use_dynamic_bsz", default=dynamic):
        usual = s.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1
        return {"micro_batch": max(1, s.whole(f"{role}.log_prob_micro_batch_size_per_gpu", default=usual))}
    usual = s.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384)
    return {"pack_tokens": max(1, s.whole(f"{role}.log_prob_max_token_len_per_gpu", default=usual))}


def _recompute(s: FrameworkSettings, role: str, megatron: bool) -> Recompute:
    if not megatron:
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        return "full" if s.flag(f"{model}.enable_gradient_checkpointing", default=True) else "none"
    granularity = s.find(
        f"{role}.megatron.override_transformer_config.recompute_granularity",
        "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity",  # to 0.4
    )
    return cast(Recompute, granularity) if granularity in ("full", "selective") else "none"


def _path(s: FrameworkSettings, apart: bool) -> WeightPath:
    backend = s.find(f"{ROLL}.checkpoint_engine.backend")
    return ("p2p" if backend in ("nixl", "mooncake") else "broadcast") if apart else "ipc"


def _staleness(s: FrameworkSettings, apart: bool) -> float:
    """One version in one-step-off; the threshold, at least one, in the asynchronous trainers."""
    if not apart:
        return 0.0
    if s.has("trainer.v1"):
        return float(s.whole("trainer.v1.sampler.max_off_policy_threshold", default=8))
    if s.has("async_training"):
        return max(1.0, s.share("async_training.staleness_threshold", default=0.1))
    return 1.0


def _interrupts(s: FrameworkSettings) -> bool:
    """Whether requests are interrupted at an update: always in separate_async (checkpoint_engine/base.py)."""
    if s.has("trainer.v1"):
        return True
    return s.has("async_training") and s.flag("async_training.partial_rollout", default=True)


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
