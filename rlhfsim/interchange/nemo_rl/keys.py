"""NeMo-RL's keys: one row each, written from a plan and read (NVIDIA-NeMo/RL at 7ea279a).

Keys and defaults: examples/configs/grpo_math_1B.yaml, on which the recipes build; of given data
dpo.yaml, sft.yaml and rm.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, cast

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RoleDescription
from rlhfsim.interchange.configuration.engines import dynamic_sampling, speculation
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Value
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of, samples_of
from rlhfsim.interchange.nemo_rl.cluster import GEN, cluster_of, resources, rollout_gpus
from rlhfsim.interchange.nemo_rl.engines import (
    MODELS,
    adapters,
    engine,
    layout_of,
    packed,
    packs,
    software,
    splits,
)
from rlhfsim.interchange.nemo_rl.unsaid import TOP_K, alike
from rlhfsim.interchange.predictions import predicted
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import ABOVE_ZERO, Codec, FixedKey, Key, Row, Table, flag, given_that, lag
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Residency
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm

ESTIMATORS: dict[str, Algorithm] = {"grpo": "grpo", "reinforce_plus_plus": "reinforce++", "gdpo": "grpo"}
"""grpo.adv_estimator.name -> algorithm here."""
LOSS = "loss_fn"
ENGINE, VLLM, KWARGS = f"{GEN}.backend", f"{GEN}.vllm_cfg", f"{GEN}.vllm_kwargs"
PENALTY = f"{LOSS}.reference_policy_kl_penalty"
TEACHER, TOP = "teacher.model_name", "distillation.topk_logits_k"
ASYNC_ENGINE, CORRECTION = f"{VLLM}.async_engine", f"{LOSS}.use_importance_sampling_correction"
BY_RESPONSE = f"{LOSS}.sequence_level_importance_ratios"
TRANSPORT = f"{GEN}.refit_transport"
FORCED = f"{LOSS}.force_on_policy_ratio"
ENDS = tuple(f"{VLLM}.num_{end}_layers_in_bf16" for end in ("first", "last"))
TRAINS_DRAFT = "policy.draft.enabled"
DRAFTS, ESTIMATOR = f"{KWARGS}.speculative_config", "grpo.adv_estimator.name"
FILTERS, MULTIPLIER = "grpo.use_dynamic_sampling", "grpo.batch_multiplier"
MOST_BATCHES = "grpo.dynamic_sampling_max_gen_batches"
GIVEN: dict[str, Algorithm] = {"dpo": "dpo", "sft": "sft", "rm": "reward_model"}
"""Loop of given data -> what it trains by."""
LOOPS = ("distillation", "ppo", *GIVEN)
STARTED = re.compile(r"\brun_(?:vlm_)?(distillation|ppo|dpo|sft|rm)\w*\.py")
"""A script that runs one of them."""
USUAL = {"dpo": (128, 1024), "sft": (32, 1024), "rm": (128, 8192)}
"""Loop -> samples of an optimizer step and tokens of a sequence where nothing is said."""
"""Algorithms with a script of their own."""
MARKS = (
    "grpo.num_",
    "dpo.",
    "distillation.num_",
    TOP,
    "teacher.megatron_cfg.",
    "teacher.dtensor_cfg.",
    "policy.megatron_cfg.",
    "policy.dtensor_cfg.",
    f"{GEN}.",
    "policy.train_global_batch_size",
    PENALTY,
)
"""Beginnings of keys that no other framework has."""


def loop_of(plan: Plan) -> str:
    """What begins its keys and names its script."""
    algorithm = plan.workload.algorithm
    given = next((loop for loop, trained in GIVEN.items() if trained == algorithm), None)
    return given or (algorithm if algorithm in LOOPS else "grpo")


def _loop(s: FrameworkSettings) -> str:
    started = STARTED.search(str(s.find(ENTRY_POINT)))
    return next((loop for loop in LOOPS if s.has(loop)), started[1] if started else "grpo")


# --- what no row can say -------------------------------------------------------------------------------


def _algorithm(s: FrameworkSettings, read: Fields) -> Algorithm:
    """The algorithm of the loop, of its estimator, and of what that subtracts and divides by."""
    if read["loop"] != "grpo":
        return GIVEN.get(read["loop"], cast(Algorithm, read["loop"]))
    found = ESTIMATORS.get(s.text(ESTIMATOR, default="grpo"), "grpo")
    if found == "grpo" and s.flag(BY_RESPONSE):
        return "gspo"
    if found != "grpo" or s.flag("grpo.normalize_rewards", default=True):
        return found
    return "rloo" if s.flag("grpo.use_leave_one_out_baseline", default=True) else "dr-grpo"


def _on_policy(s: FrameworkSettings, read: Fields) -> bool:
    """Whether the ratio is that of the training pass with itself, and no forward for old log-probs runs.

    nemo_rl/algorithms/grpo.py at 002cdc2: `seq_logprob_error_threshold` needs them all the same, and more
    than one update a step is refused.
    """
    forced, needed = s.flag(FORCED), s.find("grpo.seq_logprob_error_threshold")
    one_update = read["workload.prompts"] * read["workload.samples"] == read["update"]
    return forced and needed is None and one_update and (read["workload.epochs"] or 1) == 1


def _critic(s: FrameworkSettings) -> str | None:
    named = s.find("value.model_name")
    return None if named == s.find("policy.model_name") else named


def _dynamic_sampling(s: FrameworkSettings, read: Fields) -> DynamicSampling | None:
    prompts = read["workload.prompts"]
    if not s.flag(FILTERS):
        return None
    each = round(prompts * s.share(MULTIPLIER, default=1.0))
    most = s.whole(MOST_BATCHES, default=10)
    return dynamic_sampling(s, prompts, each, most)


def _data(s: FrameworkSettings, read: Fields, layout: Layout) -> dict[str, Any]:
    """Given data: batches and micro-batches count samples or pairs, each step is one update."""
    model, limit = s.model("policy.model_name"), read["limit.total"]
    return {
        **fields_of(GIVEN[read["loop"]], model=model, samples=read["update"], limit=limit),
        "workload.packing": packed(s) or s.flag("policy.dynamic_batching.enabled"),
        "reference.residency": "swapped",
    }


def _teacher(s: FrameworkSettings, read: Fields, own: int) -> dict[str, Any]:
    """Distillation: a teacher of its own layout comes from the host for its call, while the states of the
    student's optimizer are there (`offload_before_refit` in algorithms/distillation.py)."""
    layout = layout_of(s, read, "reference")
    return {
        "workload.teacher": s.model(TEACHER),
        "kl": True,
        "workload.old_logprobs": "recompute",
        "workload.dynamic_sampling": None,
        "roles": {"reference": RoleDescription(layout=layout, residency="offloaded")},
        "actor.offload_between": bool(own) and layout_of(s, read, "actor").offload_params == "none",
    }


