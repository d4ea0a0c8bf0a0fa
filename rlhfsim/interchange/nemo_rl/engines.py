"""How NeMo-RL trains the policy and the value model: keys of Megatron-Core and of its DTensor engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.dispatching import in_megatron
from rlhfsim.interchange.fields import Fields, cut
from rlhfsim.interchange.given_data import samples_at_once
from rlhfsim.interchange.megatron_core import hosted_adam
from rlhfsim.interchange.nemo_rl.unsaid import refuses_split
from rlhfsim.interchange.table import Codec, FixedKey, Key, count, flag, given_that, of_call, of_held, whole
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.workload.workload import sequences_of

ENGINES = {"megatron": "megatron_cfg", "fsdp2": "dtensor_cfg"}
MODELS = {"actor": "policy", "critic": "value", "reference": "teacher"}
"""Role -> the group of its keys, that of the reference in distillation; rewards come from an environment."""
BUDGETS = tuple(
    f"policy.{group}.{kind}_mb_tokens"
    for group in ("sequence_packing", "dynamic_batching")
    for kind in ("train", "logprob")
)
"""Keys of the tokens of a micro-batch."""


def _recomputed(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> str:
    if not s.flag(*keys):
        return "none"
    said = s.find(f"{keys[0].rpartition('.')[0]}.recompute_granularity")
    return "selective" if said == "selective" else "full"


def packed(s: FrameworkSettings, role: str = "actor") -> bool:
    """Whether micro-batches are packs of samples."""
    return s.flag(f"{MODELS[role]}.sequence_packing.enabled", default=role == "actor")


def _micro_batch(s: FrameworkSettings, read: Fields, role: str) -> dict[str, int | None]:
    """Sequences of a micro-batch, or tokens of a GPU: limits are of the cp ranks of a sequence together."""
    model = MODELS[role]
    size = max(
        1, s.whole(*dict.fromkeys(f"{m}.train_micro_batch_size" for m in (model, "policy")), default=4)
    )
    packing = packed(s, role)
    if not (packing or s.flag(f"{model}.dynamic_batching.enabled")):
        if not read["rollout"]:
            return {"micro_batch": sequences_of(read["workload.algorithm"]) * size}
        scored = max(1, s.whole(f"{model}.logprob_batch_size", default=size))
        return {"micro_batch": size, "score_micro_batch": scored}
    name = f"{model}.{'sequence_packing' if packing else 'dynamic_batching'}"
    scored = s.whole(f"{model}.logprob_batch_size", default=size) * read["limit.total"]
    limits = {
        "pack_tokens": s.whole(f"{name}.train_mb_tokens", default=size * read["limit.total"]),
        "score_pack_tokens": s.whole(f"{name}.logprob_mb_tokens", default=scored),
    }
    return {field: max(1, math.ceil(tokens / read[f"{role}.cp"])) for field, tokens in limits.items()}


def layout_of(s: FrameworkSettings, read: Fields, role: str) -> Layout:
    """The layout of the policy or the value model; what the other engine is told is void."""
    megatron, model = read["backend"] == "megatron", MODELS[role]
    if s.flag(f"{model}.{ENGINES['megatron']}.enabled", default=megatron) is not megatron:
        raise RlhfsimError(
            "backends-differ",
            f"{model}.{ENGINES['megatron']}.enabled is not the policy's: a plan has one training backend",
            help=f"--set {model}.{ENGINES['megatron']}.enabled={str(megatron).lower()}",
        )
    s.overruled(*(f"{model}.{engine}." for backend, engine in ENGINES.items() if backend != read["backend"]))
    changes: dict[str, Any] = {"zero": 1 if megatron else 3, **_micro_batch(s, read, role)}
    if not megatron:
        changes["offload_params"] = read[f"{role}.{_hosted(role)}"]
    else:
        stages = s.count(f"{model}.{ENGINES['megatron']}.virtual_pipeline_model_parallel_size") or 1
        changes["vp"] = stages if read[f"{role}.pp"] > 1 else 1
    if read[f"{role}.offload_fraction"] == 0:
        changes |= {"offload_optimizer": "none", "offload_fraction": 1.0}
    return cut(read, read["actor.gpus"], role=role, **changes)


def _call(role: str) -> str:
    """The call whose prediction is the reason for a role's layout."""
    return f"{role}.{'logprob' if role == 'reference' else 'train'}"


