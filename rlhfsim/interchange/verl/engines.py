"""How verl trains and scores: keys of policy, reference and critic, with Megatron-Core and with FSDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.dispatching import in_megatron
from rlhfsim.interchange.export import longest_prompt, longest_response
from rlhfsim.interchange.fields import Fields, cut, leaves
from rlhfsim.interchange.megatron_core import hosted_adam
from rlhfsim.interchange.predictions import memory
from rlhfsim.interchange.table import (
    Codec,
    FixedKey,
    Key,
    count,
    flag,
    given_that,
    like,
    of_call,
    of_held,
    unwritten,
    whole,
    word,
)
from rlhfsim.interchange.verl.versions import (
    ACTOR,
    MICRO_BATCHES,
    REF,
    REFERENCE_FOLLOWS,
    ROLL,
    TRAIN_TP,
    ULYSSES,
    V1,
    before,
    default,
)
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement

GROUPS = ("tp", "pp", "cp", "ep", "etp")
"""Degrees that a process sets up once, for all roles in it: those of the role that leads."""
ROLES = {"actor": ACTOR, "reference": REF, "critic": "critic"}
"""Role -> beginning of its keys."""
FSDP = {"actor": f"{ACTOR}.fsdp_config", "reference": f"{REF}.fsdp_config", "critic": "critic.fsdp"}
"""Role -> beginning of the keys of FSDP's engine."""
POLICY_MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Beginnings of the keys by which a role trains or scores."""

    role: str
    strategy: str
    """The key that says which FSDP."""
    fsdp: str
    megatron: str
    model: str
    optimizer: str
    before: tuple[str, ...] = ()
    """Where older releases have the sequence parallelism of FSDP."""


def engine_not_read(s: FrameworkSettings, key: str, said: object, read: Iterable[str]) -> RlhfsimError:
    """The refusal of an engine whose shards are not known here, such as those of VeOmni or AutoModel."""
    words, shown = sorted(read), str(said).lower() if isinstance(said, bool) else repr(said)
    return RlhfsimError(
        "engine-not-read",
        f"{key} is {shown}: how it shards is not known here",
        place=Place(file=s.name),
        help=f"read are: {', '.join(words)}; --set {key}={words[0]} says what the same run is with that",
    )


PREFIXES = {
    role: Prefixes(
        role=role,
        strategy=f"{own}.strategy",
        fsdp=FSDP[role],
        megatron=f"{own}.megatron",
        model="critic.model" if role == "critic" else POLICY_MODEL,
        optimizer=f"{own}.optim",
        before=(*(["critic.model.fsdp_config"] if role == "critic" else []), own),
    )
    for role, own in ROLES.items()
}
"""Role -> its keys in the trainers that generate."""
VIRTUAL = "virtual_pipeline_model_parallel_size"
OLD_GRANULARITY = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity"
"""Until 0.4."""
SEQUENCES, ROLLOUT_SEQUENCES, REFERENCE_SEQUENCES, CRITIC_SEQUENCES, CRITIC_SCORED = (
    f"{key}_per_gpu" for key in MICRO_BATCHES
)
DYNAMIC, CRITIC_DYNAMIC = f"{ACTOR}.use_dynamic_bsz", "critic.use_dynamic_bsz"


def by_version(key: str) -> Callable[[Fields], Any]:
    """The default of a key in the version of a configuration."""
    return lambda read: default(key, read["version"], megatron=read["backend"] == "megatron")


# --- what a plan says ---------------------------------------------------------------------------------------


def pack_limits(plan: Plan, layout: Layout) -> tuple[int, int]:
    """Tokens of a micro-batch per GPU, (training, scoring): at least a GPU's share of the longest sample."""
    least = math.ceil((longest_prompt(plan) + longest_response(plan)) / layout.cp)
    train = max(layout.pack_tokens or 0, least)
    return train, max(layout.score_pack_tokens or train, least)


