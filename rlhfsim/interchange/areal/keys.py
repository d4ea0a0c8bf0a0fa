"""AReaL's keys, written and read (1.0.4: `PPOConfig`); an allocation says a whole layout: few are rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.areal.allocations import allocation, degrees_of, gpus_of, spelled
from rlhfsim.interchange.configuration.described import RoleDescription, rollout_layout, training_layout
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Setting, nodes_of
from rlhfsim.interchange.fields import Fields, leaves, shares
from rlhfsim.interchange.predictions import call, held, memory, predicted
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import FROM_ROLLOUT, Table
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.workload import Algorithm, GradientSums

POLICY, BACKENDS = "actor.path", ("actor.backend", "rollout.backend")
ALLOCATIONS = "allocation_mode"
OFFLOADS = ("enable_offload", "actor.offload")
"""Whether anything leaves the GPUs between its calls, and whether the policy does where it shares none."""
BATCH, LONGEST, TYPE = (f"train_dataset.{name}" for name in ("batch_size", "max_length", "type"))
BUDGETS = tuple(f"{section}.mb_spec.max_tokens_per_mb" for section in ("actor", "ref", "critic"))
"""Token limits of micro-batches."""
SECTIONS = {"critic": "critic", "reference": "ref"}
"""Role -> its section."""
NORMS = {
    "ppo": None,
    "reinforce++": None,
    "grpo": {"mean_level": "group", "std_level": "group"},
    "dapo": {"mean_level": "group", "std_level": "group"},
    "gspo": {"mean_level": "group", "std_level": "group"},
    "dr-grpo": {"mean_level": "group", "std_level": None},
    "rloo": {"mean_level": "group", "mean_leave1out": True, "std_level": None},
}
"""Algorithm -> how rewards are normalised (`actor.reward_norm`), as in AReaL's examples/math."""
WORKER = "[{task_type: worker, port_count: 2, gpu: 1, mem: 32, cmd: python3 -m areal.infra.rpc.rpc_server}]"


# --- what no row can say ------------------------------------------------------------------------------------


def _algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm: a critic's, or the one of the norm of rewards."""
    if _has(s, "critic"):
        return "ppo"
    if s.find("actor.reward_norm.mean_level") != "group":
        return "reinforce++"
    if s.flag("actor.reward_norm.mean_leave1out"):
        return "rloo"
    if s.text("actor.importance_sampling_level", default="token") == "sequence":
        return "gspo"
    return "grpo" if s.find("actor.reward_norm.std_level") else "dr-grpo"


def _has(s: FrameworkSettings, section: str) -> bool:
    """Whether it has that engine; a reference only with a KL term above zero (trainer/rl_trainer.py)."""
    wanted = s.find("critic.is_critic", "critic.backend") is not None if section == "critic" else _kl(s)
    return s.has(section) and wanted


def _kl(s: FrameworkSettings) -> bool:
    return s.share("actor.kl_ctl", default=0.1) > 0


TRAINERS = ("fsdp", "megatron")
"""Training engines of an allocation that are priced."""


def _allocations(s: FrameworkSettings) -> tuple[str, str]:
    """Those of rollout and training; `allocation_mode`, `sglang:d4+fsdp:d4`, has both."""
    mode = str(s.find(ALLOCATIONS) or "")
    generates, plus, trains = mode.replace(".d", ":d").partition("+")
    if plus and s.find("actor.backend") is None:
        return generates, trains if ":" in trains else f"fsdp:{trains}"
    return s.text("rollout.backend"), s.text("actor.backend")


