"""DeepSpeed's configuration from a layout: a pure function, shown with a run and tested."""

from __future__ import annotations

from typing import Any

from executor.settings import Optimizer, Precision
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.placement.backends import BACKENDS, broken_rule, broken_sums
from rlhfsim.specs.placement.engine_numbers import DEEPSPEED
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import GradientSums


def ds_config(
    layout: Layout,
    optimizer: Optimizer | None,
    precision: Precision,
    *,
    cuda: bool = False,
    trained: int | None = None,
    gradients: GradientSums = "backend",
) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` gets; without `optimizer` for ZeRO-3 inference.

    `trained`: elements that get gradients on this rank, where that is known.

    Gradient accumulation is 1 in it: the engine sets the accumulation boundary itself, because ranks and
    steps have different numbers of micro-batches.

    Raises:
        RlhfsimError: a layout that DeepSpeed does not run.
    """
    _check(layout)
    fp32_sums = gradients == "fp32" and precision == "bf16" and optimizer is not None
    if fp32_sums and (reason := broken_sums(BACKENDS["deepspeed"], layout)) is not None:
        raise RlhfsimError("deepspeed-fp32-sums", reason, help="set workload.gradients: backend")
    ds_clips = not clips_itself(layout, precision)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm if optimizer and ds_clips else 0.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": _zero(layout, optimizer, cuda, trained),
        "zero_allow_untested_optimizer": True,
        # torch's AdamW is a documented choice here where no compiler can build DeepSpeed's
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if precision == "bf16" and optimizer is not None:
        # a step with a gradient that is not finite is skipped and reported, as in fp32
        config["bf16"]["check_grad_overflow"] = True
    if fp32_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        # each gradient goes into its sum and is freed at once, not at the end of the backward pass
        config["bf16"]["immediate_grad_update"] = layout.zero == 1
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "vocab_parallel_lm_head": False}
    return config


def clips_itself(layout: Layout, precision: Precision) -> bool:
    """Whether the engine must clip: DeepSpeed's plain fp32 path does it without telling the norm."""
    return layout.zero == 0 and precision == "fp32"


def _check(layout: Layout) -> None:
    reason = broken_rule(framework(OWN).trainers["deepspeed"], layout)
    if reason is not None:
        raise RlhfsimError("deepspeed-layout", reason, help="rlhfsim frameworks shows what runs")
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        raise RlhfsimError(
            "deepspeed-nvme", "the executor does not offload to NVMe", help="use offload_optimizer: cpu"
        )
    if layout.offload_params != "none" and layout.zero != 3:
        raise RlhfsimError(
            "deepspeed-offload-params",
            f"parameters are offloaded by ZeRO-3 only, the layout has ZeRO-{layout.zero}",
            help="set zero: 3 or offload_params: none",
        )


def _zero(layout: Layout, optimizer: Optimizer | None, cuda: bool, trained: int | None) -> dict[str, Any]:
    """The section on ZeRO; communication overlaps with compute only where there are streams."""
    # without optimizer there is nothing that stages 1 and 2 could shard, and DeepSpeed refuses them
    stage = layout.zero if optimizer is not None or layout.zero == 3 else 0
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": cuda and stage >= 2,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(DEEPSPEED.reduce_bucket, trained or DEEPSPEED.reduce_bucket),
        "allgather_bucket_size": DEEPSPEED.allgather_bucket,
    }
    if layout.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": DEEPSPEED.prefetch if cuda else 0,
            "stage3_param_persistence_threshold": DEEPSPEED.persistent,
            "stage3_max_live_parameters": DEEPSPEED.live,
            "stage3_max_reuse_distance": DEEPSPEED.reuse,
            "sub_group_size": DEEPSPEED.sub_group,
        }
    if layout.offload_optimizer == "cpu" and optimizer is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if layout.offload_params == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    return zero
