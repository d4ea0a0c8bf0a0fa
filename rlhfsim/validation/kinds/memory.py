"""Measured memory against the cost model: weights, KV-cache tokens, peaks of training.

`memory.weights` and `memory.kv_tokens` are what vLLM logs at start (GiB and tokens per replica);
`memory.training_peak` is allocated memory unless `detail` says otherwise. Rows that are formulas
or rules of thumb are no measurements and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory import kv_cache
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.measured import Conditions, kernels_of
from rlhfsim.units import GB, GIB
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.cases.memory_peaks import peak_setting, training_peak
from rlhfsim.validation.cases.memory_trainers import Trainer, trainer
from rlhfsim.validation.outcome import Outcome, Skip, needed
from rlhfsim.validation.rows import Row

INT4 = 0.5 + 2.5 / 128
"""Bytes per 4-bit weight with 16-bit scale and 4-bit zero point per group of 128 (GPTQ, AWQ)."""
LINEAR_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8 w8a8": 1.0, "int4": INT4, "nf4": 0.5 + 4 / 64 / 4}


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Every row with what it measures; one that measures nothing usable once, with the reason."""
    return [outcome for row in rows for outcome in _row(row)]


def _row(row: Row) -> list[Outcome]:
    filled, notes = apply("memory", row)
    kind = row.words("measured_or_analytic").lower()
    if not kind.startswith("measured"):
        return [_outcome(row, "memory.training_peak", skipped=f"not a measurement: {kind}")]
    if kind != "measured" and row.text("weights_gib_per_gpu") is None:
        return [_outcome(row, "memory.training_peak", skipped=f"a bound, not a peak: {kind}")]
    kinds: list[tuple[str, Callable[[Row], Outcome]]] = []
    if row.text("weights_gib_per_gpu"):
        kinds.append(("memory.weights", _weights))
    if row.text("kv_cache_tokens") or (row.text("kv_cache_gib_per_gpu") and kind == "measured"):
        kinds.append(("memory.kv_tokens", _kv_tokens))
    if row.text("kind") != "inference":
        kinds.append(("memory.training_peak", _training))
    if not kinds:
        return [_outcome(row, "memory.weights", skipped="no weights, KV cache or peak in the row")]
    outcomes = list[Outcome]()
    for name, predict in kinds:
        try:
            outcomes.append(replace(predict(filled), assumptions=notes))
        except RlhfsimError as error:
            outcomes.append(_outcome(filled, name, skipped=error.message))
    return outcomes


def _outcome(row: Row, kind: str, *, unit: str = "GiB", **known: Any) -> Outcome:
    label = f"{row.text('model') or '?'} {row.text('gpus') or '?'}x {row.text('gpu_type') or '?'}"
    return Outcome.of(row, kind, f"{label} tp{row.text('tp') or 1}", unit=unit, **known)


# --- inference ------------------------------------------------------------------------------------


def model_of(row: Row) -> ModelSpec:
    """The model of a row by its name, else by its key (which joins near relatives)."""
    for name in (row.text("model"), row.text("model_config_key")):
        if name is not None:
            try:
                return resolve_model(name)
            except RlhfsimError:
                continue
    raise Skip("no published config for this model")


def linear_bytes(row: Row) -> tuple[float, float]:
    """Bytes per element of linear layers and of experts, from precision and model name."""
    precision, name = row.words("precision"), row.words("model")
    if precision == "mxfp4":
        return 2.0, BYTES_PER_ELEMENT["mxfp4"]
    if precision == "fp16/quantised":
        quantised = re.search("gptq|awq|marlin", name.lower())
        return (INT4, INT4) if quantised else (2.0, 2.0)
    if precision not in LINEAR_BYTES:
        raise Skip(f"precision {precision or 'not stated'} is not modelled")
    return LINEAR_BYTES[precision], LINEAR_BYTES[precision]


def _batch_limits(row: Row) -> dict[str, int]:
    """vLLM's defaults by version and GPU.

    From 0.9 in V1 1024 sequences and 8192 tokens on 70 GiB or more except A100, else 256 and
    2048; V0 256 sequences and, without chunked prefill, as many tokens as the context
    (vllm/engine/arg_utils.py `get_batch_defaults`; vllm/config.py SchedulerConfig of 0.6).
    """
    version = re.search(r"0\.(\d+)", row.framework)
    minor = int(version[1]) if version else 99
    v1 = minor >= 9 or "V1" in row.framework
    large = _total_memory(row) >= 70 * GIB and "A100" not in row.words("gpu_type")
    if not v1:
        context = row.integer("max_model_len") or model_of(row).max_position or 2048
        return {"max_num_seqs": 256, "max_batched_tokens": max(2048, context)}
    if minor < 9 or not large:
        return {"max_num_seqs": 256, "max_batched_tokens": 2048}
    return {"max_num_seqs": 1024, "max_batched_tokens": 8192}


_TYPES = (
    ("H100-80GB", "h100"),
    ("H200-141GB", "h200"),
    ("L40S-48GB", "l40s"),
    ("V100-32GB", "v100"),
    ("80GB", "a100"),
    ("24GB-class", "rtx-4090"),
)


def _profile(row: Row) -> Profile:
    return load_profile(_gpu(row) or "h100")


def _gpu(row: Row) -> str | None:
    """The profile of the row's GPU; None where it is not stated or known."""
    kind = row.words("gpu_type")
    listed = next((name for start, name in _TYPES if kind.startswith(start)), None)
    try:
        return listed or load_profile(kind).name
    except RlhfsimError:
        return None