def _stages(plan: Plan, placed: RolePlacement) -> int:
    """Virtual stages, set up once for all that a process holds."""
    actor, reference = plan.placement.actor, plan.placement.role("reference")
    own = (actor if placed is reference else placed).layout.vp
    return own if placed.layout.pp > 1 else 1


_PLANNED: Mapping[str, Callable[[Plan, RolePlacement], Any]] = {
    "packs": lambda plan, placed: placed.layout.pack_tokens is not None,
    "train_tokens": lambda plan, placed: pack_limits(plan, placed.layout)[0],
    "score_tokens": lambda plan, placed: pack_limits(plan, placed.layout)[1],
    "stages": _stages,
    "hosted": lambda plan, placed: placed.residency == "offloaded",
    "leaves": lambda plan, placed: leaves(placed),
}


def _planned(role: str, name: str) -> Callable[[Plan], Any]:
    def value(plan: Plan) -> Any:
        placed = plan.placement.roles.get(role)
        return _PLANNED[name](plan, placed) if isinstance(placed, RolePlacement) else None

    return value


PLANNED = {f"{role}.{name}": _planned(role, name) for role in ROLES for name in _PLANNED}
PLANNED["v1"] = lambda plan: True
"""Fields of each role: whether micro-batches are packs, their tokens, virtual stages, whether weights and
whether optimizer states leave the GPUs; whether the keys of the critic's engine hold."""


# --- how a configuration is read ----------------------------------------------------------------------------


