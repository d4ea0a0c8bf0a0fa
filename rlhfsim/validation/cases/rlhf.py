"""A row of rlhf.csv as the inputs of a priced step: workload, placement, models and cluster.

Layouts, lengths and batch come from the row or from assumptions.yaml; a row that leaves open what
decides the time is incomplete and not predicted. Response lengths are log-normal, cut at the
longest response, with the published mean after the cut.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import cast, get_args

from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Recompute, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, cut_log_normal
from rlhfsim.specs.workload.workload import Algorithm, Reward, Rules, Workload
from rlhfsim.step.calls import Setting
from rlhfsim.training.packing import Packs
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row, missing

COMPLETE = ("gpus", "gpu_type", "gen_tp", "train_backend")
"""Cells that every predicted row has, besides batch, lengths and layout (see `reason_incomplete`)."""
MAX_SEQUENCES = 10_000_000
SHARED, TRAIN, ROLLOUT = "all", "train", "rollout"


def setting_of(row: Row) -> Setting:
    """The inputs of a filled row.

    Raises:
        RlhfsimError: the row is incomplete, or names a model, device or layout that is not known here.
    """
    reason = reason_incomplete(row)
    if reason:
        raise Skip(reason)
    workload = workload_of(row)
    return Setting(
        models=models_of(workload),
        placement=placement_of(row, workload),
        workload=workload,
        cluster=_cluster(_whole(row, "gpus"), row.text("gpu_type") or ""),
        packs=_packs(row),
        train_precision="fp8" if row.text("precision_train") == "fp8" else "bf16",
    )


@lru_cache(maxsize=256)
def _cluster(gpus: int, gpu: str) -> Cluster:
    return parse_cluster(gpus, gpu)


def reason_incomplete(row: Row) -> str | None:
    """What is not published and not filled, or None for a complete row."""
    named = " ".join((row.text("actor_model") or "").split()[:2])
    if not row.text("actor_model") or named == "see issue":
        return "model not published"
    if row.text("mean_total_seq_len") is None and missing(row, ("mean_response_len", "mean_prompt_len")):
        return "mean lengths not published"
    if not 0 < num_sequences(row) <= MAX_SEQUENCES:
        return "batch not published" if not num_sequences(row) else "batch above ten million"
    blank = missing(row, COMPLETE)
    if blank:
        return f"{blank[0]} not published"
    if backend_of(row) == "megatron" and missing(row, ("train_tp", "train_pp")):
        return "training layout not published"
    if separate(row) and missing(row, ("gpus_train", "gpus_gen")):
        return "GPU split not published"
    return None


# --- what is computed -----------------------------------------------------------------------------


def num_sequences(row: Row) -> int:
    """Sequences of one step, 0 when not published."""
    prompts, samples = row.integer("prompts_per_step"), row.integer("samples_per_prompt")
    return row.integer("sequences_per_step") or (prompts or 0) * (samples or 0)


def workload_of(row: Row) -> Workload:
    """The step that a row describes."""
    total = num_sequences(row)
    samples = min(row.integer("samples_per_prompt") or 1, total)
    total -= total % samples
    prompt, response = lengths_of(row)
    return Workload(
        algorithm=_algorithm(row),
        model=row.text("model_config_key") or row.text("actor_model") or "",
        critic=row.text("critic_model") or "same",
        reward=_reward(row),
        prompts=total // samples,
        samples=samples,
        prompt_len=prompt,
        response_len=response,
        mini_batches=_mini_batches(row, total),
        packing=row.text("packing") != "no",
        kl=row.text("kl") != "no",
        old_logprobs="rollout" if row.text("old_logprobs") == "rollout" else "recompute",
        rollout_precision="fp8" if row.text("precision_gen") == "fp8" else "bf16",
    )


def _algorithm(row: Row) -> Algorithm:
    text = (row.text("algorithm") or "").lower()
    if text.startswith("ppo"):
        return "ppo"
    if text.startswith(("grpo", "dapo")):
        return "grpo"
    raise Skip(f"algorithm {row.text('algorithm')} is not priced")


def _reward(row: Row) -> Reward:
    """The reward model of the row; without one, rules (their time hides behind the other calls)."""
    model = row.text("reward_model")
    return Reward(model=model) if model else Reward(model=None, rules=Rules())


def _mini_batches(row: Row, total: int) -> int:
    """Optimizer steps per epoch: as stated, or sequences of the step over the training batch."""
    batch = row.integer("train_global_batch")
    steps = min(total, row.integer("mini_batches") or (round(total / batch) if batch else 1) or 1)
    while total % steps:
        steps -= 1
    return steps


def lengths_of(row: Row) -> tuple[AnyLengths, AnyLengths]:
    """Prompt and response lengths with the published means."""
    prompt = row.number("mean_prompt_len")
    total = row.number("mean_total_seq_len")
    response = row.number("mean_response_len")
    if prompt is None:
        prompt = 1.0 if total is None or response is None else max(1.0, total - response)
    if response is None:
        assert total is not None
        response = total - prompt
    if response < 1:
        raise Skip("mean response length below one token")
    longest = row.number("max_response_len")
    return Fixed(value=prompt), cut_log_normal(response, longest)


# --- where it runs --------------------------------------------------------------------------------


def backend_of(row: Row) -> Backend:
    """The training backend by the name the source uses."""
    text = f"{row.text('train_backend') or ''}".lower()
    if "megatron" in text:
        return "megatron"
    if "fsdp" in text:
        return "fsdp2"
    if "zero" in text or "deepspeed" in text:
        return "deepspeed"
    raise Skip(f"training backend {row.text('train_backend')} is not priced")


def staleness_of(row: Row) -> float:
    """Most policy versions between generation and training: the number in `1-step Off`."""
    found = re.match(r"\d+(\.\d+)?", row.text("staleness") or "")
    return float(found[0]) if found else 0.0


def separate(row: Row) -> bool:
    """Whether rollout and training have GPUs of their own."""
    return staleness_of(row) > 0 or row.text("gpus_gen") is not None


def placement_of(row: Row, workload: Workload) -> Placement:
    """Pools, roles and schedule of a row.

    verl and NeMo-RL keep reference weights on the host between its calls and put the engine of a
    shared pool to sleep; DeepSpeed-Chat's hybrid engine does neither.
    """
    gpus, apart = _whole(row, "gpus"), separate(row)
    training = _whole(row, "gpus_train") if apart else gpus
    generating = _whole(row, "gpus_gen") if apart else gpus
    if min(training, generating) < 1 or (apart and training + generating > gpus):
        raise Skip(f"{training} and {generating} GPUs do not split {gpus}")
    layout = _layout(row, training)
    offload = row.text("optimizer_offload") == "yes"
    pool = TRAIN if apart else SHARED
    pools = (
        (ResourcePool(name=TRAIN, gpus=training), ResourcePool(name=ROLLOUT, start=training, gpus=generating))
        if apart
        else (ResourcePool(name=SHARED, gpus=gpus),)
    )
    swapped = backend_of(row) != "deepspeed"
    scoring = RolePlacement(pool=pool, layout=layout, residency="offloaded" if swapped else "resident")
    away = not apart and row.text("actor_offload") == "yes"
    actor = RolePlacement(
        pool=pool, layout=layout, offload_between=offload, residency="offloaded" if away else "resident"
    )
    return Placement(
        pools=pools,
        actor=actor,
        rollout=_rollout(row, generating, ROLLOUT if apart else SHARED),
        critic=actor if workload.has_critic else None,
        reference=scoring if workload.has_reference else None,
        reward=scoring if workload.has_reward_model else None,
        weight_path=_path(row, apart),
        schedule=Schedule(staleness=staleness_of(row), partial_rollout=row.text("partial_rollout") == "yes"),
        backend=backend_of(row),
    )


def _rollout(row: Row, gpus: int, pool: str) -> RolloutPlacement:
    tp, pp = row.integer("gen_tp") or 1, row.integer("gen_pp") or 1
    if gpus % (tp * pp):
        raise Skip(f"rollout layout TP{tp} PP{pp} does not fill {gpus} GPUs")
    layout = RolloutLayout(tp=tp, pp=pp, dp=gpus // (tp * pp))
    utilization, seqs = row.number("gpu_memory_utilization"), row.integer("max_num_seqs")
    layout = replace(
        layout,
        memory_utilization=utilization or layout.memory_utilization,
        max_num_seqs=seqs or layout.max_num_seqs,
        max_batched_tokens=row.integer("max_batched_tokens") or layout.max_batched_tokens,
        cuda_graphs=row.text("cuda_graphs") != "no",
        precision="fp8" if row.text("precision_gen") == "fp8" else "bf16",
    )
    sleeps = pool == SHARED and backend_of(row) != "deepspeed"
    return RolloutPlacement(pool=pool, layout=layout, sleep=2 if sleeps else 0)


def _layout(row: Row, gpus: int) -> Layout:
    backend = backend_of(row)
    tp, pp = row.integer("train_tp") or 1, row.integer("train_pp") or 1
    cp, ep = row.integer("train_cp") or 1, row.integer("train_ep") or 1
    if gpus % (tp * pp * cp):
        raise Skip(f"training layout TP{tp} PP{pp} CP{cp} does not fill {gpus} GPUs")
    zero = row.integer("zero_stage")
    default = 1 if backend == "megatron" else 3
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=gpus // (tp * pp * cp),
        zero=default if zero is None else zero,
        micro_batch=row.integer("micro_batch") or 1,
        recompute=_recompute(row),
    )


def _packs(row: Row) -> Packs | None:
    """Limits of packs; scoring forwards may take several training packs at once."""
    tokens = row.number("pack_tokens")
    if tokens is None:
        return None
    return Packs(train=tokens, forward=row.number("logprob_pack_tokens") or tokens)


def _recompute(row: Row) -> Recompute:
    text = row.text("recompute") or "full"
    if text not in get_args(Recompute):
        raise Skip(f"recompute {text} is not priced")
    return cast(Recompute, text)


def _path(row: Row, apart: bool) -> WeightPath:
    stated = row.text("weight_path")
    if stated is None:
        return "broadcast" if apart else "ipc"
    for path in get_args(WeightPath):
        if path == stated:
            return cast(WeightPath, path)
    raise Skip(f"weight path {stated} is not priced")


def _whole(row: Row, column: str) -> int:
    value = row.integer(column)
    assert value is not None, f"{column} was checked"
    return value
