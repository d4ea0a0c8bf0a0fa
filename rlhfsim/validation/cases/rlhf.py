"""A row of rlhf.csv as what a user gives `rlhfsim estimate`: workload, placement and cluster.

Layouts, lengths and batch come from the row or from assumptions.yaml; a row that leaves open what
decides the time is incomplete and not predicted. Response lengths are log-normal, cut at the
longest response, with the published mean after the cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any, get_args

from rlhfsim.interchange.configuration.described import (
    Lengths,
    RoleDescription,
    RunDescription,
    RunSpecs,
    placement_of,
    rollout_layout,
    training_layout,
    workload_of,
)
from rlhfsim.interchange.verl import versions
from rlhfsim.specs.frameworks.costs import names
from rlhfsim.specs.frameworks.runs import runs_of
from rlhfsim.specs.frameworks.says import SleepLevel
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Recompute
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row, missing

COMPLETE = ("gpus", "gpu_type", "gen_tp", "train_backend")
"""Cells that every predicted row has, in addition to batch, lengths and layout (see `reason_incomplete`)."""
MAX_SEQUENCES = 10_000_000


def specs_of(row: Row) -> RunSpecs:
    """What a filled row asks `estimate`.

    Raises:
        RlhfsimError: the row is incomplete, or names a model, device or layout that is not known here.
    """
    row = with_defaults(row)
    reason = reason_incomplete(row)
    if reason:
        raise Skip(reason)
    run = description_of(row)
    workload = workload_of(run, lengths_of(row))
    return RunSpecs(
        workload=workload,
        placement=placement_of(run, workload),
        cluster=_cluster(
            _whole(row, "gpus"),
            row.words("gpu_type"),
            framework_of(row),
            row.text("vllm_engine") == "v0",
            row.text("racks") == "ignored",
        ),
    )


@lru_cache(maxsize=256)
def _cluster(gpus: int, gpu: str, framework: str | None, v0: bool, racks_ignored: bool) -> Cluster:
    """The cluster; engine V0 of vLLM has its own time of a sequence in a decode step, and over several racks
    whose borders placement ignores any two nodes are joined by the network."""
    cluster = replace(parse_cluster(gpus, gpu), framework=framework)
    nodes = cluster.node_group
    profile = nodes.profile
    if racks_ignored and gpus > profile.scale_up.domain:
        profile = replace(profile, scale_up=replace(profile.scale_up, domain=profile.node.gpus))
    if v0:
        known = profile.coefficients
        own = {"decode_sequence_overhead_vllm": known["decode_sequence_overhead_v0"]}
        profile = replace(profile, coefficients={**known, **own})
    return replace(cluster, node_groups=(replace(nodes, profile=profile),))


def framework_of(row: Row) -> str | None:
    """The framework whose software costs are known; None: pooled."""
    name = re.split(r"[\s_(]", row.framework.lower(), maxsplit=1)[0]
    return name if name in names() else None


def with_defaults(row: Row) -> Row:
    """A row of a named version of verl with that version's defaults in its blank cells."""
    version = re.match(r"verl v(\d[\d.]*)", row.framework)
    if version is None:
        return row
    known = {key: versions.default(key, version[1]) for key in versions.CHANGED}
    cells = {
        "cuda_graphs": "no" if known[versions.EAGER] else "yes",
        "packing": "yes" if known[versions.UNPADDED] else "no",
        "max_num_seqs": f"{known[versions.SEQUENCES]:g}",
        "gen_tp": "2",
        "gpu_memory_utilization": "0.5",
        "max_batched_tokens": "8192",
    }
    return row.filled({column: value for column, value in cells.items() if row.text(column) is None})


def reason_incomplete(row: Row) -> str | None:
    """What is not published and not filled, or None for a complete row."""
    named = " ".join(row.words("actor_model").split()[:2])
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


def _algorithm(row: Row) -> Algorithm:
    text = row.words("algorithm").lower()
    if text.startswith("ppo"):
        return "ppo"
    if text.startswith(("grpo", "dapo")):
        return "grpo"
    raise Skip(f"algorithm {row.text('algorithm')} is not priced")


def _dynamic_sampling(row: Row, prompts: int) -> DynamicSampling | None:
    """Whoever generates more prompts at a time than a step needs expects one batch to fill it."""
    each = row.integer("gen_prompts")
    return DynamicSampling(kept=prompts / each, gen_prompts=each) if each and each > prompts else None


def lengths_of(row: Row) -> Lengths:
    """Prompt and response lengths as published."""
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
    longest = row.number("longest_response_len") or row.number("max_response_len")
    return Lengths(prompt=prompt, response=response, longest=longest)


# --- where it runs --------------------------------------------------------------------------------


def backend_of(row: Row) -> Backend:
    """The training backend by the name the source uses."""
    text = row.words("train_backend").lower()
    if "megatron" in text:
        return "megatron"
    if "fsdp" in text:
        return "fsdp2"
    if "zero" in text or "deepspeed" in text:
        return "deepspeed"
    raise Skip(f"training backend {row.text('train_backend')} is not priced")


def staleness_of(row: Row) -> float:
    """Most policy versions between generation and training: the number in `1-step Off`."""
    number = re.match(r"\d+(\.\d+)?", row.words("staleness"))
    return float(number[0]) if number else 0.0


def separate(row: Row) -> bool:
    """Whether rollout and training have GPUs of their own."""
    return staleness_of(row) > 0 or row.text("gpus_gen") is not None