def _residency(layout: Layout, own: int) -> Residency:
    """A policy on the same GPUs as its rollout leaves them after every refit (`offload_after_refit`)."""
    return "resident" if own or layout.offload_params != "none" else "offloaded"


def _check_engine(s: FrameworkSettings) -> None:
    """Refuse another engine than vLLM (algorithms/grpo.py, 7ea279abf): its keys and memory are its own.

    Raises:
        RlhfsimError: Megatron, TensorRT-LLM, SGLang or Dynamo generate.
    """
    if (engine := s.find(ENGINE)) not in (None, "vllm"):
        raise RlhfsimError(
            "engine-not-read",
            f"{ENGINE} is {engine!r}, whose keys are not read",
            place=Place(file=s.name),
            help=f"--set {ENGINE}=vllm says what the same run is with vLLM",
        )


def _generations(s: FrameworkSettings, read: Fields, layout: Layout) -> dict[str, Any]:
    prompts, longest, ppo = read["workload.prompts"], read["limit.total"], read["loop"] == "ppo"
    response, own = min(longest, read["limit.response"]), rollout_gpus(s, read)
    fp8 = read["rollout.precision"] == "fp8"
    attention = str(s.find(f"{VLLM}.quantization_ignored_layer_kws") or "")
    path = "p2p" if s.find(TRANSPORT) == "nixl" else "broadcast"
    value = layout_of(s, read, "critic") if ppo else None
    taught = _teacher(s, read, own) if read["loop"] == "distillation" else {}
    residency = _residency(layout, own)
    _check_engine(s)
    return {
        "workload.critic": _critic(s) if ppo else None,
        "workload.mini_batches": max(1, round(prompts * read["workload.samples"] / read["update"])),
        "workload.packing": packed(s) or s.flag("policy.dynamic_batching.enabled"),
        "workload.old_logprobs": "reused" if _on_policy(s, read) else "recompute",
        "workload.dynamic_sampling": _dynamic_sampling(s, read),
        "limit.prompt": max(1, longest - response) if response < longest else None,
        "limit.response": response,
        "limit.total": longest,
        "roles": {"critic": RoleDescription(layout=value, residency=_residency(value, own))} if value else {},
        "actor.residency": residency,
        "reference.residency": "offloaded" if residency == "offloaded" else "swapped",
        "rollout.gpus": own or read["actor.gpus"],
        "rollout.attention_dp": max(1, read["rollout.ep"] // read["rollout.tp"]),
        "rollout.bf16_layers": sum(s.whole(end, default=0) for end in ENDS) if fp8 else 0,
        "rollout.bf16_attention": fp8 and "o_proj" in attention,
        "rollout.speculation": speculation(s, DRAFTS, trained=s.flag(TRAINS_DRAFT)),
        "rollout.sleep": 0 if own else 1,
        "weight_path": path if own else "ipc",
        **taught,
    }


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    layout = layout_of(s, read, "actor")
    return {
        "workload.algorithm": _algorithm(s, read),
        "workload.model": s.model("policy.model_name"),
        "layout": layout,
        "actor.each": read["cluster.each"],
        "software": software(s, read),
        **(_generations if read["rollout"] else _data)(s, read, layout),
    }


# --- the rows -----------------------------------------------------------------------------------------------


def _kl(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> bool:
    return s.share(*keys, default=0.01) != 0


def _says_kl(value: float | None) -> Codec:
    return Codec(lambda kl: value if kl else 0.0, _kl)


def _multiplier(plan: Plan) -> float | None:
    sampling, prompts = plan.workload.dynamic_sampling, plan.workload.prompts
    return sampling.prompts_of(prompts) / prompts if sampling else None


def _generated(loop: str, prompts: int = 32, samples: int = 16) -> tuple[Row, ...]:
    return given_that(
        f"loop={loop}",
        Key("workload.prompts", f"{loop}.num_prompts_per_step", prompts),
        Key("workload.samples", f"{loop}.num_generations_per_prompt", samples),
    )


def _asynchronous(loop: str) -> tuple[Row, ...]:
    group = f"{loop}.async_{loop}"
    return given_that(
        f"loop={loop}",
        Key(
            "schedule.asynchronous",
            f"{group}.enabled",
            codec=flag(),
            why="the rollout never waits for an update",
        ),
        *(
            Key(field, f"{group}.{name}", usual, codec, when="schedule.asynchronous")
            for field, name, usual, codec in (
                ("schedule.staleness", "max_trajectory_age_steps", 1, lag()),
                ("schedule.partial_rollout", "in_flight_weight_updates", None, flag(both=True)),
            )
        ),
    )


def _where_it_runs(plan: Plan) -> str:
    return f"{'rollout included. ' if plan.workload.generates else ''}{predicted(plan)}"


def _first_and_last(last: int) -> Callable[[Plan], Value]:
    """Layers in BF16 at one end of the model."""

    def layers(plan: Plan) -> int | None:
        rollout = plan.placement.rollout
        kept = rollout.layout.bf16_layers if rollout else 0
        return (kept + last) // 2 if kept else None

    return layers


def _batched(asynchronous: int, usual: int) -> Callable[[Fields], int]:
    """A default that the asynchronous engine has otherwise."""
    return lambda read: asynchronous if read["async_engine"] else usual


def _divisor(plan: Plan) -> int:
    """Divisor of the padded length of samples, which TP and CP of student and teacher cut."""
    return math.lcm(*(2 * layout.tp * layout.cp for layout in _both(plan)))


def _both(plan: Plan) -> list[Layout]:
    both = plan.placement.actor, plan.placement.role("reference")
    return [role.layout for role in both if role is not None]


TABLE = Table(
    lambda: rows_of(
        "nemo-rl",
        {
            "ASYNC_ENGINE": ASYNC_ENGINE,
            "BY_RESPONSE": BY_RESPONSE,
            "CORRECTION": CORRECTION,
            "ESTIMATOR": ESTIMATOR,
            "FILTERS": FILTERS,
            "FORCED": FORCED,
            "MOST_BATCHES": MOST_BATCHES,
            "MULTIPLIER": MULTIPLIER,
            "PENALTY": PENALTY,
            "TEACHER": TEACHER,
            "TOP": TOP,
            "TRAINS_DRAFT": TRAINS_DRAFT,
            "above_zero": lambda plan: ABOVE_ZERO if plan.placement.role("reference") else "",
            "adapters": adapters,
            "asynchronous": _asynchronous,
            "batched": _batched,
            "counted": lambda plan: f"{'pairs' if plan.workload.paired else 'samples'} of one optimizer step",
            "divisor": _divisor,
            "ends": tuple(FixedKey(end, _first_and_last(last)) for last, end in enumerate(ENDS)),
            "engine": engine,
            "generated": _generated,
            "multiplier": _multiplier,
            "resources": resources,
            "says_kl": _says_kl,
            "usual": lambda at: lambda read: USUAL.get(read["loop"], (512, 512))[at],
            "where_it_runs": _where_it_runs,
        },
    ),
    _rest,
    {
        "loop": loop_of,
        "cluster.nodes": lambda plan: cluster_of(plan)[0],
        "cluster.each": lambda plan: cluster_of(plan)[1],
        "update": lambda plan: (
            plan.workload.num_sequences // plan.workload.mini_batches
            if plan.workload.generates
            else samples_of(plan)
        ),
        "reuses": lambda plan: (
            plan.workload.old_logprobs != "recompute"
            and plan.workload.one_update
            and not plan.workload.distils
        ),
        "workload.teacher_top": lambda plan: plan.workload.teacher_top or TOP_K,
        **{f"{role}.sequence_parallel": splits(role) for role in ("actor", "reference")},
        "adapters": lambda plan: plan.workload.lora is not None,
        "scored.micro_batch": lambda plan: plan.placement.actor.layout.sequences(scoring=not alike(plan)),
        **{
            f"{role}.{name}": packs(role, scoring=name != "packs")
            for role in MODELS
            for name in ("packs", "score_packs")
        },
    },
    {
        "loop": lambda s, read: _loop(s),
        "workload.algorithm": _algorithm,
        "rollout": lambda s, read: read["loop"] not in GIVEN,
        "shared": lambda s, read: True,
        "critic": lambda s, read: read["loop"] == "ppo",
        "actor.gpus": lambda s, read: read["cluster.nodes"] * read["cluster.each"] - rollout_gpus(s, read),
        "async_engine": lambda s, read: s.flag(ASYNC_ENGINE),
    },
)
