"""Peaks of the training rows: which states, activations and buffers each logged figure holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rlhfsim.memory import activations
from rlhfsim.memory import states as memory
from rlhfsim.memory.risk import Item
from rlhfsim.memory.states import Shard, Stage
from rlhfsim.specs.hardware.profiles import common_coefficients
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.validation.cases.memory_trainers import Trainer, trainer
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row, zero_stage

MEGATRON_BRIDGE_GRADIENTS = 2.0
"""Its performance recipes set grad_reduce_in_fp32 False (Megatron-Bridge
src/megatron/bridge/perf_recipes/_common.py), its Moonlight and PEFT recipes too."""
MOONLIGHT_MOMENTS = 4.0
"""Moonlight's recipe keeps both Adam moments in BF16 (Megatron-Bridge
src/megatron/bridge/recipes/moonlight/moonlight_16b.py)."""
BRIDGE_LORA_RANK = 32
"""Default dim of Megatron-Bridge's LoRA (src/megatron/bridge/peft/lora.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPeak:
    """A predicted peak."""

    bytes: float
    low: float
    high: float
    detail: dict[str, float | str] = field(default_factory=dict)


def training_peak(row: Row, model: ModelSpec) -> PredictedPeak:
    """The peak that the row's framework printed.

    Raises:
        Skip: the row leaves open what decides the peak.
    """
    framework = row.text("framework") or ""
    if framework.startswith("verl FSDP (2024-11)"):
        return _after_init_fsdp(row, model)
    if framework.startswith("verl Megatron") and row.text("pp") == "2":
        return _before_rollout_megatron(row, model)
    if framework.startswith("verl"):
        raise Skip("the peak of a whole RLHF step, with GPU type or batch not stated")
    if framework.startswith("DeepSpeed-Chat"):
        raise Skip("a V100 step of hybrid engine with two trained models: micro-batch and offload not stated")
    for column in ("seq_len", "micro_batch"):
        if row.text(column) is None:
            raise Skip(f"{column} is not stated")
    if row.text("lora") and not row.text("precision"):
        row = row.filled({"precision": "bf16"})
    if framework.startswith("Megatron"):
        return _megatron(row, model)
    if "deepspeed" in framework.lower():
        return _sharded(row, model, "deepspeed", _zero(row))
    if re.search("fsdp|titan|prime-rl|composer|trl", f"{framework} {row.text('fsdp_or_zero') or ''}".lower()):
        return _sharded(row, model, "fsdp2", 3)
    raise Skip("framework and settings are not stated")


def _zero(row: Row) -> int:
    """ZeRO stage from `fsdp_or_zero` or the framework's name."""
    stage = zero_stage(f"{row.text('fsdp_or_zero') or ''} {row.text('framework') or ''}")
    if stage is None:
        raise Skip("ZeRO stage is not stated")
    return stage


def _total(parts: Iterable[tuple[str, float, str]], which: str) -> PredictedPeak:
    """The sum of (name, bytes, coefficient) with the interval of independent errors."""
    coefficients = common_coefficients()
    parts = list(parts)
    items = []
    for _, size, name in parts:
        c = coefficients[name]
        items.append(Item(value=size, low=size * c.low / c.value, high=size * c.high / c.value))
    total = sum(i.value for i in items)
    down = sum((i.value - i.low) ** 2 for i in items) ** 0.5
    up = sum((i.high - i.value) ** 2 for i in items) ** 0.5
    detail: dict[str, float | str] = {"peak": which}
    detail.update({name: size for name, size, _ in parts})
    return PredictedPeak(bytes=total, low=total - down, high=total + up, detail=detail)


def _megatron(row: Row, model: ModelSpec) -> PredictedPeak:
    tp, pp = row.integer("tp") or 1, row.integer("pp") or 1
    gpus = row.integer("gpus") or tp * pp * (row.integer("ep") or 1)
    cp, ep = row.integer("cp") or 1, row.integer("ep") or 1
    core = (row.text("framework") or "").startswith("Megatron-Core")
    dp = row.integer("dp") or max(1, gpus // (tp * pp * cp))
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=dp,
        etp=tp if core else 1,
        zero=1,
        recompute=_recompute(row),
        micro_batch=row.integer("micro_batch") or 1,
        vp=5 if "VPP 5" in (row.text("notes") or "") else 1,
    )
    stages = [_megatron_stage(row, model, layout, stage, core) for stage in memory.stages(layout)]
    return max(stages, key=lambda p: p.bytes)