def _hosted(role: str) -> str:
    """Field of a layout that DTensor's `cpu_offload` says: a teacher has no optimizer."""
    return "offload_params" if role == "reference" else "offload_optimizer"


def _of(role: str) -> Callable[[Plan], RolePlacement]:
    return lambda plan: plan.placement.trainers[role]


def software(s: FrameworkSettings, read: Fields) -> Software | None:
    """Log-probs in chunks of the sequence, or of the first DTensor worker; None: as `runs` has it."""
    backend: Backend = read["backend"]
    first = backend == "fsdp2" and not s.flag("policy.dtensor_cfg._v2", default=True)
    chunked = f"{backend}_chunked" if s.find("policy.logprob_chunk_size") else ""
    head = heads_of("nemo-rl").get("first_worker" if first else chunked)
    return None if head is None else replace(default_software(backend), head=head)


def adapters(backend: str, group: str) -> tuple[Key | FixedKey, ...]:
    """Keys of LoRA with one of the engines."""
    return given_that(
        f"backend={backend}",
        Key("adapters", f"{group}.enabled", codec=flag()),
        Key("workload.lora.rank", f"{group}.dim", 8, when="adapters"),
        Key("alpha", f"{group}.alpha", read=False),
    )


def splits(role: str) -> Callable[[Plan], bool]:
    """Whether tensor parallelism cuts sequences of a role too; distillation on DTensor refuses that where it
    packs (algorithms/distillation.py, line 270)."""

    def cuts(plan: Plan) -> bool:
        found = plan.placement.role(role)
        if found is None or refuses_split(plan, found):
            return False
        return found.layout.sequence_parallel and found.layout.tp > 1

    return cuts


def engine(role: str) -> tuple[Key | FixedKey, ...]:
    """How the policy or the value model is cut, what it keeps, its micro-batches."""
    model, placed, policy = MODELS[role], _of(role), role == "actor"
    held = of_held(_call(role), role)
    megatron, dtensor = (f"{model}.{ENGINES[backend]}" for backend in ("megatron", "fsdp2"))
    packing, batching = f"{model}.sequence_packing", f"{model}.dynamic_batching"
    scores = role == "reference"
    rows = (
        Key("backend", f"{megatron}.enabled", codec=flag("megatron", "fsdp2", both=True), read=policy),
        Key("backend", f"{dtensor}.enabled", codec=flag("fsdp2", "megatron", both=True), read=False),
        *(row for row in (*_megatron(role), *_dtensor(role)) if not (scores and _trains(row))),
        FixedKey(
            f"{packing}.enabled",
            lambda plan: (
                not plan.workload.paired and (plan.workload.packing or bool(placed(plan).layout.pack_tokens))
            ),
        ),
        FixedKey(f"{batching}.enabled", False, "rollout"),
        FixedKey(
            f"{model}.train_micro_batch_size",
            samples_at_once,
            "!rollout",
            lambda plan: f"{'pairs. ' if plan.workload.paired else ''}{held(plan)}",
        ),
        Key(
            f"{role}.score_micro_batch" if scores else f"{role}.micro_batch",
            f"{model}.train_micro_batch_size",
            when="rollout",
            why=held,
            read=False,
        ),
        *(
            [Key("scored.micro_batch", f"{model}.logprob_batch_size", when="rollout", read=False)]
            if policy
            else [Key(f"{role}.score_micro_batch", f"++{model}.logprob_batch_size", read=False)]
        ),
        Key(
            f"{role}.{'score_packs' if scores else 'packs'}",
            f"{packing}.train_mb_tokens",
            why="of all CP ranks",
            read=False,
        ),
        Key(f"{role}.score_packs", f"{packing}.logprob_mb_tokens", when="rollout", read=False),
    )
    return rows if policy or scores else given_that("critic", *rows)