def layout_of(s: FrameworkSettings, section: str, spelled: str, samples: int, scored: int) -> Layout:
    """The layout of an engine that is given `samples` at a time to train on, and `scored` to score.

    Raises:
        RlhfsimError: it is no allocation, or one of an engine that is not priced, such as Archon.
    """
    engine, colon, _ = spelled.partition(":")
    if colon and engine not in TRAINERS:
        raise RlhfsimError(
            "engine-not-read",
            f"{section}.backend is {spelled!r}: how {engine} shards is not known here",
            place=Place(file=s.name),
            help=f"read are: {', '.join(TRAINERS)}; --set {section}.backend=fsdp:d8 prices the same with it",
        )
    sizes, scores = degrees_of(spelled), section == "ref"
    tp, pp, cp, dp = (sizes.get(name, 1) for name in "tpcd")
    cuts: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp}
    if spelled.startswith("megatron"):
        cuts |= {"ep": sizes.get("e", 1), "etp": sizes.get("etp", 1)}
        cuts["zero"] = int(s.flag(f"{section}.megatron.ddp.use_distributed_optimizer", default=True))
        cuts["vp"] = max(1, s.whole(f"{section}.megatron.virtual_pipeline_parallel_size", default=1))
    else:
        hosted = "cpu" if s.flag(f"{section}.fsdp.offload_params") else "none"
        cuts |= {"zero": 3, "offload_optimizer": hosted, "offload_params": hosted}
    recomputes = not scores and s.flag(f"{section}.gradient_checkpointing")
    kind = s.text(f"{section}.megatron.recompute_granularity", default="full") if recomputes else "none"
    limit = s.count(f"{section}.mb_spec.max_tokens_per_mb")
    number = s.whole(f"{section}.mb_spec.n_mbs", default=1, least=1)
    sizes = {"micro_batch": samples, "score_micro_batch": scored}
    packs = {name: max(1, count // (dp * number)) for name, count in sizes.items()}
    if limit:
        packs = {"pack_tokens": max(1, limit // cp)}
    return training_layout(dp * tp * pp * cp, **cuts, recompute=cast(Any, kind), **packs)


def _role(s: FrameworkSettings, role: str, sequences: int, each: int) -> RoleDescription:
    """A critic or a reference; colocated with the actor, it is in the actor's pool."""
    section = SECTIONS[role]
    spelled = s.text(f"{section}.backend", "actor.backend", default=_allocations(s)[1])
    colocated = s.text(f"{section}.scheduling_strategy.type", default="separation") == "colocation"
    target = s.text(f"{section}.scheduling_strategy.target", default="actor") if colocated else section
    with_actor = target == "actor"
    leaves = s.flag(f"{section}.offload")
    return RoleDescription(
        layout=layout_of(s, section, spelled, sequences if role == "reference" else each, sequences),
        residency="offloaded" if leaves else "resident",
        optimizer_leaves=leaves and role == "critic",
        pool=None if with_actor else target,
        gpus=0 if with_actor else gpus_of(spelled),
    )


def adapters(s: FrameworkSettings) -> int:
    """Rank of the adapters; 0: none are trained."""
    return s.whole("actor.lora_rank", default=32) if s.flag("actor.use_lora") else 0


def gradients(s: FrameworkSettings, megatron: bool) -> GradientSums:
    """The type in which gradients are summed."""
    if megatron:
        return "backend" if s.flag("actor.megatron.ddp.grad_reduce_in_fp32", default=True) else "bf16"
    return "bf16" if s.text("actor.grad_reduce_dtype", default="float32") == "bfloat16" else "backend"


def _replicas(s: FrameworkSettings, spelled: str, gpus: int) -> RolloutLayout:
    """Replicas of the engine that the allocation names."""
    sizes = degrees_of(spelled)
    sglang = spelled.startswith("sglang")
    share = ("sglang.mem_fraction_static",) if sglang else ("vllm.gpu_memory_utilization",)
    running = s.count("sglang.max_running_requests" if sglang else "vllm.max_num_seqs")
    return rollout_layout(
        gpus,
        tp=sizes.get("t", 1),
        pp=sizes.get("p", 1),
        max_num_seqs=running or 256,
        max_batched_tokens=s.whole("vllm.max_num_batched_tokens", default=VLLM.max_batched_tokens),
        memory_utilization=s.share(*share, default=0.9),
        cuda_graphs=not s.flag("sglang.disable_cuda_graph" if sglang else "vllm.enforce_eager"),
        engine="sglang" if sglang else None,
    )


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    generates, trains = _allocations(s)
    megatron = trains.startswith("megatron")
    gpus, own = gpus_of(trains), gpus_of(generates)
    shared = s.text("rollout.scheduling_strategy.type", default="separation") == "colocation"
    batch, updates = read["workload.prompts"] * read["workload.samples"], read["workload.mini_batches"]
    disk = shared or s.text("actor.weight_update_mode", default="xccl") == "disk"
    scored = batch if read["workload.old_logprobs"] == "recompute" else batch // updates
    layout = layout_of(s, "actor", trains, batch // updates, scored)
    gone = s.flag(OFFLOADS[0]) and (shared or s.flag(OFFLOADS[1]))
    gone = gone and layout.offload_params == "none"
    return {
        "workload.algorithm": _algorithm(s),
        "workload.model": s.model(POLICY),
        "workload.critic": "same" if _has(s, "critic") else None,
        "workload.packing": True,
        "workload.kl": _has(s, "ref"),
        "workload.lora.rank": adapters(s),
        "workload.gradients": gradients(s, megatron),
        "backend": "megatron" if megatron else "fsdp2",
        "gpus": gpus,
        "gpus_per_node": read["cluster.each"],
        "rollout_gpus": None if shared else own,
        "layout": layout,
        "roles": {
            role: _role(s, role, batch, batch // updates) for role in SECTIONS if _has(s, SECTIONS[role])
        },
        "actor.residency": "offloaded" if gone else "resident",
        "actor.offload_between": gone,
        "rollout": _replicas(s, generates, gpus if shared else own),
        "sleep": 2 if shared else 0,
        "weight_path": "disk" if disk else "broadcast",
        "schedule.staleness": 0.0 if shared else read["lag"],
        "schedule.partial_rollout": not shared and read["lag"] > 0,
    }


# --- written ------------------------------------------------------------------------------------------------


def _offloads(plan: Plan) -> bool:
    return shares(plan) or any(map(leaves, (plan.placement.actor, plan.placement.role("reference"))))


def _lagging(plan: Plan) -> str:
    apart = "policy versions between generation and training"
    return "training and rollout take turns" if shares(plan) else apart


def _cluster(plan: Plan) -> tuple[int, int]:
    """Nodes, and GPUs of each, of all pools but the reward model's."""
    placement = plan.placement
    used = {role.pool for name, role in placement.roles.items() if name != "reward"}
    return nodes_of(plan, sum(placement.pool(name).gpus for name in used))


def _lag(plan: Plan) -> int:
    return math.ceil(plan.placement.schedule.staleness)


def _under_way(plan: Plan) -> Iterator[Setting]:
    lag = _lag(plan)
    why = f"prompts under way: those of {lag + 1} steps" if lag else "prompts of a step"
    yield Setting("rollout.max_concurrent_rollouts", plan.workload.prompts * (lag + 1), why)


def _norm(plan: Plan) -> Iterator[Setting]:
    norm = NORMS[plan.workload.algorithm]
    if norm is not None:
        for name, level in norm.items():
            yield Setting(f"actor.reward_norm.{name}", level)
        yield Setting("actor.reward_norm.group_size", "${gconfig.n_samples}")


def _engine(plan: Plan, section: str, placed: RolePlacement, why: str) -> Iterator[Setting]:
    """What every engine that trains or scores has."""
    megatron = plan.placement.backend == "megatron"
    yield Setting(f"{section}.backend", allocation(placed.layout, megatron=megatron), why)
    yield Setting(f"{section}.experiment_name", "${experiment_name}")
    yield Setting(f"{section}.trial_name", "${trial_name}")
    worker = WORKER if section == "actor" else "${actor.scheduling_spec}"
    yield Setting(f"{section}.scheduling_spec", worker)
    yield Setting(f"{section}.disable_dropout", True)
    trained = section != "ref"
    recompute = placed.layout.recompute if trained else "none"
    why = held(plan, f"{section}.train", placed.pool) if trained else ""
    yield Setting(f"{section}.gradient_checkpointing", recompute != "none", why)
    if megatron:
        if recompute == "selective":
            yield Setting(f"{section}.megatron.recompute_granularity", "selective")
        yield Setting(f"{section}.megatron.ddp.use_distributed_optimizer", placed.layout.zero == 1)
        if placed.layout.vp > 1:
            yield Setting(f"{section}.megatron.virtual_pipeline_parallel_size", placed.layout.vp)
    elif placed.layout.offload_optimizer == "cpu":
        yield Setting(f"{section}.fsdp.offload_params", True, memory(plan))
    yield Setting(f"{section}.offload", leaves(placed))
    yield from _micro_batch(plan, section, placed.layout, scores=not trained)


def _micro_batch(plan: Plan, section: str, layout: Layout, *, scores: bool) -> Iterator[Setting]:
    limit = layout.pack(scoring=scores)
    if limit is not None:
        yield Setting(f"{section}.mb_spec.max_tokens_per_mb", limit, "of all CP ranks")
        return
    each = plan.workload.num_sequences // (1 if scores else plan.workload.mini_batches)
    size = layout.sequences(scoring=scores)
    number = math.ceil(each / (layout.dp * size))
    why = f"micro-batches of {size} samples"
    yield Setting(f"{section}.mb_spec.n_mbs", number, why)


def _beside(plan: Plan, section: str, placed: RolePlacement | None) -> Iterator[Setting]:
    """A reference or a critic."""
    if placed is None:
        return
    yield from _engine(plan, section, placed, "")
    yield Setting(f"{section}.path", "${actor.path}")
    if section == "critic":
        yield Setting("critic.is_critic", True)
        yield Setting("critic.ppo_n_minibatches", "${actor.ppo_n_minibatches}")
        yield Setting("critic.optimizer.type", "adam")
        yield Setting("critic.optimizer.lr", "???")
    placement = plan.placement
    critic = placement.role("critic")
    with_critic = critic is not None and section != "critic" and placed.pool == critic.pool
    if placed.pool == placement.actor.pool or with_critic:
        target = "actor" if placed.pool == placement.actor.pool else "critic"
        yield Setting(f"{section}.scheduling_strategy.type", "colocation")
        yield Setting(f"{section}.scheduling_strategy.target", target)
    elif placement.rollout is not None and placed.pool == placement.rollout.pool:
        raise RlhfsimError(
            "sharing-not-expressible",
            f"the {section} shares GPUs with the rollout and not with the actor",
            help="design again with --role-placement colocated",
        )


def _generator(plan: Plan) -> str | None:
    layout = plan.placement.rollout.layout if plan.placement.rollout else None
    if layout is None:
        return None
    return f"{layout.engine or 'vllm'}:{spelled({'d': layout.dp, 'p': layout.pp, 't': layout.tp})}"


def _sleeps(plan: Plan) -> bool:
    return bool(plan.placement.rollout and plan.placement.rollout.sleep)


def _adapter_rank(plan: Plan) -> int | None:
    return max(16, plan.workload.lora.rank) if plan.workload.lora else None


TABLE = Table(
    lambda: rows_of(
        "areal",
        {
            "BATCH": BATCH,
            "LONGEST": LONGEST,
            "POLICY": POLICY,
            "TYPE": TYPE,
            "adapter_rank": _adapter_rank,
            "critic": lambda plan: _beside(plan, "critic", plan.placement.role("critic")),
            "experiment": lambda plan: f"rlhfsim-{plan.workload.algorithm}",
            "from_rollout": lambda plan: "" if plan.workload.old_logprobs == "recompute" else FROM_ROLLOUT,
            "generator": _generator,
            "lagging": _lagging,
            "norm": _norm,
            "offloads": _offloads,
            "offloads_why": lambda plan: memory(plan) if _offloads(plan) else "",
            "policy": lambda plan: _engine(plan, "actor", plan.placement.actor, call(plan, "actor.train")),
            "reference": lambda plan: _beside(plan, "ref", plan.placement.role("reference")),
            "scheduler": lambda plan: "local" if _cluster(plan)[0] == 1 else "ray",
            "sleeps": _sleeps,
            "under_way": _under_way,
            "where": lambda plan: f"all pools. {predicted(plan)}",
        },
    ),
    _rest,
    {
        "cluster.nodes": lambda plan: _cluster(plan)[0],
        "cluster.each": lambda plan: _cluster(plan)[1],
        "lag": _lag,
    },
)