def _ulysses(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int:
    """The largest of several keys; the last, of older releases, takes the place of another role's."""
    said = [s.count(key) or 1 for key in keys]
    return max(*said, 1 if s.find(keys[-1]) else default)


def _shards(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int | None:
    shards = s.count(*keys) or -1
    return shards if shards > 0 else None


def _copies(shards: int | None, gpus: int) -> dict[str, Any]:
    """Copies of shards: one where these are as many as the GPUs or more; a single shard is the whole model.

    `create_device_mesh` of verl/workers/engine/fsdp/utils.py, lines 47 to 53 of 0.9.1.
    """
    if shards is None or shards >= gpus:
        return {"shards": None}
    return {"shards": None, "zero": 0} if shards == 1 else {"shards": shards}


def layout_of(s: FrameworkSettings, read: Fields, keys: Prefixes) -> Layout:
    """The layout of a role; virtual stages are void without a pipeline."""
    role, group = keys.role, keys.megatron
    train, score = read[f"{role}.train_tokens"], read[f"{role}.score_tokens"]
    changes: dict[str, Any] = {"vp": read[f"{role}.stages"] or 1}
    if read["backend"] == "megatron":
        s.overruled(f"{group}.{VIRTUAL}")
        changes |= {name: read[f"{read['leader']}.{name}"] for name in GROUPS} | {"zero": 1}
    else:
        changes["offload_params"] = read[f"{role}.offload_optimizer"]
        changes |= _copies(read[f"{role}.shards"], read["actor.gpus"])
    if role == "reference":
        changes |= _reference_home(s, read)
        changes["recompute"], train, score = read["actor.recompute"], score, None
        changes |= {"micro_batch": read["reference.score_micro_batch"], "score_micro_batch": None}
    return cut(read, read["actor.gpus"], role=role, pack_tokens=train, score_pack_tokens=score, **changes)


def _reference_home(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    """Where FSDP has the weights of a reference: on the host, whatever its keys say; as adapters' base, with
    the policy."""
    if read["backend"] == "megatron":
        return {}
    s.overruled(*(f"{FSDP['reference']}.{key}" for key in ("param_offload", "offload_policy")))
    return {"offload_params": read["actor.offload_optimizer"] if read["workload.lora.rank"] else "cpu"}


# --- the rows -----------------------------------------------------------------------------------------------


def above_one() -> Codec:
    """A number of parts that is written where it cuts."""
    return Codec(lambda parts: parts if parts > 1 else None, count().read)


def engine(keys: Prefixes) -> tuple[Key | FixedKey, ...]:
    """Parallel degrees and where states lie."""
    trained, policy = keys.role != "reference", keys.role == "actor"
    why = of_call("actor.train") if trained else ""
    rows = (*_megatron(keys, why, trained=trained), *_fsdp(keys, why, trained=trained))
    return rows if policy else given_that(keys.role, *rows)


def _megatron(keys: Prefixes, why: Any, *, trained: bool) -> tuple[Key | FixedKey, ...]:
    role, group = keys.role, keys.megatron

    def usual(name: str, other: Any = 1) -> Any:
        return other if trained else like(f"actor.{name}")

    experts = f"{group}.expert_tensor_parallel_size"
    added = "+" if trained else "++"  # the reference's group holds what the actor's does
    return given_that(
        "backend=megatron",
        Key(
            f"{role}.tp",
            f"{group}.tensor_model_parallel_size",
            usual("tp", by_version(TRAIN_TP)),
            whole(1),
            why=why,
        ),
        Key(f"{role}.pp", f"{group}.pipeline_model_parallel_size", usual("pp"), whole(1)),
        Key(f"{role}.cp", f"{group}.context_parallel_size", usual("cp"), whole(1)),
        Key(f"{role}.ep", f"{group}.expert_model_parallel_size", usual("ep"), whole(1)),
        Key(f"{role}.etp", experts, usual("etp", like(f"{role}.tp")), count(), when=f"{role}.tp>1"),
        Key(f"{role}.etp", experts, usual("etp"), above_one(), when=f"!{role}.tp>1"),
        Key(f"{role}.stages", f"{group}.{VIRTUAL}", usual("stages"), above_one(), when=f"{role}.pp>1"),
        *in_megatron(role, f"{added}{group}.override_transformer_config.", flag=True),
        Key(f"{role}.sequence_parallel", f"{group}.sequence_parallel", True, flag(both=True)),
        *_leaving(role, group, trained=trained),
    )


NEVER_TRAINED = "weights that are not trained, which verl loads in FP32 unless told"


def _fsdp(keys: Prefixes, why: Any, *, trained: bool) -> tuple[Key | FixedKey, ...]:
    role, group = keys.role, keys.fsdp
    return given_that(
        "backend=fsdp2",
        FixedKey(keys.strategy, "fsdp2"),
        Key(
            f"{role}.cp",
            f"{group}.{ULYSSES}",
            1 if trained else like("actor.cp"),
            Codec(lambda cp: cp, _ulysses),
            also=tuple(f"{older}.{ULYSSES}" for older in keys.before),
            why=why,
        ),
        Key(
            f"{role}.shards",
            f"{group}.fsdp_size",
            codec=Codec(lambda shards: shards, _shards),
            why="a copy of the shards a node",
        ),
        Key(
            f"{role}.zero",
            f"{group}.reshard_after_forward",
            3,
            Codec(lambda zero: False if zero == 2 else None, flag(3, 2).read, (3, 2)),
        ),
        FixedKey(f"{group}.model_dtype", "bf16", "workload.lora" if trained else "", NEVER_TRAINED),
        *(_homes(keys) if trained else ()),
    )


def _homes(keys: Prefixes) -> tuple[Key | FixedKey, ...]:
    """Where FSDP has what is trained, while it works and between its calls."""
    policy = Key(f"{keys.role}.offload_optimizer", offload_policy(keys), codec=_in_fsdp2(keys), why=memory)
    return (policy, *_leaving(keys.role, keys.fsdp, trained=True))


def offload_policy(keys: Prefixes) -> str:
    """The key with which FSDP2 has what is trained on the host while it works."""
    return f"{keys.fsdp}.offload_policy"


def _in_fsdp2(keys: Prefixes) -> Codec:
    """States on the host where FSDP2 is told so; FSDP1 passes over it (`_build_fsdp_module` of
    verl/workers/engine/fsdp/transformer_impl.py, line 424 of 0.9.1; before, verl/workers/fsdp_workers.py)."""
    told = flag("cpu", "none")

    def read(s: FrameworkSettings, names: tuple[str, ...], usual: Any) -> str:
        on = told.read(s, names, usual)
        return str(on) if s.find(keys.strategy) == "fsdp2" else "none"

    return Codec(told.write, read, told.values)


def flat_on_host(s: FrameworkSettings, keys: Prefixes) -> Iterator[Finding]:
    """A key of FSDP2 where FSDP1 runs."""
    key = offload_policy(keys)
    if s.flag(key) and s.find(keys.strategy) != "fsdp2":
        yield Finding(
            what=f"{key} is passed over: FSDP1 runs where {keys.strategy} is not fsdp2, all on the GPUs",
            keys=(key, keys.strategy),
            remedy=f"{keys.strategy}=fsdp2",
        )


def _leaving(role: str, group: str, *, trained: bool) -> tuple[Key | FixedKey, ...]:
    """Whether weights, and what else is trained, leave the GPUs between the calls of a role."""

    def why(plan: Plan) -> str:
        return memory(plan) if PLANNED[f"{role}.hosted"](plan) else ""

    key = f"{group}.param_offload"
    usual = _follows if key == REFERENCE_FOLLOWS else False
    rows = [Key(f"{role}.hosted", key, usual, flag(both=True), why=why)]
    if trained:
        rows.append(Key(f"{role}.leaves", f"{group}.optimizer_offload", codec=flag(both=True)))
    return tuple(rows)


def _follows(read: Fields) -> bool:
    """Whether the reference leaves with the policy, if nobody says so."""
    return bool(by_version(REFERENCE_FOLLOWS)(read)) and bool(read["actor.hosted"])


def recomputing(keys: Prefixes) -> tuple[Key | FixedKey, ...]:
    """Activations that are computed again, and optimizer states on the host."""
    role, model = keys.role, keys.model
    override, why = f"{keys.megatron}.override_transformer_config", of_held(f"{role}.train", role)
    rows = (
        Key(
            f"{role}.recompute",
            f"{model}.enable_gradient_checkpointing",
            "full",
            flag("full", "none", "selective", both=True),
            when="backend=fsdp2",
            why=why,
        ),
        *given_that(
            "backend=megatron",
            *hosted_adam(role, f"+{keys.optimizer}.override_optimizer_config."),
            Key(
                f"{role}.recompute",
                f"{override}.recompute_granularity",
                codec=word("full", "selective", other="none"),
                also=(OLD_GRANULARITY,),
                why=why,
            ),
            FixedKey(f"{override}.recompute_method", "uniform", f"{role}.recompute=full"),
            FixedKey(f"{override}.recompute_num_layers", 1, f"{role}.recompute=full"),
        ),
    )
    return rows if role == "actor" else given_that(role, *rows)


_SUMS = Codec(
    lambda gradients: False if gradients == "bf16" else None,
    lambda s, keys, usual: "bf16" if s.find(*keys) is False else "backend",
    ("bf16", "backend"),
)


def gradient_sums(keys: Prefixes) -> Key:
    """The type in which Megatron-Core sums gradients."""
    key = f"+{keys.megatron}.override_ddp_config.grad_reduce_in_fp32"
    return Key("workload.gradients", key, codec=_SUMS, when="backend=megatron")


_TRAINED = of_held("actor.train", "actor")
POLICY_MICRO_BATCHES = (
    Key("actor.packs", DYNAMIC, codec=flag(both=True)),
    Key(
        "actor.train_tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        16384,
        whole(floor=1),
        when="actor.packs",
        why=_TRAINED,
    ),
    Key(
        "actor.score_tokens",
        f"{ROLL}.log_prob_max_token_len_per_gpu",
        like("actor.train_tokens"),
        whole(floor=1),
        when="actor.packs",
    ),
    Key("actor.micro_batch", SEQUENCES, 1, whole(floor=1), when="!actor.packs", why=_TRAINED),
    Key(
        "actor.score_micro_batch",
        ROLLOUT_SEQUENCES,
        like("actor.micro_batch"),
        whole(floor=1),
        when="!actor.packs",
    ),
)
REFERENCE_MICRO_BATCHES = given_that(
    "reference",
    Key(
        "reference.score_micro_batch",
        REFERENCE_SEQUENCES,
        like("actor.sequences"),
        whole(floor=1),
        when="!reference.packs",
    ),
    Key(
        "reference.score_tokens",
        f"{REF}.log_prob_max_token_len_per_gpu",
        lambda read: read["actor.train_tokens"] or 16384,
        whole(floor=1),
        when="reference.packs",
    ),
)


def _critic_engine(backend: str, group: str) -> tuple[Key | FixedKey, ...]:
    """Samples of a micro-batch as the critic's engine takes them: nothing else reaches it since 0.9."""
    return given_that(
        f"backend={backend} !critic.packs",
        FixedKey(
            f"+{group}.use_dynamic_bsz", False, why="or the critic trains on packs, whatever its own key says"
        ),
        Key("critic.micro_batch", f"+{group}.micro_batch_size_per_gpu", 1, whole(floor=1), when="v1"),
        Key(
            "critic.score_micro_batch",
            f"+{group}.infer_micro_batch_size_per_gpu",
            like("critic.micro_batch"),
            whole(floor=1),
            when="v1",
        ),
    )


CRITIC_TOKENS = "+critic.ppo_infer_max_token_len_per_gpu"
CRITIC_MICRO_BATCHES = given_that(
    "critic",
    *_critic_engine("fsdp2", FSDP["critic"]),
    *_critic_engine("megatron", "critic.megatron"),
    *given_that(
        "v1 critic.packs",
        Key("critic.train_tokens", CRITIC_TOKENS, 32768, whole(floor=1), why="training takes it too"),
        Key("critic.score_tokens", CRITIC_TOKENS, 32768, unwritten(whole(floor=1))),
    ),
    Key("critic.micro_batch", CRITIC_SEQUENCES, 1, whole(floor=1), when="!critic.packs"),
    Key(
        "critic.score_micro_batch",
        CRITIC_SCORED,
        like("critic.micro_batch"),
        whole(floor=1),
        when="!critic.packs backend=fsdp2",
    ),
    Key(
        "critic.train_tokens", "critic.ppo_max_token_len_per_gpu", 32768, whole(floor=1), when="critic.packs"
    ),
    Key(
        "critic.score_tokens",
        "critic.forward_max_token_len_per_gpu",
        like("critic.train_tokens"),
        whole(floor=1),
        when="critic.packs !v1",
    ),
)


def _critic_packs(s: FrameworkSettings, read: Fields) -> bool:
    """Whether the critic's micro-batches are packs: since 0.9, unless its engine is told."""
    if not read["v1"]:
        return s.flag(CRITIC_DYNAMIC, default=read["actor.packs"])
    group = "critic.megatron" if read["backend"] == "megatron" else FSDP["critic"]
    return bool(read["workload.packing"]) and s.flag(f"{group}.use_dynamic_bsz", default=True)


FOLLOWS: Mapping[str, Callable[[FrameworkSettings, Fields], Any]] = {
    "actor.sequences": lambda s, read: s.count(SEQUENCES) or 1,
    "reference.packs": lambda s, read: s.flag(f"{REF}.log_prob_use_dynamic_bsz", default=read["actor.packs"]),
    "critic.packs": _critic_packs,
    "v1": lambda s, read: (
        not before(read["version"], V1)
        and s.flag("trainer.use_v1", default=True)
        and "recipe" not in str(s.find(ENTRY_POINT))
    ),
}