def _trains(row: Key | FixedKey) -> bool:
    """Whether a row matters only where gradients are."""
    named = row.field if isinstance(row, Key) else row.key
    return named.endswith(
        ("recompute", "recompute_granularity", ".offload_optimizer", "fraction", "gradients")
    )


def _megatron(role: str) -> tuple[Key | FixedKey, ...]:
    """Rows of Megatron-Core."""
    megatron = f"{MODELS[role]}.{ENGINES['megatron']}"
    sums = f"{megatron}.distributed_data_parallel_config.grad_reduce_in_fp32"
    train, held, policy = of_call(_call(role)), of_held(_call(role), role), role == "actor"
    experts = (("", "!loop=rm"), ("++", "loop=rm")) if policy else (("", ""),)  # rm.yaml has neither
    return given_that(
        "backend=megatron",
        Key(f"{role}.tp", f"{megatron}.tensor_model_parallel_size", 1, whole(1), why=train),
        Key(f"{role}.pp", f"{megatron}.pipeline_model_parallel_size", 1, whole(1)),
        Key(f"{role}.cp", f"{megatron}.context_parallel_size", 1, whole(1)),
        *(
            Key(f"{role}.{field}", f"{sign}{megatron}.expert_{kind}_parallel_size", 1, codec, when=when)
            for sign, when in experts
            for field, kind, codec in (("ep", "model", whole(1)), ("etp", "tensor", count()))
        ),
        Key(f"{role}.sequence_parallel", f"{megatron}.sequence_parallel", codec=flag(both=True)),
        *in_megatron(role, f"++{megatron}."),
        FixedKey(f"++{megatron}.recompute_granularity", "selective", f"{role}.recompute=selective"),
        *hosted_adam(role, f"{megatron}.optimizer."),
        Key(
            f"{role}.recompute",
            f"{megatron}.activation_checkpointing",
            codec=Codec(lambda kind: kind != "none", _recomputed),
            why=held,
        ),
        Key("workload.gradients", sums, codec=flag("backend", "bf16", "fp32", both=True), read=policy),
    )


def _dtensor(role: str) -> tuple[Key | FixedKey, ...]:
    """Rows of FSDP2."""
    dtensor = f"{MODELS[role]}.{ENGINES['fsdp2']}"
    train, held = of_call(_call(role)), of_held(_call(role), role)
    return given_that(
        "backend=fsdp2",
        Key(f"{role}.tp", f"{dtensor}.tensor_parallel_size", 1, whole(1), why=train),
        Key(f"{role}.cp", f"{dtensor}.context_parallel_size", 1, whole(1)),
        Key(f"{role}.sequence_parallel", f"{dtensor}.sequence_parallel", codec=flag(both=True)),
        Key(f"{role}.ep", f"++{dtensor}.expert_parallel_size", 1, whole(1), quiet=True),
        Key(f"{role}.{_hosted(role)}", f"{dtensor}.cpu_offload", codec=flag("cpu", "none", both=True)),
        Key(
            f"{role}.recompute",
            f"{dtensor}.activation_checkpointing",
            codec=flag("full", "none", "selective", both=True),
            why=held,
        ),
    )


def packs(role: str, *, scoring: bool) -> Callable[[Plan], int | None]:
    """Tokens of a pack on all ranks of a sequence."""

    def tokens(plan: Plan) -> int | None:
        placed = plan.placement.role(role)
        if placed is None or not placed.layout.pack_tokens:
            return None
        return placed.layout.pack(scoring=scoring)

    return tokens
