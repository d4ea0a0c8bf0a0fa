"""What a plan asks of a framework: names of features, as in `runs.FEATURES`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, Schedule
from rlhfsim.specs.workload.roles import TABLE
from rlhfsim.specs.workload.workload import Workload

APART = "prefill apart from decode"


def model_features(model: ModelSpec) -> Iterator[str]:
    """Features that a model's kinds of layer need."""
    if model.recurrent:
        yield "gated delta net or Mamba-2 layers"
    if model.attention.index_topk:
        yield "sparse attention"


def model_kinds(model: ModelSpec, *, generates: bool) -> Iterator[str]:
    """Kinds of model that a policy is; `generates`: an engine gets its weights while it runs."""
    if model.attention.sinks and generates:
        yield "weight sync of attention sinks"
    if model.vision is not None:
        yield "vision towers"


def layout_features(layout: Layout, *, adapters: bool) -> Iterator[str]:
    """Features that a layout of training or scoring needs."""
    offloads = {layout.offload_optimizer, layout.offload_params}
    if "cpu" in offloads:
        yield "offload to the host"
    if "nvme" in offloads:
        yield "offload to NVMe"
    if layout.shards:
        yield "HSDP"
    if layout.offload_fraction < 1:
        yield "partial optimizer offload"
    if layout.pack_tokens:
        yield "micro-batches by tokens"
    if adapters and (layout.tp > 1 or layout.pp > 1):
        yield "LoRA with tensor or pipeline parallelism"


def residency_features(placed: RolePlacement) -> Iterator[str]:
    """Features that a role needs by where it stays between its calls."""
    if placed.residency == "offloaded" or placed.offload_between:
        yield "offload to the host"
    if placed.residency == "recreated":
        yield "roles created anew for each call"
    if placed.residency == "swapped":
        yield "reference swapped in place of the actor"


def rollout_features(layout: RolloutLayout, *, one_node: bool) -> Iterator[str]:
    """Features that a rollout needs; `one_node`: every replica lies inside a node."""
    asked = {
        "rollout tensor parallelism": layout.tp > 1,
        "rollout pipeline parallelism": layout.pp > 1,
        "rollout expert parallelism": layout.ep > 1,
        "rollout attention data parallelism": layout.attention_dp > 1,
        "rollout replicas across nodes": not one_node,
        APART: layout.prefill > 0,
        "speculative decoding": layout.speculation is not None,
        "FP8 rollout": layout.precision == "fp8",
        "FP8 KV cache": layout.kv_precision == "fp8",
        "MXFP4 rollout": layout.precision == "mxfp4",
        "NVFP4 rollout": layout.precision == "nvfp4",
        "speculative decoding of an FP8 rollout": layout.precision == "fp8"
        and layout.speculation is not None,
        "BF16 layers in an FP8 rollout": layout.precision == "fp8" and layout.islands,
    }
    yield from (name for name, wanted in asked.items() if wanted)


def schedule_features(schedule: Schedule) -> Iterator[str]:
    """Features that a schedule needs."""
    asked = {
        "one step off": schedule.one_step_off,
        "staleness above 1": schedule.staleness > 1,
        "partial rollouts": schedule.partial_rollout,
        "weights sent while the next batch is generated": schedule.overlapped_sync,
        "late groups thrown away": schedule.late == "drop",
        "late groups generated again": schedule.late == "requeue",
        "trainer's GPUs lent to the rollout": schedule.lend,
        "streaming": schedule.streaming,
        "double buffering": schedule.double_buffered,
    }
    yield from (name for name, wanted in asked.items() if wanted)


def hardware_features(vendors: Collection[str]) -> Iterator[str]:
    """Features that kinds of GPU need."""
    if "amd" in vendors:
        yield "AMD GPUs"


def workload_features(workload: Workload) -> Iterator[str]:
    """Features that the work of a step needs."""
    trained = workload.speculation.method if workload.speculation and workload.trains_draft else None
    lora, old = workload.lora, workload.old_logprobs if workload.generates and not workload.distils else None
    asked = {
        "environments": workload.environment is not None,
        "dynamic sampling": workload.dynamic_sampling is not None,
        "oversampling": workload.oversampling,
        "speculative decoding": workload.speculation is not None,
        "MTP layers trained with the policy": trained == "mtp",
        "EAGLE-3 heads trained with the policy": trained == "eagle",
        "router replay": workload.router_replay,
        "largest logits of a teacher": workload.teacher_top > 0,
        "further roles": any(not role.launched and role.model(workload) is not None for role in TABLE),
        "several teachers": len(workload.references) > 1,
        "LoRA": lora is not None,
        "LoRA on a 4-bit base": lora is not None and lora.base == "nf4",
        "old log-probs of the rollout": old == "rollout",
        "old log-probs of the training pass": old == "reused",
        "8-bit Adam": workload.optimizer == "adam8bit",
        "BF16 gradients": workload.gradients == "bf16",
        "FP32 gradient sums": workload.gradients == "fp32",
        "FP8 training": workload.train_precision in ("fp8", "fp4"),
    }
    yield from (name for name, wanted in asked.items() if wanted)


def pool_features(groups: Iterable[Collection[str]]) -> Iterator[str]:
    """Features that roles need by sharing GPUs; who shares them with the rollout, weight paths say."""
    away = [set(group) - {"rollout"} for group in groups if "actor" not in group]
    if {"reward"} in away:
        yield "reward model on GPUs of its own"
    if any(group not in (set(), {"reward"}) for group in away):
        yield "roles on GPUs of their own"
