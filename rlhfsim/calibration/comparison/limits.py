"""Where the time of a measured step went: the GPUs' part, the framework's, and what is left of each phase.

A phase's GPU part is what its prediction spends on arithmetic, memory and links, at the speed that kernels
reach; the framework's part is the rest of the prediction (launches, host, PCIe, disks, bubbles, the longest
sequences). What the phase took beyond the prediction is neither known to be the one nor the other.

    MFU = c N tokens / (seconds GPUs peak),   c = 6 trained, 4 under adapters, 2 without gradients

Not known here: attention in the MFU, and tokens of padding, which count as no work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlhfsim.calibration.comparison.phases import PhaseComparison
from rlhfsim.calibration.observation import Observation
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.layout import Layout

GPU_WORK = frozenset(("compute", "hbm", "nvlink", "network"))
"""Resources of a prediction that are the GPU's and its links'."""
FLOP = {"train": 6, "logprob": 2, "value": 2, "score": 2}
"""FLOP of a parameter and token by kind of call."""
ADAPTERS = 4
"""The same of training, where only adapters have gradients."""


@frozen
class PhaseTime:
    """One measured phase of the step."""

    name: str
    measured_s: float
    gpu_s: float
    """Predicted for arithmetic, memory and links."""
    framework_s: float
    """Predicted for everything else."""
    why: str
    """How it ran: MFU and micro-batches, or how it decoded."""

    @property
    def beyond_s(self) -> float:
        """Measured and not predicted; negative where it was faster."""
        return self.measured_s - self.gpu_s - self.framework_s


def phase_times(plan: Plan, run: Observation, rows: Sequence[PhaseComparison]) -> tuple[PhaseTime, ...]:
    """Every measured phase that the plan has, the longest first."""
    planned = {phase.name: phase for phase in plan.prediction.phases}
    times = []
    for row in rows:
        if row.measured_s is None or row.predicted_s is None:
            continue
        resources = [item for name in row.covers for item in planned[name].by_resource_s.items()]
        whole = math.fsum(seconds for _, seconds in resources) or 1.0
        share = math.fsum(seconds for resource, seconds in resources if resource in GPU_WORK) / whole
        times.append(
            PhaseTime(
                name=row.name,
                measured_s=row.measured_s,
                gpu_s=share * row.predicted_s,
                framework_s=(1 - share) * row.predicted_s,
                why="; ".join(_why(plan, run, row.name, row.measured_s)),
            )
        )
    return tuple(sorted(times, key=lambda t: -t.measured_s))


def _why(plan: Plan, run: Observation, phase: str, seconds: float) -> Iterator[str]:
    role, _, kind = phase.partition(".")
    work, placement = plan.workload, plan.placement
    length = (run.prompt_tokens or 0.0) + (run.response_tokens or 0.0)
    if kind == "generate" and placement.rollout is not None:
        layout = placement.rollout.layout
        if not layout.cuda_graphs:
            yield "decodes eagerly, without CUDA graphs"
        if run.response_tokens:
            gpus = layout.tp * layout.pp * layout.dp
            yield f"{work.num_sequences * run.response_tokens / seconds / gpus:,.0f} tokens/s a GPU"
    elif kind in FLOP and length:
        where = placement.role(role) or placement.actor
        if (mfu := _mfu(plan, role, kind, length * work.num_sequences, seconds)) is not None:
            yield f"MFU {mfu:.0%}"
        yield _micro_batches(where.layout, kind, length)
        if not work.packing:
            yield "padded: samples of a micro-batch are as long as its longest"


def _mfu(plan: Plan, role: str, kind: str, tokens: float, seconds: float) -> float | None:
    model = next((m for m in plan.models if m.role == role), None)
    peak = load_profile(plan.hardware[0].profile).peak.get("bf16")
    if model is None or peak is None:
        return None
    frozen = kind == "train" and role == "actor" and plan.workload.lora is not None
    passes = plan.workload.epochs if kind == "train" else 1
    flop = (ADAPTERS if frozen else FLOP[kind]) * model.active_params * tokens * passes
    return flop / (seconds * plan.hardware[0].gpus * peak.value)


def _micro_batches(layout: Layout, kind: str, length: float) -> str:
    pack = layout.pack_tokens if kind == "train" else layout.score_pack_tokens or layout.pack_tokens
    if pack:
        return f"micro-batches of up to {pack:,} tokens"
    count = layout.sequences(scoring=kind != "train")
    return f"micro-batches of {count * length:,.0f} tokens ({count} sample{'s' * (count > 1)})"
