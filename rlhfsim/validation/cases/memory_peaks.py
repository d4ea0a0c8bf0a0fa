"""Peaks of the training rows as a user writes them, and which bytes of the ledger each logged figure holds.

A row is the actor of a KTO plan (as in `cases.training`); its peak is what the ledger holds for `actor.train`
without what no allocator of PyTorch counts: CUDA context, NCCL, and fragmentation where it counts tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.memory import states as memory
from rlhfsim.memory.residency import role_in_plan
from rlhfsim.memory.risk import Item
from rlhfsim.memory.role_bytes import RoleBytes, software_of
from rlhfsim.memory.states import Stage
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import common_coefficients
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.validation.cases.memory_trainers import Trainer, trainer
from rlhfsim.validation.cases.training import recomputed
from rlhfsim.validation.outcome import Skip, needed
from rlhfsim.validation.rows import Row, zero_stage

MOONLIGHT_MOMENTS = 4.0
"""Moonlight's recipe keeps both Adam moments in BF16 (Megatron-Bridge
src/megatron/bridge/recipes/moonlight/moonlight_16b.py)."""
BRIDGE_LORA_RANK = 32
"""Default dim of Megatron-Bridge's LoRA (src/megatron/bridge/peft/lora.py)."""
AT_START = "allocated after start, before the first step"


@frozen
class PredictedPeak:
    """A predicted peak."""

    bytes: float
    low: float
    high: float
    detail: dict[str, float | str] = field(default_factory=dict)


def training_peak(row: Row, setting: CallSetting) -> PredictedPeak:
    """The peak that the row's framework printed, of the row's plan."""
    stages = memory.stages(setting.placement.actor.layout.pp)
    if before_first_step(row):
        return _start(setting)
    notes = row.words("notes")
    device = "nvidia-smi" in notes  # of all that the process has on its GPU
    waste = device or ("reserved" in notes and not _core(row))
    peaks = [_peak(bytes_of(setting, "actor", stage), fragmented=waste, device=device) for stage in stages]
    return max(peaks, key=lambda p: p.bytes)


def bytes_of(setting: CallSetting, role: str, stage: Stage) -> RoleBytes:
    """What the ledger of a plan counts for a role on one stage."""
    placement = setting.placement
    software = software_of(placement.software, setting.cluster.framework, placement.backend)
    profile = setting.cluster.node_groups[0].profile
    return role_in_plan(setting.models, placement, setting.workload, profile, role, stage, software)


def _peak(held: RoleBytes, *, fragmented: bool, device: bool) -> PredictedPeak:
    """States and what the training call adds; a figure that is called reserved holds fragmentation too, one
    of the whole device also what no allocator of PyTorch counts."""
    parts = [
        ("states", held.states.total, "state_spread"),
        ("gathered", held.train.gathered, "buffer_spread"),
        ("buffers", held.train.buffers, "buffer_spread"),
        ("activations", held.train.activations, "activation_spread"),
        ("logits", held.train.logits, "logits_spread"),
    ]
    if fragmented:
        parts.append(("fragmentation", held.train.fragmentation, "buffer_spread"))
    if device:
        parts += [("framework", held.framework, "framework_bytes"), ("nccl", held.nccl, "nccl_bytes")]
    return _total(parts, "device" if device else "max reserved" if fragmented else "max allocated")


def _total(parts: Iterable[tuple[str, float, str]], which: str, others: Iterable[Item] = ()) -> PredictedPeak:
    """The sum of (name, bytes, coefficient) and of `others` with the interval of independent errors."""
    coefficients = common_coefficients()
    parts, items = list(parts), list(others)
    for _, size, name in parts:
        c = coefficients[name]
        items.append(Item(value=size, low=size * c.low / c.value, high=size * c.high / c.value))
    total = sum(i.value for i in items)
    down = sum((i.value - i.low) ** 2 for i in items) ** 0.5
    up = sum((i.high - i.value) ** 2 for i in items) ** 0.5
    detail: dict[str, float | str] = {"peak": which}
    detail.update({name: size for name, size, _ in parts})
    return PredictedPeak(bytes=total, low=total - down, high=total + up, detail=detail)


