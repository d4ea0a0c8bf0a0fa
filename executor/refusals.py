"""What a plan can ask that the executor does not run: refused by name before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.algorithms import recipes
from executor.engines.fsdp2.config import check as check_fsdp2
from executor.engines.transformers.native import is_causal, is_native
from executor.environments.process import EnvironmentProcess
from executor.ranks import by_node, replica_places, rollouts
from executor.resolve import Job, engine_specs, has_weights, model_config
from executor.tasks.text import Text, tokenizer_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.refusal import check_kind
from rlhfsim.specs.frameworks.runs import OWN, framework, runs_of
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.config import read_config
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS

SPLIT = "max_split_size_mb:512,garbage_collection_threshold:0.8"
"""PYTORCH_ALLOC_CONF that holds fragmentation down where memory is handed over by IPC."""
SAME_PARAMS = 0.05
"""Relative difference in parameters up to which a folder counts as the planned model."""
_SHAPE: Mapping[str, Callable[[ModelSpec], int]] = {
    "layers": lambda model: model.num_layers,
    "of hidden size": lambda model: model.hidden,
    "attention heads": lambda model: model.attention.num_heads,
    "key-value heads": lambda model: model.attention.num_kv_heads,
}


def check(job: Job) -> None:
    """Refuse what cannot run.

    Raises:
        RlhfsimError: the first reason, with what to change.
    """
    recipes.check(job.plan.workload, job.settings, staleness=job.plan.placement.schedule.staleness)
    for code, message, remedy in _reasons(job):
        raise RlhfsimError(code, message, help=remedy)
    for spec in engine_specs(job).values():
        for one in spec.each if spec.backend == "fsdp2" else ():
            check_fsdp2(one)


def check_model(folder: str) -> None:
    """A folder with config, weights and tokenizer.

    Raises:
        RlhfsimError: one is missing, or the model comes with code of its own that transformers does not have.
    """
    config = model_config(folder)
    if config.get("auto_map") and not is_native(str(config.get("model_type"))):
        raise RlhfsimError(
            "model-needs-its-code",
            f"{folder!r} comes with its own code (auto_map) for the type {config.get('model_type')!r}, which "
            "transformers does not have: code of a model is never run",
            help="take a model whose type transformers has, or convert it to one",
        )
    if config.get("vision_config"):
        check_kind(read_config(Source(folder, "", config), folder), framework(OWN), generates=False)
    if not is_causal(str(config.get("model_type"))):
        raise RlhfsimError(
            "model-not-causal",
            f"{folder!r} holds a {config.get('model_type')}, which transformers does not load as a causal "
            "language model of text",
            help="take a language model, or save the one inside as a model of its own",
        )
    if not has_weights(folder):
        raise RlhfsimError(
            "no-weights",
            f"{folder!r} has no weights (*.safetensors)",
            help="download or convert the model first; the executor loads nothing from a hub",
        )
    tokenizer_of(folder)


def check_length(job: Job, config: Mapping[str, Any]) -> None:
    """Prompt and response fit into the positions of a model's `config`.

    Raises:
        RlhfsimError: they do not.
    """
    limit = config.get("max_position_embeddings")
    if limit is not None and job.max_prompt + job.max_tokens > limit:
        raise RlhfsimError(
            "too-long-for-model",
            f"prompts of up to {job.max_prompt} and responses of up to {job.max_tokens} tokens exceed "
            f"the model's {limit} positions",
            help="lower sampling.max_tokens or leave out long prompts",
        )


def check_rewards(job: Job) -> None:
    """Nothing that was set for rewards is without use, and a reward model has learnt what it scores.

    Raises:
        RlhfsimError: settings that the plan has no use for; a reward model without a trained head, or with
            other tokens than the policy's.
    """
    for code, message, remedy in _unused(job):
        raise RlhfsimError(code, message, help=remedy)
    if not job.plan.workload.has_reward_model or job.fakes is not None:
        return
    from executor.engines.transformers.heads import HEAD_NAMES, has_head

    folder = job.settings.reward_model or job.model
    if job.settings.reward_head == "trained" and not has_head(folder):
        raise RlhfsimError(
            "reward-model-untrained",
            f"the plan has a reward model, but {folder} holds no scalar head ({', '.join(HEAD_NAMES)})",
            help="name the folder of a trained one with reward_model, plan with rules alone "
            "(reward: {rules: {}}), or set reward_head: drawn to try it with noise",
        )
    _check_tokens(job, "reward model", folder)


def check_reference(job: Job) -> None:
    """What is distilled has a teacher, and a reference reads the policy's tokens.

    Raises:
        RlhfsimError: a teacher is not named, or a reference has other tokens.
    """
    if job.fakes is not None:
        return
    workload, folders = job.plan.workload, [f for f in job.settings.references if f is not None]
    planned = workload.references
    if folders and len(folders) != len(planned):
        raise RlhfsimError(
            "teachers-differ",
            f"the plan has {len(planned)} references ({', '.join(planned)}), "
            f"reference_model names {len(folders)}",
            help="name as many folders, in the plan's order, with commas between them",
        )
    if not folders and workload.distils and workload.reference != "same":
        raise RlhfsimError(
            "teacher-missing",
            f"the plan's teacher is {workload.reference}, but the settings name no reference_model",
            help="set reference_model to the teacher's folder",
        )
    for folder in folders:
        _check_tokens(job, "reference", folder)


def _check_tokens(job: Job, what: str, folder: str) -> None:
    if folder != job.model and (mine := Text(job.model).vocabulary()) != (its := Text(folder).vocabulary()):
        raise RlhfsimError(
            f"{what.replace(' ', '-')}-tokens",
            f"the {what} in {folder} has other tokens than the policy in {job.model} "
            f"({len(its):,} and {len(mine):,}): it would read noise",
            help=f"use a {what} of the policy's family: ids go to it as they are",
        )


def check_environment(job: Job) -> None:
    """The plan's environment is said, and can be made.

    Raises:
        RlhfsimError: it is not, or the settings have one that the plan does not know of.
    """
    settings, planned = job.settings.environment, job.plan.workload.environment
    if planned is not None and settings is None and job.fakes is None:
        raise RlhfsimError(
            "environment-missing",
            "the plan's workload has an environment, but the settings do not say which",
            help="set environment.kind: python, search, guess or module:Class",
        )
    if settings is not None and planned is None:
        raise RlhfsimError(
            "environment-unused",
            f"the settings have the environment {settings.kind}, but the plan's workload has none",
            help="leave environment out, or plan with one: rlhfsim design --environment turns=4",
        )
    if settings is not None:
        EnvironmentProcess(settings).close()


def _unused(job: Job) -> Iterator[tuple[str, str, str]]:
    settings, workload = job.settings, job.plan.workload
    scored = workload.generates and (workload.reward.rules is not None or settings.evaluation.problems > 0)
    if settings.rewards and not scored:
        if workload.generates:
            found = "the plan scores with a reward model alone"
            remedy = "plan with both (reward: {model: ..., rules: {}}) or leave rewards out"
        else:
            found, remedy = f"{workload.algorithm} learns from the data alone", "leave rewards out"
        yield "rewards-unused", f"the settings have rewards, but {found}", remedy
    for key, there in (
        ("reward", workload.has_reward_model),
        ("critic", workload.has_critic),
        ("reference", workload.has_reference and not workload.base_is_reference),
    ):
        if getattr(settings, f"{key}_model") and not there:
            yield (
                f"{key}-model-unused",
                f"the settings name a {key}_model, but the plan has no {key}",
                f"leave {key}_model out, or plan with one",
            )


def check_shape(job: Job, config: Mapping[str, Any]) -> None:
    """The folder holds the model that was planned, as `config` says.

    Raises:
        RlhfsimError: another one: layouts, memory and times of the plan would be wrong.
    """
    found = read_config(Source(job.model, "", config), job.model)
    if job.plan.workload.algorithm == "reward_model":
        found = found.with_value_head()
    planned = next(model for model in job.plan.models if model.role == "actor")
    differing = []  # a vocabulary that was padded or grew by a few tokens does not differ
    with suppress(RlhfsimError):  # a file that is not on this machine
        spec = resolve_model(planned.path)
        for what, value in _SHAPE.items():
            if (here := value(found)) != (there := value(spec)):
                differing.append(f"{here:,} {what}, planned {there:,}")
    if abs(found.num_params / planned.params - 1) > SAME_PARAMS:
        differing.append(f"{found.num_params:,.0f} parameters, planned {planned.params:,.0f}")
    if differing:
        raise RlhfsimError(
            "other-model-than-planned",
            f"the plan is for {planned.name}, {job.model} holds another model: {'; '.join(differing)}",
            help=f"design again for it: --model {Path(job.model) / 'config.json'}",
        )


def check_family(job: Job, config: Mapping[str, Any]) -> None:
    """Engines run this kind of model; `config` is the policy's, the other roles are of its kind.

    Raises:
        RlhfsimError: a kind that the executor does not run or pipelines do not cut, or heads that tp does not
            divide.
    """
    model = read_config(Source(job.model, "", config), job.model)
    check_kind(model, framework(OWN), generates=job.plan.workload.generates)
    for role, placed in job.plan.placement.trainers.items():
        lacks = framework(OWN).lacks_model(placed.layout, model, config.get("model_type"))
        if lacks is not None:
            message = f"{role}: the plan asks for {lacks.what}, which the executor does not run"
            raise RlhfsimError(lacks.code, message, help=lacks.remedy)


def _reasons(job: Job) -> Iterator[tuple[str, str, str]]:
    plan = job.plan
    lacking = framework(OWN).lacks(
        plan.placement,
        plan.workload,
        plan.topology,
        one_node=plan.replicas_in_one_node,
        vendors=set(_vendors(plan)),
    )
    other = None if plan.framework == OWN else runs_of(plan.framework)
    export = (
        other and f"it is {other.title}'s plan: rlhfsim export --to {other.name}, or design --framework {OWN}"
    )
    for lacks in lacking:
        message = f"the plan asks for {lacks.what}, which the executor does not run"
        yield lacks.code, message, export or lacks.remedy
    ranks, pool = len(plan.gpus_of("actor")), plan.placement.pool(plan.placement.actor.pool)
    if plan.placement.schedule.lend and ranks < pool.gpus:
        yield (
            "lend-idle-gpus",
            f"the trainer lends {pool.gpus} GPUs and trains on {ranks} of them: on the others nobody has the "
            "weights that an engine wakes with",
            f"give pool {pool.name!r} {ranks} GPUs, or leave lend out",
        )
    for engines in rollouts(plan):
        yield from _rollout_reasons(job, engines)
    if job.settings.checkpoints.background and plan.placement.backend == "fsdp2":
        yield (
            "checkpoint-background",
            "checkpoints.background: true does not run with FSDP2: torch's distributed checkpoint goes on "
            "with collectives while it writes, which would meet those of the next step",
            "leave checkpoints.background out, or design with --backend deepspeed",
        )
    if plan.workload.generates and plan.placement.weight_path == "lora" and plan.workload.lora is None:
        yield (
            "lora-path-without-lora",
            "weight path lora moves adapters, but the policy trains all weights",
            "set workload.lora or another weight path",
        )
    if not job.gpu:
        yield from _needs_gpus(plan)


def _rollout_reasons(job: Job, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """What one pool cannot run of its rollout engine."""
    spread = [len(here) for places in replica_places(plan) for here in by_node(places)]
    if not plan.replicas_in_one_node and len(set(spread)) > 1:
        yield (
            "rollout-replica-uneven",
            f"a rollout replica has {max(spread)} GPUs on one node and {min(spread)} on another",
            "start its pool at a whole node, and fill nodes",
        )
    variables = os.environ | job.settings.variables
    allocator = " ".join(value for name, value in variables.items() if name.endswith("ALLOC_CONF"))
    transport = WEIGHT_PATHS[plan.placement.weight_path].transports.get(plan.topology)
    if job.gpu and transport == "ipc" and "expandable_segments:true" in allocator.lower().replace(" ", ""):
        yield (
            "expandable-segments-ipc",
            f"weight path {plan.placement.weight_path} hands memory over by CUDA IPC, and PYTORCH_ALLOC_CONF "
            f"is {allocator}: expandable segments have no handle for another process in a container",
            f"leave expandable_segments out, as in PYTORCH_ALLOC_CONF={SPLIT}",
        )


def _vendors(plan: Plan) -> Iterator[str]:
    for planned in plan.hardware:
        with suppress(RlhfsimError):  # a profile of the machine where the plan was made
            yield load_profile(planned.profile).vendor


def _needs_gpus(plan: Plan) -> Iterator[tuple[str, str, str]]:
    if (rollout := plan.placement.rollout) is not None:
        if rollout.layout.pp > 1:
            yield (
                "rollout-pp-on-cpu",
                "vLLM's CPU build has no pipeline parallelism here",
                "use rollout tp and dp",
            )
        if rollout.layout.precision == "fp8":
            yield ("fp8-on-cpu", "FP8 rollout needs a GPU", "set rollout precision to bf16")
    if plan.workload.optimizer == "adam8bit":
        yield ("adam8bit-on-cpu", "8-bit Adam needs a GPU", "set workload.optimizer: adam")
