"""SkyRL's keys: one row each, written from a plan and read (0.4.0: skyrl/train/config/config.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RoleDescription, training_layout
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.dispatching import named
from rlhfsim.interchange.export import longest_prompt, longest_response
from rlhfsim.interchange.fields import Fields, leaves, shares
from rlhfsim.interchange.predictions import predicted
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.skyrl.unsaid import scored_together, updates, versions
from rlhfsim.interchange.table import FixedKey, Key, Row, Table, flag, of_call, whole
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.specs.placement.placement import Residency
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: dict[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "grpo",
    "dr-grpo": "grpo",
    "dapo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce++",
}
OTHERS: dict[str, Algorithm] = {"maxrl": "grpo"}
"""Estimators that are read, in addition to those that are written: of the same cost."""
PLACE, ALGORITHM = "trainer.placement", "trainer.algorithm"
ENGINE, POLICY = "generator.inference_engine", "trainer.policy"
MEGATRON = f"{POLICY}.megatron_config"
MODEL, RECOMPUTES = f"{POLICY}.model.path", "trainer.gradient_checkpointing"
MTP = "trainer.mtp.enabled"
MARKS = (f"{PLACE}.", f"{POLICY}.", f"{ENGINE}.", "environment.env_class")
"""Beginnings of keys that no other framework has."""
ROLES = {"actor": "policy", "reference": "ref", "critic": "critic"}
"""Role -> its name in SkyRL; rewards come from the environment."""
ROLLOUT_LOSSES = ("rollout_is", "dppo")
"""Losses that need no forward pass for old log-probs (backends/skyrl_train/utils/ppo_utils.py)."""


# --- what no row can say ------------------------------------------------------------------------------------


def _algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator and the norm of its loss."""
    key = f"{ALGORITHM}.advantage_estimator"
    name, known = s.text(key, default="grpo"), {word: name for name, word in ESTIMATORS.items()}
    known |= OTHERS
    if name not in known:
        names = ", ".join(dict.fromkeys(ESTIMATORS.values()))
        raise RlhfsimError(
            "algorithm-not-priced",
            f"{key} {name!r} has no counterpart here",
            help=f"priced: {names}; the nearest: --set {key}=grpo",
        )
    if name == "grpo":
        return "grpo" if s.flag(f"{ALGORITHM}.grpo_norm_by_std", default=True) else "dr-grpo"
    return known[name]


def _residency(s: FrameworkSettings, name: str, *, shared: bool) -> Residency:
    """What shares GPUs leaves them between its calls, unless FSDP keeps it on the host anyway."""
    hosted = s.flag(f"trainer.{name}.fsdp_config.cpu_offload")
    return "offloaded" if shared and not hosted else "resident"


def _roles(s: FrameworkSettings, read: Fields, *, ppo: bool, kl: bool) -> dict[str, RoleDescription]:
    """Reference and critic: on the actor's GPUs, or on their own."""
    beside = s.flag(f"{PLACE}.colocate_policy_ref", default=True)
    roles = {}
    for role, shared, present in (
        ("critic", read["shared"], ppo),
        ("reference", read["shared"] or beside, kl),
    ):
        name = ROLES[role]
        nodes, each = (f"{PLACE}.{name}_num_{unit}" for unit in ("nodes", "gpus_per_node"))
        count = s.whole(nodes, default=1)
        own = read["actor.gpus"] if shared else count * s.whole(each, default=1)
        layout, residency = _layout(s, read, role, own), _residency(s, name, shared=shared)
        if shared:
            s.overruled(nodes, each)
        if present:
            roles[role] = RoleDescription(
                layout=layout,
                residency=residency,
                optimizer_leaves=role == "critic" and residency == "offloaded",
                pool=None if shared else role,
                gpus=0 if shared else own,
            )
    return roles