# --- before the first step ------------------------------------------------------------------------


def before_first_step(row: Row) -> bool:
    """verl's rows of what is allocated when all roles are built and nothing has run."""
    after_start = row.framework.startswith("verl FSDP (2024-11)")
    return after_start or (row.framework.startswith("verl Megatron") and row.text("pp") == "2")


def _start(setting: CallSetting) -> PredictedPeak:
    """The fullest stage before the first step: trained roles, and a frozen reference that no column places.

    Three logs of verl differ in it alone: none of it on the GPU, its BF16 weights, or twice as much in FP32.
    """
    placement = setting.placement
    trained = ["actor", *(["critic"] if placement.role("critic") is not None else [])]
    reference = placement.role("reference")
    frozen = ["reference"] if reference is not None and reference.residency == "resident" else []
    peaks = []
    for stage in memory.stages(placement.actor.layout.pp):
        held, more = (sum(_at_start(setting, role, stage) for role in roles) for roles in (trained, frozen))
        peak = _total(
            [("states", held, "state_spread")], AT_START, [Item(value=more, low=0.0, high=2 * more)]
        )
        peaks.append(replace(peak, detail={**peak.detail, "states": held + more}))
    return max(peaks, key=lambda p: p.bytes)


def _at_start(setting: CallSetting, role: str, stage: Stage) -> float:
    """Bytes before the first step: Adam has no moments, FSDP2 no gradients."""
    states = bytes_of(setting, role, stage).states
    if setting.placement.backend == "fsdp2":
        return states.weights
    return states.weights + states.gradients + states.optimizer / 3  # the FP32 copy of 4 + 8 bytes


# --- the plan of a row ----------------------------------------------------------------------------


