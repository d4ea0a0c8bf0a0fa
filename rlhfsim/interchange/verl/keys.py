"""verl's keys: one row each, written from a plan and read (0.9.1: `verl/trainer/config/ppo_trainer.yaml`).

Keys and defaults: verl/trainer/config/_generated_ppo_trainer.yaml and ..._megatron_trainer.yaml, and
verl/experimental/{one_step_off_policy,fully_async_policy}/config; what changed: `versions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RoleDescription
from rlhfsim.interchange.configuration.engines import dynamic_sampling, speculation
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Setting, Value
from rlhfsim.interchange.fields import Fields, shares
from rlhfsim.interchange.predictions import call
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Codec, Table, lag
from rlhfsim.interchange.verl.engine_limits import BATCHED, BATCHED_TOKENS, MEMORY, USUAL
from rlhfsim.interchange.verl.engines import (
    CRITIC_MICRO_BATCHES,
    FOLLOWS,
    PLANNED,
    POLICY_MICRO_BATCHES,
    PREFIXES,
    REFERENCE_MICRO_BATCHES,
    by_version,
    engine,
    engine_not_read,
    gradient_sums,
    layout_of,
    recomputing,
)
from rlhfsim.interchange.verl.releases import RELEASES
from rlhfsim.interchange.verl.reward_model import (
    OWN_GPUS,
    own_gpus,
    reward_named,
    reward_role,
    reward_settings,
)
from rlhfsim.interchange.verl.software import software
from rlhfsim.interchange.verl.versions import (
    ACTOR,
    EACH,
    EAGER,
    ENGINES,
    KL_IN_REWARD,
    MODEL,
    NODES,
    ROLL,
    ROLLOUT_TP,
    SEQUENCES,
    TRAIN_BATCH,
    UNPADDED,
    VERSION,
    before,
)
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.placement import Late
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm

READ: dict[str, Algorithm] = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++",
    "grpo_passk": "grpo",
    "opo": "grpo",
    "gpg": "grpo",
    "gdpo": "grpo",
}
"""algorithm.adv_estimator (verl/trainer/ppo/core_algos.py, AdvantageEstimator) -> algorithm here: one of the
same cost. Not read: ReMax generates a greedy response more a prompt, optimal baselines sum over the
vocabulary once more."""
CRITIC = "critic.model.path"
ESTIMATOR, BY_DEVIATION = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
KL_LOSS, MERGED = f"{ACTOR}.use_kl_loss", "actor_rollout_ref.model.lora.merge"
FILTERS, MOST_BATCHES = (f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches"))
MODE, HYBRID = "trainer.v1.trainer_mode", "actor_rollout_ref.hybrid_engine"
LATE = "trainer.v1.sampler.max_off_policy_strategy"
LENDS = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
SYNCED, LAG = "trainer.v1.separate_async.parameter_sync_step", "trainer.v1.sampler.max_off_policy_threshold"
SPLIT = f"{ROLL}.disaggregation"
MINI_BATCH, GENERATED = f"{ACTOR}.ppo_mini_batch_size", "data.gen_batch_size"
OWN_NODES, OWN_EACH = f"{ROLL}.nnodes", f"{ROLL}.n_gpus_per_node"
SLEEPS, SENT = f"{ROLL}.free_cache_engine", f"{ROLL}.checkpoint_engine.backend"
ENGINE_NAME, VLLM = f"{ROLL}.name", f"{ROLL}.engine_kwargs.vllm"
DRAFTS, MTP = f"{VLLM}.speculative_config", "actor_rollout_ref.model.mtp"
MARKS = ("actor_rollout_ref.", "critic.ppo_", ESTIMATOR, "data.max_response_length")
"""Beginnings of keys that no other framework has."""


# --- what no row can say ------------------------------------------------------------------------------------


_TRAINERS = {"megatron": "megatron", "dp": "fsdp2", "fsdp": "fsdp2", "fsdp2": "fsdp2"}
"""Word of `model_engine`, or of the actor's strategy -> training backend here."""