def description_of(row: Row) -> RunDescription:
    """What a row says about its run.

    verl and NeMo-RL keep reference weights on the host between its calls (NeMo-RL swaps them in place of
    the actor's; verl's FSDP fetches them layer by layer) and put the engine of a shared pool to sleep;
    DeepSpeed-Chat's hybrid engine does neither.
    """
    gpus, apart, backend = _whole(row, "gpus"), separate(row), backend_of(row)
    training, generating = (_whole(row, "gpus_train"), _whole(row, "gpus_gen")) if apart else (gpus, gpus)
    if min(training, generating) < 1 or (apart and training + generating > gpus):
        raise Skip(f"{training} and {generating} GPUs do not split {gpus}")
    sequences = num_sequences(row)
    samples = min(row.integer("samples_per_prompt") or 1, sequences)
    batch, zero = row.integer("train_global_batch"), row.integer("zero_stage")
    sleeps, leaves = backend != "deepspeed", not apart and row.text("actor_offload") == "yes"
    in_place = framework_of(row) == "nemo-rl" and not leaves
    degrees = {degree: row.integer(f"train_{degree}") or 1 for degree in ("tp", "pp", "cp", "ep")}
    path = _stated(row, "weight_path", get_args(WeightPath)) or _weight_path(row, apart)
    limits: dict[str, Any] = {name: row.integer(name) for name in ("max_num_seqs", "max_batched_tokens")}
    limits |= {"memory_utilization": row.number("gpu_memory_utilization")}
    layout = training_layout(
        training,
        **degrees,
        **micro_batch_of(row, degrees["cp"]),
        zero=(1 if backend == "megatron" else 3) if zero is None else zero,
        recompute=_stated(row, "recompute", get_args(Recompute)) or "full",
    )
    hosted = reference_on_host(framework_of(row), backend, lora=bool(row.integer("lora_rank")))
    return RunDescription(
        algorithm=_algorithm(row),
        model=row.text("model_config_key") or row.words("actor_model"),
        critic=row.text("critic_model"),
        reward_model=row.text("reward_model"),
        prompts=sequences // samples,
        samples=samples,
        mini_batches=row.integer("mini_batches")
        or (round((sequences - sequences % samples) / batch) if batch else 1),
        packing=row.text("packing") != "no",
        kl=row.text("kl") != "no",
        old_logprobs="rollout" if row.text("old_logprobs") == "rollout" else "recompute",
        lora_rank=row.integer("lora_rank") or 0,
        dynamic_sampling=_dynamic_sampling(row, sequences // samples),
        backend=backend,
        gpus=training,
        gpus_per_node=training,
        rollout_gpus=generating if apart else None,
        layout=layout,
        roles={"reference": RoleDescription(layout=replace(layout, offload_params="cpu"))} if hosted else {},
        actor_residency="offloaded" if leaves else "resident",
        optimizer_leaves=row.text("optimizer_offload") == "yes",
        train_precision="fp8" if row.text("precision_train") == "fp8" else "bf16",
        scoring_residency="swapped" if in_place else "offloaded" if sleeps else "resident",
        rollout=rollout_layout(
            generating,
            tp=row.integer("gen_tp") or 1,
            pp=row.integer("gen_pp") or 1,
            cuda_graphs=row.text("cuda_graphs") != "no",
            precision="fp8" if row.text("precision_gen") == "fp8" else "bf16",
            **{name: value for name, value in limits.items() if value},
        ),
        sleep=(1 if path == "lora" else sleep_level(framework_of(row))) if sleeps else 0,
        weight_path=path,
        staleness=staleness_of(row),
        partial_rollout=row.text("partial_rollout") == "yes",
    )


def reference_on_host(framework: str | None, backend: Backend, *, lora: bool) -> bool:
    """Whether a framework has the weights of a reference on the host, whatever its flags say; as the base of
    adapters they are the policy's."""
    runs = runs_of(framework)
    return runs is not None and backend in runs.hosts_reference and not lora


def sleep_level(framework: str | None) -> SleepLevel:
    """The deepest sleep level of a framework's engine on its trainer's GPUs; 2 where no table says it."""
    runs = runs_of(framework)
    return max(runs.says.sharing.sleep) if runs else 2


def _weight_path(row: Row, apart: bool) -> WeightPath:
    """How weights reach the rollout where no cell says it; verl's keeps adapters next to its weights."""
    if framework_of(row) == "verl" and row.integer("lora_rank"):
        return "lora"
    return "broadcast" if apart else "ipc"


def _stated(row: Row, column: str, known: Sequence[str]) -> Any:
    """One of the known words, or None where the cell is blank."""
    text = row.text(column)
    if text is not None and text not in known:
        raise Skip(f"{column.replace('_', ' ')} {text} is not priced")
    return text


def micro_batch_of(row: Row, cp: int) -> dict[str, Any]:
    """Sequences of a micro-batch, or tokens a GPU of its pack: tables give those of all its cp ranks."""
    tokens, scoring = row.integer("pack_tokens"), row.integer("logprob_pack_tokens")
    if tokens is None:
        return {"micro_batch": row.integer("micro_batch") or 1}
    packs = tokens * (row.integer("micro_batch") or 1)
    return {"pack_tokens": ceil(packs / cp), "score_pack_tokens": ceil(scoring / cp) if scoring else None}


def _whole(row: Row, column: str) -> int:
    value = row.integer(column)
    assert value is not None, f"{column} was checked"
    return value