def peak_setting(row: Row, model: ModelSpec, profile: Profile) -> CallSetting:
    """The plan of a row, as a user writes it.

    Raises:
        Skip: the row leaves open what decides the peak.
    """
    backend = _backend(row)
    facts = trainer(row)
    layout = _layout(row, backend)
    workload = _workload(row, layout, model)
    if facts.adapters > 1 and workload.lora is None:
        facts = replace(facts, adapters=1)
    placed = RolePlacement(pool="all", layout=layout)
    ppo = workload.algorithm == "ppo"
    frozen = replace(placed, residency="resident" if ppo and row.text("offload") is None else "offloaded")
    node = min(profile.node.gpus, layout.gpus)
    group = NodeGroup(profile=profile, gpus=-(-layout.gpus // node) * node, gpus_per_node=node)
    try:
        placement = Placement(
            pools=(ResourcePool(name="all", gpus=layout.gpus),),
            actor=placed,
            critic=placed if ppo else None,
            reference=frozen,
            backend=backend,
            software=_software(row, backend, facts),
        )
    except RlhfsimError as error:
        raise Skip(f"not a layout that a plan expresses: {error.message}") from error
    return CallSetting(
        models=Models(actor=model, critic=model.with_value_head() if ppo else None, reference=model),
        placement=placement,
        workload=workload,
        cluster=Cluster(node_groups=(group,)),
    )


def _backend(row: Row) -> Backend:
    """Whose states and buffers; FSDP over a pipeline is ZeRO-1, which gathers and reduces once a step."""
    framework = row.framework
    if before_first_step(row):
        return "megatron" if "Megatron" in framework else "fsdp2"
    if framework.startswith("verl"):
        raise Skip("the peak of a whole RLHF step, with GPU type or batch not stated")
    if framework.startswith("DeepSpeed-Chat"):
        raise Skip("a V100 step of hybrid engine with two trained models: micro-batch and offload not stated")
    if "short samples" in row.words("notes"):
        raise Skip("samples are shorter than the context, by how much is not stated")
    for column in ("seq_len", "micro_batch"):
        needed(row.text(column), f"{column} is not stated")
    if _megatron(row):
        return "megatron"
    if "deepspeed" in framework.lower():
        return "deepspeed"
    if re.search("fsdp|titan|prime-rl|composer|trl", f"{framework} {row.words('fsdp_or_zero')}".lower()):
        return "fsdp2" if (row.integer("pp") or 1) == 1 else "megatron"
    raise Skip("framework and settings are not stated")


def _workload(row: Row, layout: Layout, model: ModelSpec) -> Workload:
    """Sequences of one length; KTO trains on given ones, verl's rows before the first step are of PPO."""
    lora = row.text("lora")
    rank = re.search(r"r\w*\W*(\d+)", lora or "")
    bridge = _megatron(row) and not _core(row) and "ms-swift" not in row.framework
    adapted = lora and lora.lower() not in ("no", "none")
    actor_and_critic = before_first_step(row) and "FSDP" in row.framework
    return Workload(
        algorithm="ppo" if actor_and_critic else "kto",
        model=model.name,
        prompts=row.integer("global_batch_seqs") or layout.dp * layout.micro_batch,
        prompt_len=Fixed(value=(row.number("seq_len") or 2.0) - 1),
        response_len=Fixed(value=1),
        packing=False,
        lora=Lora(rank=int(rank[1]) if rank and not bridge else BRIDGE_LORA_RANK) if adapted else None,
        gradients="bf16" if bridge and not before_first_step(row) else "backend",
        train_precision="fp8" if "fp8" in row.words("precision") else "bf16",
    )


def _megatron(row: Row) -> bool:
    return row.framework.startswith("Megatron")


def _core(row: Row) -> bool:
    return row.framework.startswith("Megatron-Core")


def _software(row: Row, backend: Backend, facts: Trainer) -> Software:
    """What the row's framework does; benchmarks give their experts equal loads.

    Megatron-Bridge's performance recipes, Moonlight's and those with adapters reduce gradients in BF16 (its
    perf_recipes/_common.py, grad_reduce_in_fp32 False: `workload.gradients`).
    """
    software = default_software(backend)
    moonlight = backend == "megatron" and "Moonlight" in row.words("model")
    return replace(
        software,
        stack="compiled" if facts.compiled else software.stack,
        head=None if _megatron(row) else facts.head,
        balanced=True,
        flash=not row.words("gpu_type").startswith("V100"),
        recomputed=recomputed(row.text("recompute")) if backend == "megatron" else (),
        moment_bytes=MOONLIGHT_MOMENTS if moonlight else None,
        base_bytes=facts.base_bytes,
        adapters=facts.adapters,
        fp32_combine=facts.fp32_combine,
        overlaps_reduction=False,
        inputs_kept=facts.inflight if "offload" in row.words("recompute") else None,
    )


def _layout(row: Row, backend: Backend) -> Layout:
    """Layout of a row; Megatron-Core cuts each expert over tp by default, where dp x cp ranks hold all."""
    tp, pp, cp, ep = (row.integer(c) or 1 for c in ("tp", "pp", "cp", "ep"))
    gpus = row.integer("gpus")
    if gpus is None and backend != "megatron":
        raise Skip("number of GPUs is not stated")
    dp = row.integer("dp") or max(1, (gpus or tp * pp * ep) // (tp * pp * cp))
    notes = row.words("notes").lower()
    stage = zero_stage(f"{row.words('fsdp_or_zero')} {row.framework}")
    chunks = 5 if "vpp 5" in notes else 2 if "interleaved" in notes else 1
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=dp,
        etp=tp if _core(row) and dp * cp % ep == 0 else 1,
        zero={"megatron": 1, "fsdp2": 3}.get(backend) or needed(stage, "ZeRO stage is not stated"),
        vp=chunks if pp > 1 else 1,
        recompute=_recompute(row),
        micro_batch=row.integer("micro_batch") or 1,
        offload_optimizer="cpu" if "optim" in row.words("offload") else "none",
    )


def _recompute(row: Row) -> Recompute:
    text = row.words("recompute").lower().partition(" ")[0].rstrip(":")
    if text == "selective":
        return "selective"
    return "full" if text in ("full", "yes", "true", "recompute") else "none"
