"""Generation throughput against published engine benchmarks; nothing here is fitted on them.

A row is complete when it states model, GPU, precision, tp, input and output length and either the
requests that were queued or the batch. `batch 1` single-stream rows need no lengths: their short
contexts cost next to nothing, and gpt-fast runs one compiled graph in a loop, without a scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of, with_engine
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.rollout.decode import Engine, gpu_work
from rlhfsim.rollout.engine_step import CURVE_SPREAD
from rlhfsim.rollout.generation import Requests, generate, kv_capacity
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.validation import assumptions
from rlhfsim.validation.outcome import Outcome, Skip
from rlhfsim.validation.rows import Row, missing

NEEDED = ("model_config_key", "gpu_type", "tp", "precision", "output_tok_s_total")
LENGTHS = ("input_len", "output_len")
ENGINES: tuple[tuple[str, Engine], ...] = (
    ("TensorRT-LLM", "trtllm_static"),
    ("gpt-fast", "vllm"),
    ("vLLM", "vllm"),
    ("SGLang", "sglang"),
)
"""Start of the engine column to the engine that prices it; TensorRT-LLM publishes ModelOpt checkpoints."""
HOST: Mapping[Engine, Engine] = {"sglang": "vllm"}
"""Engine whose kernels are priced -> whose host time, as `step.calls.CallSetting.engine` prices plans."""
GPUS = {"GB200": "gb200_nvl72", "A100-80GB (330W cap)": "a100_sxm", "A100": "a100_sxm"}
"""GPU names of the table that are no alias of a profile."""
FORMATS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "nvfp4"}
NARROW = ("fp8", "nvfp4")
SINGLE = "single-stream decode"
SHORT_CONTEXT = 256.0
"""Mean context of single-stream rows without lengths: a 5-token prompt and 200 new tokens (gpt-fast)."""
MOST = 2048
"""Sequences at a time where the row does not say: TensorRT-LLM's `max_batch_size` default."""


@frozen
class ServingJob:
    """One row, ready to be priced."""

    device: Device
    model: ModelSpec
    layout: RolloutLayout
    engine: Engine
    sequences: int
    isl: float
    osl: float


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """One outcome a row, predicted where the row is complete."""
    return [_outcome(row) for row in rows]


def _outcome(row: Row) -> Outcome:
    row, filled = assumptions.apply("inference", row)
    stated = {name: row.text(name) or "?" for name in ("gpus", "tp", *LENGTHS)}
    basic = partial(
        Outcome.of,
        row,
        "inference",
        f"{row.text('model')} on {stated['gpus']} {row.text('gpu_type')}, tp {stated['tp']}, "
        f"{stated['input_len']}/{stated['output_len']}",
        unit="tok/s",
        measured=row.number("output_tok_s_total"),
    )
    try:
        if reason := skip_reason(row):
            raise Skip(reason)
        value = throughput(row)
        if value == 0:
            raise Skip("the weights leave no room for a KV cache in this model of memory")
    except RlhfsimError as error:
        return basic(skipped=error.message)
    faster, slower = job_of(row).device.borrowed(CURVE_SPREAD)
    if row.text("scenario") == SINGLE:
        assumed = (f"context {SHORT_CONTEXT:g} tokens",)
    else:
        batch = () if row.text("batch_or_concurrency") else (f"at most {MOST} sequences at a time",)
        share = () if row.text("kv_share_of_free") else ("90 % of memory",)
        fp8 = ("FP8 KV cache",) if FORMATS[row.words("precision")] in NARROW else ()
        assumed = (*batch, *share, *fp8, *filled)
    return basic(predicted=value, low=value / slower, high=value / faster, assumptions=assumed)


def skip_reason(row: Row) -> str | None:
    """Why a row is not predicted, or None."""
    scenario = row.words("scenario")
    blank = missing(row, NEEDED if scenario == SINGLE else (*NEEDED, *LENGTHS))
    if blank:
        return f"not stated: {', '.join(blank)}"
    if row.text("precision") not in FORMATS:
        return f"{row.text('precision')} weights: no kernel curves for this format"
    if scenario != SINGLE and not (row.text("num_requests") or row.text("batch_or_concurrency")):
        return "not stated: num_requests or batch_or_concurrency"
    if scenario.startswith("prefill") or "Server" in scenario:
        return f"scenario {scenario!r} is not a generation throughput"
    if _engine(row) is None:
        return f"engine {row.text('engine')!r} has no coefficients"
    if _profile_name(row) is None:
        return f"no profile for {row.text('gpu_type')}"
    return None


def throughput(row: Row) -> float:
    """Output tokens per second of the replica; 0 where the weights leave no KV cache."""
    job = job_of(row)
    if row.text("scenario") == SINGLE:
        one, context = np.asarray(1.0), np.asarray(SHORT_CONTEXT)
        return 1.0 / float(gpu_work(job.device, job.model, job.layout, one, context).seconds)
    if kv_capacity(job.device, job.model, job.layout) <= job.isl + job.osl:
        return 0.0
    known = Requests(
        prompts=job.sequences,
        samples=1,
        prompt_lengths=Fixed(value=job.isl),
        response_lengths=Fixed(value=job.osl),
    )
    host = HOST.get(job.engine, job.engine)
    return generate(job.device, job.model, job.layout, known, engine=host).tokens_per_s


def job_of(row: Row) -> ServingJob:
    """Model, device and layout of a complete row."""
    precision, engine = FORMATS[row.words("precision")], _engine(row)
    assert engine is not None
    batch = row.integer("batch_or_concurrency")
    tp, gpus = row.integer("tp") or 1, row.integer("gpus") or 1
    model = resolve_model(row.words("model_config_key"))
    experts = min(tp, row.integer("ep_or_dep") or 1) if model.moe else 1
    apart = row.text("attention_dp") == "yes"
    layout = RolloutLayout(
        tp=1 if apart else tp,
        attention_dp=tp if apart else 1,
        ep=tp if apart else experts,
        precision=precision,  # type: ignore[arg-type]
        kv_precision="fp8" if precision in NARROW and engine == "trtllm_static" else "bf16",
        max_num_seqs=batch or MOST,
    )
    name = _profile_name(row)
    assert name is not None
    device = with_engine(_device(name, max(gpus, tp)), engine)
    if (share := row.number("kv_share_of_free")) is not None:  # of what everything else leaves free
        held = engine_bytes(model, RolloutPlacement(pool="alone", layout=layout), profile=device.profile)
        total = device.profile.usable_memory.value
        taken = (held.weights + held.profile_peak + held.non_torch + held.cuda_graphs) / total
        layout = replace(layout, memory_utilization=min(1.0, taken + share * max(0.0, 1.0 - taken)))
    return ServingJob(
        device=device,
        model=model,
        layout=layout,
        engine=engine,
        sequences=row.integer("num_requests") or batch or 1,
        isl=row.number("input_len") or 1.0,
        osl=row.number("output_len") or 1.0,
    )


def _engine(row: Row) -> Engine | None:
    name = row.words("engine")
    return next((engine for start, engine in ENGINES if name.startswith(start)), None)


def _profile_name(row: Row) -> str | None:
    name = row.words("gpu_type")
    try:
        return load_profile(GPUS.get(name, name)).name
    except RlhfsimError:
        return None


@cache
def _device(name: str, gpus: int) -> Device:
    profile = load_profile(name)
    return device_of(NodeGroup(profile=profile, gpus=max(gpus, 1), gpus_per_node=profile.node.gpus))