def _trainer(s: FrameworkSettings, keys: tuple[str, ...], usual: Any) -> str:
    """Megatron-Core where its group of the configuration, or its trainer by name, is chosen.

    Raises:
        RlhfsimError: an engine that is not priced, such as VeOmni's.
    """
    said = s.find(*keys)
    if said is None:
        return "megatron" if "megatron" in str(s.find("config_name")) else "fsdp2"
    if str(said) not in _TRAINERS:
        raise engine_not_read(s, next(key for key in keys if s.find(key) is not None), said, _TRAINERS)
    return _TRAINERS[str(said)]


def _prompts(s: FrameworkSettings, keys: tuple[str, ...], usual: Any) -> int:
    """Prompts of a batch; with 0, those of a mini-batch are one."""
    return s.whole(*keys, default=usual) or s.whole(MINI_BATCH, default=256)


def _own_gpus(s: FrameworkSettings, read: Fields) -> int | None:
    """GPUs of the rollout alone; None: it shares those that train."""
    if s.find("rollout.nnodes") is not None:  # one_step_off_policy, fully_async_policy
        return s.whole("rollout.nnodes") * s.whole("rollout.n_gpus_per_node", default=8)
    nodes = s.whole(OWN_NODES, default=0)
    return nodes * s.whole(OWN_EACH, default=read["actor.each"]) if nodes else None


def _algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm of the advantage estimator, for GRPO also of the loss; without division by the deviation
    it is Dr. GRPO. DAPO reads as GRPO: what it changes of a step is said by other keys."""
    name = s.text(ESTIMATOR, default="gae").rpartition(".")[2].lower()
    if name not in READ:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"{ESTIMATOR} {name!r} has no counterpart here",
            help=f"priced: {', '.join(READ)}; the nearest one: --set {ESTIMATOR}=grpo",
        )
    found = READ[name]
    match found, s.text(LOSS_MODE, default="vanilla"):
        case "grpo", "gspo":
            return "gspo"
        case "grpo", "cispo":
            return "cispo"
    divided = s.flag(BY_DEVIATION, default=True)
    return found if divided or found != "grpo" else "dr-grpo"


def _dynamic_sampling(s: FrameworkSettings, read: Fields, prompts: int) -> DynamicSampling | None:
    if read["v1"]:  # it warns and generates on (trainer/ppo/v1/trainer_base.py, line 205 of 0.9.1)
        s.overruled(MOST_BATCHES)
    if not s.flag(FILTERS):
        return None
    if read["v1"] and reward_named(s) and not own_gpus(s):
        raise RlhfsimError(
            "groups-filtered-before-rewards",
            "verl refuses to start: its v1 trainer filters groups before a reward model on the actor's GPUs "
            "scores them",
            help=f"rewards by rules, without {FILTERS}, or {OWN_GPUS}=True",
        )
    each, most = s.whole(GENERATED, default=prompts), 0 if read["v1"] else s.whole(MOST_BATCHES, default=0)
    return dynamic_sampling(s, prompts, each or prompts, most or None)


def _path(s: FrameworkSettings, *, apart: bool) -> WeightPath:
    backend = s.find(SENT)
    return ("p2p" if backend in ("nixl", "mooncake") else "broadcast") if apart else "ipc"


def _staleness(s: FrameworkSettings) -> float:
    """One version in one-step-off; the threshold, at least one, in the asynchronous trainers."""
    if s.has("trainer.v1"):
        return float(s.whole(LAG, default=8))
    if s.has("async_training"):
        return max(1.0, s.share("async_training.staleness_threshold", default=0.1))
    return 1.0


def _late(s: FrameworkSettings) -> Late:
    """What happens to groups beyond the threshold: dropped, unless the trainer is told to wait for them."""
    if not s.has("trainer.v1") or not _staleness(s):
        return "wait"
    return "wait" if s.text(LATE, default="drop") == "wait" else "drop"


def _interrupts(s: FrameworkSettings) -> bool:
    """Whether requests are interrupted at an update: always in separate_async (checkpoint_engine/base.py)."""
    if s.has("trainer.v1"):
        return True
    return s.has("async_training") and s.flag("async_training.partial_rollout", default=True)


def _leaves(read: Fields, role: str) -> bool:
    """Whether weights leave between calls; with FSDP those of a reference are the policy's or on the host."""
    if role == "reference" and read["backend"] != "megatron":
        return bool(read["actor.hosted"] and read["workload.lora.rank"])
    return bool(read[f"{role}.hosted"])