def _layout(s: FrameworkSettings, read: Fields, role: str, gpus: int) -> Layout:
    tokens = max(0, int(s.share("trainer.max_tokens_per_microbatch", default=-1)))
    cp, scored = read[f"{role}.cp"], read["actor.score_micro_batch"]
    given: dict[str, Any] = {"micro_batch": scored}
    if role != "reference":
        given = {"micro_batch": read["actor.micro_batch"], "score_micro_batch": scored}
    if tokens:
        given = {"pack_tokens": max(1, tokens // cp)}
    given["recompute"] = recompute(s, read, POLICY) if s.flag(RECOMPUTES, default=True) else "none"
    return layout_of(s, read, role, gpus, prefix=f"trainer.{ROLES[role]}", **given)


def layout_of(
    s: FrameworkSettings, read: Fields, role: str, gpus: int, *, prefix: str, **given: Any
) -> Layout:
    """The layout of a role whose keys begin so; `given`: its micro-batches and what is computed again."""
    sharded, parallel = (below(prefix, f"{backend}_config") for backend in ("fsdp", "megatron"))
    cp = read[f"{role}.cp"]
    if read["backend"] == "megatron":
        given |= {name: read[f"{role}.{name}"] for name in ("tp", "pp", "ep", "dispatcher")}
        virtual = s.count(f"{parallel}.virtual_pipeline_model_parallel_size")
        given["etp"] = s.count(f"{parallel}.expert_tensor_parallel_size") or 1
        given["vp"] = (virtual or 1) if given["pp"] > 1 else 1
        kwargs = f"{parallel}.optimizer_config_kwargs"
        offloads = s.flag(f"{kwargs}.optimizer_cpu_offload")
        share = s.share(f"{kwargs}.optimizer_offload_fraction", default=0.0) if offloads else 0.0
        if share > 0:
            given |= {"offload_optimizer": "cpu", "offload_fraction": share}
        return training_layout(gpus, cp=cp, zero=1, **given)
    shards = int(s.share(f"{sharded}.fsdp_size", default=-1))
    host = read[f"{role}.offload_optimizer"]
    return training_layout(
        gpus,
        cp=cp,
        zero=read[f"{role}.zero"],
        shards=shards if 1 < shards < gpus else None,
        offload_optimizer=host,
        offload_params=host,
        **given,
    )


def below(prefix: str, name: str) -> str:
    """A key below a group; without a group the name alone."""
    return f"{prefix}.{name}" if prefix else name


def recompute(s: FrameworkSettings, read: Fields, prefix: str) -> Recompute:
    """What is computed again where layers are."""
    if read["backend"] != "megatron":
        return "full"
    kind = s.text(
        below(prefix, "megatron_config.transformer_config_kwargs.recompute_granularity"), default="full"
    )
    return cast(Recompute, kind) if kind in ("full", "selective") else "none"


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    algorithm, megatron, shared = _algorithm(s), read["backend"] == "megatron", read["shared"]
    kl = s.flag(f"{ALGORITHM}.use_kl_loss", default=True) or s.flag(f"{ALGORITHM}.use_kl_in_reward")
    swapped = shared or (kl and s.flag(f"{PLACE}.colocate_policy_ref", default=True))
    adapters = read["workload.lora.rank"] > 0
    beside = adapters and not (megatron and s.flag(f"{MEGATRON}.lora_config.merge_lora", default=True))
    sent = "nccl" if beside else s.text(f"{ENGINE}.weight_sync_backend", default="nccl")
    paths: dict[str, WeightPath] = {"sharded_rdt": "p2p", "rdt": "p2p", "delta": "delta-disk"}
    residency = _residency(s, "policy", shared=swapped)
    model = s.model(MODEL, default="Qwen/Qwen2.5-1.5B-Instruct")
    critic = s.find("trainer.critic.model.path") if algorithm == "ppo" else None
    loss = s.text(f"{ALGORITHM}.policy_loss_type", default="regular")
    continuous, engines = read["schedule.continuous"], read["rollout.dp"]
    each = read["rollout.tp"] * read["rollout.pp"]
    lag = read["versions"] if continuous else ".async." in str(s.find(ENTRY_POINT) or "")
    return {
        "workload.algorithm": algorithm,
        "workload.model": model,
        "workload.critic": None if critic == s.find(MODEL) else critic,
        "workload.prompts": read["batch"],
        "workload.mini_batches": max(1, read["batch"] // max(1, read["prompts_of_update"])),
        "workload.kl": kl,
        "workload.old_logprobs": "rollout" if loss in ROLLOUT_LOSSES else "recompute",
        "workload.train_precision": "fp8" if megatron and s.find(f"{MEGATRON}.fp8") else "bf16",
        "layout": _layout(s, read, "actor", read["actor.gpus"]),
        "roles": _roles(s, read, ppo=algorithm == "ppo", kl=kl),
        "actor.residency": residency,
        "actor.offload_between": residency == "offloaded",
        "rollout.gpus": each * engines,
        "rollout_gpus": None if shared else each * engines * read["rollout.attention_dp"],
        "rollout.sleep": 0 if not shared else 1 if beside else 2,
        "weight_path": "lora" if beside else paths.get(sent, "ipc" if shared else "broadcast"),
        "schedule.staleness": float(lag),
        "schedule.partial_rollout": continuous,
        **_turns(s, read),
    }


def _turns(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """The limit of a conversation: it ends once its input is longer than allowed, after one more answer.

    skyrl/train/generators/skyrl_gym_generator.py and train/config/config.py (0.4.0).
    """
    answer = read["limit.answer"]
    if s.whole("generator.max_turns", default=1) <= 1:
        return {"limit.response": answer}
    whole = s.whole("generator.max_input_length", default=read["limit.prompt"]) + answer
    return {"limit.total": whole, "limit.response": whole}


def _sent(plan: Plan) -> str:
    """What carries weights to the rollout: FP8 ones NCCL alone, those of a draft NCCL or files of changes."""
    rollout, path = plan.placement.rollout, plan.placement.weight_path
    if rollout is not None and (
        rollout.layout.precision == "fp8" or (rollout.layout.speculation and path == "p2p")
    ):
        return "nccl"
    return {"p2p": "sharded_rdt", "delta-disk": "delta"}.get(path, "nccl")


def _answer(plan: Plan) -> int:
    """The limit of one turn, all of equal length."""
    environment = plan.workload.environment
    return math.ceil(longest_response(plan) / (environment.turns if environment else 1))


# --- the rows -----------------------------------------------------------------------------------------------


def _gpus(role: str) -> tuple[Row, ...]:
    """Nodes of a role and GPUs of each."""
    name, policy = f"{PLACE}.{ROLES[role]}_num", role == "actor"
    on = "" if policy else role
    return (
        Key(f"{role}.nodes", f"{name}_nodes", 1, when=on, why=predicted if policy else "", read=policy),
        Key(f"{role}.each", f"{name}_gpus_per_node", 1, when=on, read=policy),
    )


_SHARDS = replace(whole(), write=lambda shards: shards or -1)


def engine(role: str, prefix: str) -> tuple[Row, ...]:
    """How a role is cut whose keys begin so."""
    policy = role == "actor"
    on, why = "" if policy else f"{role} ", of_call("actor.train") if policy else ""
    fsdp, megatron = f"{on}backend=fsdp2", f"{on}backend=megatron"
    sharded, parallel = (below(prefix, f"{backend}_config") for backend in ("fsdp", "megatron"))
    experts = f"{parallel}.expert_tensor_parallel_size"
    return (
        Key(f"{role}.tp", f"{parallel}.tensor_model_parallel_size", 1, whole(1), when=megatron, why=why),
        Key(f"{role}.pp", f"{parallel}.pipeline_model_parallel_size", 1, whole(1), when=megatron),
        Key(f"{role}.cp", f"{parallel}.context_parallel_size", 1, whole(1), when=megatron),
        Key(f"{role}.ep", f"{parallel}.expert_model_parallel_size", 1, whole(1), when=megatron),
        Key(
            f"{role}.dispatcher",
            f"{parallel}.moe_token_dispatcher_type",
            codec=named({"alltoall": "alltoall", "allgather": "allgather"}),
            when=f"{megatron} {role}.ep>1",
        ),
        Key(f"{role}.etp", experts, when=f"{megatron} {role}.ep>1", read=False),
        FixedKey(experts, None, f"{megatron} !{role}.ep>1"),
        Key(f"{role}.cp", below(prefix, "sequence_parallel_size"), 1, whole(1), when=fsdp, why=why),
        Key(f"{role}.zero", f"{sharded}.reshard_after_forward", 3, flag(3, 2, both=True), when=fsdp),
        Key(f"{role}.shards", f"{sharded}.fsdp_size", codec=_SHARDS, when=fsdp, read=False),
        Key(
            f"{role}.offload_optimizer",
            f"{sharded}.cpu_offload",
            "none",
            flag("cpu", "none", both=True),
            when=fsdp,
        ),
    )


def _shared(plan: Plan) -> str:
    return "training and rollout share the GPUs" if shares(plan) else "the rollout has GPUs of its own"


def _beside(plan: Plan) -> bool:
    return plan.placement.together("actor", "reference")


def _most(plan: Plan) -> int | None:
    """Generation batches of a step, -1 without a limit."""
    sampling = plan.workload.dynamic_sampling
    return (sampling.max_gen_batches or -1) if sampling else None


def _spread(plan: Plan) -> str | None:
    """Where adapters lie for several nodes."""
    hardware = plan.hardware[0]
    fsdp = plan.placement.backend == "fsdp2" and hardware.gpus > hardware.gpus_per_node
    return "${ADAPTERS}" if plan.workload.lora and fsdp else None


TABLE = Table(
    lambda: rows_of(
        "skyrl",
        {
            "ESTIMATORS": ESTIMATORS,
            "MODEL": MODEL,
            "MTP": MTP,
            "RECOMPUTES": RECOMPUTES,
            "beside": _beside,
            "critic_engine": engine("critic", "trainer.critic"),
            "critic_gpus": _gpus("critic"),
            "critic_leaves": lambda plan: leaves(plan.placement.role("critic")),
            "in_flight": lambda plan: updates(plan)[1] * (versions(plan) + 1),
            "most": _most,
            "pack": lambda plan: plan.placement.actor.layout.pack(scoring=False),
            "policy_engine": engine("actor", POLICY),
            "policy_gpus": _gpus("actor"),
            "reference_engine": engine("reference", "trainer.ref"),
            "reference_gpus": _gpus("reference"),
            "sent": _sent,
            "shared": _shared,
            "spread": _spread,
        },
    ),
    _rest,
    {
        "batch": lambda plan: updates(plan)[0],
        "limit.answer": _answer,
        "limit.conversation": lambda plan: longest_prompt(plan) + longest_response(plan) - _answer(plan),
        "versions": versions,
        "actor.score_micro_batch": scored_together,
        "takes_rollouts": lambda plan: (
            plan.workload.old_logprobs == "rollout" or plan.placement.schedule.continuous
        ),
    },
    {"critic": lambda s, read: True, "reference": lambda s, read: True},
)