def _megatron_stage(row: Row, model: ModelSpec, layout: Layout, stage: Stage, core: bool) -> PredictedPeak:
    part = memory.shard(model, layout, "megatron", stage)
    gradients = None if core else MEGATRON_BRIDGE_GRADIENTS
    moments = MOONLIGHT_MOMENTS if "Moonlight" in (row.text("model") or "") else None
    if row.text("lora"):
        base, extra = memory.lora_states(model, part, layout, "megatron", Lora(rank=BRIDGE_LORA_RANK))
        states = base.total + extra.total
    else:
        states = memory.trained_states(
            part, layout, "megatron", gradient_bytes=gradients, moment_bytes=moments
        ).total
    sequences = row.integer("global_batch_seqs") or layout.dp * layout.micro_batch
    held = activations.training_activations(
        model,
        layout,
        "megatron",
        tokens=layout.micro_batch * (row.number("seq_len") or 0.0),
        micro_batches=max(1, sequences // (layout.dp * layout.micro_batch)),
        stage=stage,
        fp8="fp8" in (row.text("precision") or ""),
    )
    dropped = _dropped(row, model, layout, stage, held.saved)
    return _total(
        (
            ("states", states, "state_spread"),
            ("activations", held.saved - dropped + held.working, "activation_spread"),
            ("logits", max(0.0, held.logits - held.working), "logits_spread"),
        ),
        "max allocated",
    )


def _dropped(row: Row, model: ModelSpec, layout: Layout, stage: Stage, saved: float) -> float:
    """Bytes that module-wise recomputation drops, from the share of those tensors in a layer."""
    modules = row.text("recompute") or ""
    tensors = activations.layer_tensors(
        model,
        layout.tp,
        layout.etp,
        sequence_parallel=layout.tp > 1,
        experts=model.moe is not None,
        fp8="fp8" in (row.text("precision") or ""),
    )
    names = {
        "mlp": ("mlp_activation_input", "mlp_activation"),
        "mla_up_proj": ("query_key_value",),
        "moe_act": ("expert_mlp_activation",),
        "layernorm": ("attention_input", "mlp_input"),
    }
    chosen = [m.strip() for m in modules.partition(":")[2].split(",")]
    share = sum(tensors.saved.get(t, 0.0) for m in chosen for t in names.get(m, ()))
    return saved * share / tensors.total


def _recompute(row: Row) -> Recompute:
    text = (row.text("recompute") or "").lower().partition(" ")[0]
    if text == "selective":
        return "selective"
    return "full" if text in ("full", "yes", "true", "recompute") else "none"


def _sharded(row: Row, model: ModelSpec, backend: Backend, zero: int) -> PredictedPeak:
    """Hugging Face or FSDP modules; attention stores its scores on GPUs before Ampere.

    A figure that the notes call reserved also holds the allocator's fragmentation.
    """
    tp, pp, cp, ep = (row.integer(c) or 1 for c in ("tp", "pp", "cp", "ep"))
    gpus = row.integer("gpus")
    if gpus is None:
        raise Skip("number of GPUs is not stated")
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=row.integer("dp") or max(1, gpus // (tp * pp * cp)),
        zero=zero,
        vp=2 if pp > 1 and "interleaved" in (row.text("notes") or "").lower() else 1,
        recompute=_recompute(row),
        micro_batch=row.integer("micro_batch") or 1,
        offload_optimizer="cpu" if "optim" in (row.text("offload") or "") else "none",
    )
    facts = trainer(row)
    if facts.fp32_combine and model.moe is not None:
        model = replace(model, moe=replace(model.moe, fp32_combine=True))
    peaks = [_sharded_stage(row, model, layout, backend, facts, stage) for stage in memory.stages(layout)]
    return max(peaks, key=lambda p: p.bytes)


def _sharded_stage(
    row: Row, model: ModelSpec, layout: Layout, backend: Backend, facts: Trainer, stage: Stage
) -> PredictedPeak:
    part = memory.shard(model, layout, backend, stage)
    states, trainable = _sharded_states(row, model, part, layout, backend, facts)
    length = row.number("seq_len") or 0.0
    sequences = row.integer("global_batch_seqs") or layout.dp * layout.micro_batch
    held = activations.training_activations(
        model,
        layout,
        backend,
        tokens=layout.micro_batch * length,
        micro_batches=max(1, sequences // (layout.dp * layout.micro_batch)),
        stage=stage,
        score_length=length if (row.text("gpu_type") or "").startswith("V100") else 0.0,
        head=facts.head,
        frozen=trainable is not part,
        compiled=facts.compiled,
    )
    offloaded = "offload" in (row.text("recompute") or "")
    saved = held.saved * (min(1.0, facts.inflight / part.num_layers) if offloaded else 1.0)
    gathered, buffers = _moving(part, trainable, layout, backend)
    if backend == "fsdp2" and layout.pp == 1:
        buffers = held.beside(buffers)
    extra = [
        ("gathered", gathered, "buffer_spread"),
        ("buffers", buffers, "buffer_spread"),
        ("activations", saved + held.working, "activation_spread"),
        ("logits", max(0.0, held.logits - held.working), "logits_spread"),
    ]
    step = memory.step_bytes(trainable, layout, backend)
    if step > sum(size for _, size, _ in extra):
        extra = [("optimizer step", step, "buffer_spread")]
    which = "max allocated"
    if "reserved" in (row.text("notes") or ""):
        which = "max reserved"
        waste = common_coefficients()["fragmentation"].value - 1
        extra.append(("fragmentation", waste * sum(size for _, size, _ in extra), "buffer_spread"))
    return _total([("states", states, "state_spread"), *extra], which)


def _moving(part: Shard, trainable: Shard, layout: Layout, backend: Backend) -> tuple[float, float]:
    """Bytes of gathered weights and of gradients that wait.

    In a pipeline FSDP2 gathers a stage once a step and adds up its gradients whole, in FP32
    (torchtitan 9dec370, parallelize_llama.py, apply_fsdp: `reshard_after_forward = not pp_enabled`).
    """
    if backend == "fsdp2" and layout.pp > 1:
        return memory.BF16 * part.elements, memory.FP32 * trainable.elements
    gathered = memory.gathered_bytes(part, layout, backend)
    return gathered, memory.gradient_buffer_bytes(trainable, layout, backend, overlap=False)


def _sharded_states(
    row: Row, model: ModelSpec, part: Shard, layout: Layout, backend: Backend, facts: Trainer
) -> tuple[float, Shard]:
    """Bytes of states, and the elements that are trained."""
    lora = row.text("lora")
    if not lora or lora.lower() in ("no", "none"):
        return memory.trained_states(part, layout, backend).total, part
    rank = re.search(r"r\w*\W*(\d+)", lora)
    chosen = Lora(rank=int(rank[1]) if rank else BRIDGE_LORA_RANK)
    base, adapters = memory.lora_states(model, part, layout, backend, chosen, base_width=facts.base_bytes)
    trainable = memory.adapter_shard(model, part, layout, chosen)
    more = (facts.adapters - 1) * (adapters.weights + adapters.gradients)
    return base.total + adapters.total + more, trainable


def _after_init_fsdp(row: Row, model: ModelSpec) -> PredictedPeak:
    """verl after start of actor, critic and reference: FP32 shards of the trained, BF16 of the frozen."""
    layout = Layout(dp=row.integer("gpus") or 1, zero=3)
    parts = []
    for name, spec in (("actor", model), ("critic", model.with_value_head())):
        states = memory.trained_states(memory.shard(spec, layout, "fsdp2"), layout, "fsdp2")
        parts.append((name, states.weights, "state_spread"))
    if row.text("offload") is None:
        frozen = memory.frozen_states(memory.shard(model, layout, "fsdp2"), layout)
        parts.append(("reference", frozen.weights, "state_spread"))
    return _total(parts, "allocated after start, before the first step")


def _before_rollout_megatron(row: Row, model: ModelSpec) -> PredictedPeak:
    """verl's Megatron actor before the first step: no moments yet."""
    tp, pp = row.integer("tp") or 1, row.integer("pp") or 1
    layout = Layout(tp=tp, pp=pp, dp=(row.integer("gpus") or 1) // (tp * pp), zero=1)
    sizes = []
    for stage in memory.stages(layout):
        part = memory.shard(model, layout, "megatron", stage)
        states = memory.trained_states(part, layout, "megatron", moment_bytes=0.0)
        sizes.append(states.total)
    return _total(
        [("states without moments", max(sizes), "state_spread")],
        "allocated after start, before the first step",
    )