def _roles(s: FrameworkSettings, read: Fields) -> dict[str, RoleDescription]:
    """What critic, reference and reward model have of their own."""
    roles = {}
    for role in ("reference", *(["critic"] if read["critic"] else [])):
        roles[role] = RoleDescription(
            layout=layout_of(s, read, PREFIXES[role]),
            residency="offloaded" if _leaves(read, role) else "resident",
            optimizer_leaves=bool(read[f"{role}.leaves"]),
        )
    if not read["critic"]:
        s.overruled("critic.")
    if reward_named(s):
        roles["reward"] = reward_role(s, read["actor.gpus"])
    return roles


def _kl(s: FrameworkSettings, read: Fields) -> bool:
    return s.flag(KL_LOSS) or s.flag(KL_IN_REWARD, default=bool(by_version(KL_IN_REWARD)(read)))


def _leader(s: FrameworkSettings, read: Fields) -> str:
    """The role whose degrees Megatron's groups have, in the process that all of them share.

    Until 0.7 the policy (workers/megatron_workers.py, `ActorRolloutRefWorker.__init__`), then the first
    whose engine is built (0.9.1, workers/engine_workers.py): critic, reference, policy.
    """
    if before(read["version"], ENGINES):
        return "actor"
    return "critic" if read["critic"] else "reference" if _kl(s, read) else "actor"