def _total_memory(row: Row) -> float:
    """Bytes that the driver offers: as logged, else those of the profile."""
    logged = row.number("gpu_total_mem_gib")
    if logged is not None:
        return logged * GIB
    kind = row.text("gpu_type")
    if kind is None or _gpu(row) is None:
        raise Skip(f"memory of GPU {kind or '(not stated)'} is not known")
    return _profile(row).usable_memory.value


def _weights(row: Row) -> Outcome:
    linear, expert = linear_bytes(row)
    layout = RolloutLayout(tp=row.integer("tp") or 1)
    size = kv_cache.rollout_weights(model_of(row), layout, linear_bytes=linear, expert_bytes=expert)
    spread = _profile(row).coefficient("state_spread")
    return _outcome(
        row,
        "memory.weights",
        measured=row.number("weights_gib_per_gpu"),
        predicted=size / GIB,
        low=size * spread.low / GIB,
        high=size * spread.high / GIB,
    )


def _kv_tokens(row: Row) -> Outcome:
    model = model_of(row)
    layout = RolloutLayout(
        tp=row.integer("tp") or 1,
        memory_utilization=needed(
            row.number("gpu_memory_utilization"), "gpu_memory_utilization is not stated"
        ),
        **_batch_limits(row),  # type: ignore[arg-type]
    )
    total = _total_memory(row)
    if not row.framework.startswith("vLLM"):
        raise Skip("SGLang's reserve outside mem-fraction-static is not stated")
    linear, expert = linear_bytes(row)
    profile = _profile(row)
    one = kv_cache.kv_bytes_per_token(model, layout)

    weights = kv_cache.rollout_weights(model, layout, linear_bytes=linear, expert_bytes=expert)

    def tokens(sampler: float, base: float, share: float, graphs: float) -> float:
        got = kv_cache.kv_capacity(
            model,
            layout,
            total_memory=total,
            weights=weights * share,
            activation_peak=kv_cache.profile_peak(model, layout, sampler_bytes_per_logit=sampler),
            non_torch=base + (profile["nccl_bytes"] if layout.tp > 1 else 0.0),
            graphs=graphs,
        )
        return float(got.tokens)

    sampler, base, state, graphs = (
        profile.coefficient(name)
        for name in ("sampler_bytes_per_logit", "vllm_non_torch_bytes", "state_spread", "cuda_graph_bytes")
    )
    measured = row.number("kv_cache_tokens")
    printed = measured is not None
    if measured is None:
        measured = (row.number("kv_cache_gib_per_gpu") or 0.0) * GIB / one
    return _outcome(
        row,
        "memory.kv_tokens",
        unit="tokens",
        measured=measured,
        predicted=tokens(sampler.value, base.value, 1.0, 0.0),
        low=tokens(sampler.high, base.high, state.high, graphs.value),  # graphs inside the share
        high=tokens(sampler.low, base.low, state.low, 0.0),
        detail={"tokens": "as logged" if printed else "logged GiB over bytes per token"},
    )


# --- training -------------------------------------------------------------------------------------


@cache
def _models() -> dict[str, ModelSpec]:
    """Models of rows without a preset, with their source."""
    from rlhfsim.specs.model.model import Attention, Moe

    small = ModelSpec(
        name="mixtral-8x2b-4l",
        num_layers=4,
        hidden=2048,
        vocab=32000,
        ffn=5440,
        attention=Attention(num_heads=16, num_kv_heads=8, head_dim=128),
        moe=Moe(num_experts=8, top_k=2, expert_ffn=5440, num_moe_layers=4),
        source="ISEEKYAN/mbridge@memory_estimator/README.md: parameters per module of test_small.yaml",
    )
    return {"Mixtral-8x2B, 4 layers": small}


def _training(row: Row) -> Outcome:
    measured, unit = row.number("peak_mem_gib_per_gpu"), GIB
    if measured is None:
        measured = needed(row.number("peak_mem_gb_as_published"), "no peak in the row")
        # tools of these frameworks print GiB as GB
        unit = GIB if row.framework.startswith(("verl", "DeepSpeed", "Megatron-Core")) else GB
    if re.search(r"\bOOM\b", row.words("notes")):
        raise Skip("the run ended out of memory: what it printed before is no peak")
    setting = setting_of(row)
    peak = training_peak(row, setting)
    return _outcome(
        row,
        "memory.training_peak",
        unit="GB",
        measured=measured * unit / GB,
        predicted=peak.bytes / GB,
        low=peak.low / GB,
        high=peak.high / GB,
        conditions=conditions_of(row, setting.models.actor),
        detail={**peak.detail, "trainer": "its own facts" if trainer(row) != Trainer() else "its backend's"},
    )


def setting_of(row: Row) -> CallSetting:
    """The plan of a training row."""
    model = _models().get(row.words("model")) or model_of(row)
    return peak_setting(row, model, _profile(row))


def conditions_of(row: Row, model: ModelSpec) -> Conditions:
    """What a training row ran on what; memory asks little of the GPU."""
    words = f"{row.framework} {row.words('fsdp_or_zero')}".lower()
    backend = "megatron" if "megatron" in words else "deepspeed" if "zero" in words else "fsdp2"
    framework = re.split(r" \(| v\d| \d", row.framework, maxsplit=1)[0]
    return Conditions(
        kind="memory.training_peak",
        framework=framework,
        backend=backend,
        gpu=_profile(row).name,
        model=model.name,
        params=model.num_params,
        moe=model.moe is not None,
        length=row.number("seq_len") or 1024.0,
        gpus=row.integer("gpus") or 1,
        algorithm="pre-training",
        precision="fp8" if "fp8" in row.words("precision") else "bf16",
        mixer=model.mixer,
        kernels=kernels_of(_profile(row)),
    )