def _prefills(s: FrameworkSettings, replicas: int) -> int:
    """Replicas that only prefill, of so many in all."""
    each = [s.whole(f"{SPLIT}.{name}_replicas", default=1, least=1) for name in ("prefill", "decode")]
    return replicas * each[0] // sum(each) if s.flag(f"{SPLIT}.enabled") else 0


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    gpus, own, prompts = read["actor.gpus"], _own_gpus(s, read), read["workload.prompts"]
    beside = read["workload.lora.rank"] > 0 and not s.flag(MERGED)
    critic = s.find(CRITIC) if read["critic"] else None
    megatron = read["backend"] == "megatron"
    sleeps = s.flag(SLEEPS, default=True)
    return {
        "workload.algorithm": _algorithm(s),
        "workload.model": s.model(MODEL),
        "workload.critic": None if critic == s.find(MODEL) else critic,
        "workload.reward.model": reward_named(s),
        "workload.mini_batches": max(1, round(prompts / max(1, read["prompts_of_update"]))),
        "kl": _kl(s, read),
        "workload.dynamic_sampling": _dynamic_sampling(s, read, prompts),
        "layout": layout_of(s, read, PREFIXES["actor"]),
        "roles": _roles(s, read),
        "actor.residency": "offloaded" if read["actor.hosted"] else "resident",
        "actor.offload_between": read["actor.leaves"],
        "rollout.gpus": gpus if own is None else own,
        "rollout.prefill": _prefills(s, (gpus if own is None else own) // read["rollout.tp"]),
        "rollout.speculation": speculation(s, DRAFTS, trained=s.flag(f"{MTP}.enable_train")),
        "rollout.sleep": (1 if beside else 2) if sleeps else 0,
        "weight_path": "lora" if beside else _path(s, apart=own is not None),
        "schedule.staleness": _staleness(s) if own is not None else 0.0,
        "schedule.partial_rollout": own is not None and _interrupts(s),
        "schedule.late": _late(s) if own is not None else "wait",
        "schedule.lend": own is not None and s.flag(LENDS),
        "software": software(
            s, packing=read["workload.packing"], megatron=megatron, adapters=read["workload.lora.rank"] > 0
        ),
    }


# --- the rows -----------------------------------------------------------------------------------------------


def _mode(plan: Plan) -> str:
    return "sync" if shares(plan) else "separate_async"


def _mode_why(plan: Plan) -> str:
    return "training and rollout share the GPUs" if shares(plan) else "the rollout has GPUs of its own"


def _sent(plan: Plan) -> Value:
    """The engine that carries weights to the rollout."""
    return "nixl" if plan.placement.weight_path == "p2p" else "naive" if shares(plan) else "nccl"


def _wide(plan: Plan) -> bool:
    layout = plan.placement.rollout.layout if plan.placement.rollout else None
    return layout is not None and (layout.attention_dp > 1 or layout.ep > 1)


def _prefill(plan: Plan) -> Iterator[Setting]:
    """A unit of P prefill and D decode engines, as small as the ratio allows; each is a replica of ours."""
    layout = plan.placement.rollout.layout if plan.placement.rollout else None
    if layout is None or not layout.prefill:
        return
    decode = layout.dp - layout.prefill
    unit = math.gcd(layout.prefill, decode)
    yield Setting(f"{SPLIT}.enabled", True, "prompts are prefilled apart from decode")
    yield Setting(f"{SPLIT}.prefill_replicas", layout.prefill // unit)
    yield Setting(f"{SPLIT}.decode_replicas", decode // unit)


TABLE = Table(
    lambda: rows_of(
        "verl",
        {
            "BATCHED": BATCHED,
            "BATCHED_TOKENS": BATCHED_TOKENS,
            "BY_DEVIATION": BY_DEVIATION,
            "CRITIC": CRITIC,
            "CRITIC_MICRO_BATCHES": CRITIC_MICRO_BATCHES,
            "EACH": EACH,
            "EAGER": EAGER,
            "ENGINE_NAME": ENGINE_NAME,
            "ESTIMATOR": ESTIMATOR,
            "FILTERS": FILTERS,
            "GENERATED": GENERATED,
            "HYBRID": HYBRID,
            "KL_IN_REWARD": KL_IN_REWARD,
            "KL_LOSS": KL_LOSS,
            "LAG": LAG,
            "LATE": LATE,
            "LENDS": LENDS,
            "LOSS_MODE": LOSS_MODE,
            "MEMORY": MEMORY,
            "MERGED": MERGED,
            "MINI_BATCH": MINI_BATCH,
            "MODE": MODE,
            "MODEL": MODEL,
            "NODES": NODES,
            "OWN_EACH": OWN_EACH,
            "OWN_NODES": OWN_NODES,
            "POLICY_MICRO_BATCHES": POLICY_MICRO_BATCHES,
            "REFERENCE_MICRO_BATCHES": REFERENCE_MICRO_BATCHES,
            "ROLLOUT_TP": ROLLOUT_TP,
            "SENT": SENT,
            "SEQUENCES": SEQUENCES,
            "SLEEPS": SLEEPS,
            "STRATEGY": PREFIXES["actor"].strategy,
            "SYNCED": SYNCED,
            "TRAIN_BATCH": TRAIN_BATCH,
            "UNPADDED": UNPADDED,
            "USUAL": USUAL,
            "backend": Codec(lambda backend: "megatron" if backend == "megatron" else "dp", _trainer),
            "by_version": by_version,
            "degrees": lambda role: engine(PREFIXES[role]),
            "gradient_sums": gradient_sums(PREFIXES["actor"]),
            "graphs": lambda read: not by_version(EAGER)(read),
            "lends": lambda plan: plan.placement.schedule.lend or None,
            "mode": _mode,
            "mode_why": _mode_why,
            "prefill": _prefill,
            "prompts": Codec(lambda prompts: prompts, _prompts),
            "recomputing": lambda role: recomputing(PREFIXES[role]),
            "reward_settings": reward_settings,
            "sent": _sent,
            "synced": lambda plan: f"new weights once a batch; {call(plan, 'actor.sync')}",
            "threshold": lambda plan: lag().write(plan.placement.schedule.staleness),
        },
    ),
    _rest,
    {**PLANNED, "wide": _wide},
    {
        **FOLLOWS,
        "version": lambda s, read: s.find(VERSION),
        "shared": lambda s, read: _own_gpus(s, read) is None,
        "critic": lambda s, read: _algorithm(s) == "ppo",
        "reference": lambda s, read: True,
        "leader": _leader,
        "wide": lambda s, read: True,
    },
    RELEASES,
)
