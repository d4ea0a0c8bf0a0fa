"""What `fully_shard` is given, from a layout: a pure function, written with each run; the engine obeys it.

And what the engine does not do, known before anything starts.
"""

from __future__ import annotations

from typing import Any

from executor.engines.protocols import EngineSpec
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.placement.backends import broken_rule
from rlhfsim.specs.placement.layout import Layout


def fsdp2_config(spec: EngineSpec, *, cuda: bool) -> dict[str, Any]:
    """Mesh, precisions, offload and recomputation of an engine; nothing but names and numbers.

    `weights` is the precision of the shards, `mixed_precision` that of gathered weights and of reduced
    gradients (null: all as the shards), `gradients` that in which micro-batches are summed.
    """
    layout, trained = spec.layout, spec.optimizer is not None
    whole = trained and spec.lora_rank is None
    shards = shards_of(layout)
    mixed = {"param_dtype": "bf16", "reduce_dtype": "fp32"} if trained and spec.precision == "bf16" else None
    return {
        "mesh": {"replicate": layout.dp // shards, "shard": shards},
        "reshard_after_forward": layout.zero == 3,
        "weights": "fp32" if whole else spec.precision,
        "adapters": "fp32" if trained and spec.lora_rank is not None else None,
        "mixed_precision": mixed,
        "gradients": "fp32" if trained else None,
        "offload": {"pin_memory": cuda} if layout.offload_params == "cpu" else None,
        "recompute": layout.recompute == "full",
    }


def shards_of(layout: Layout) -> int:
    """Ranks that hold one copy together."""
    return (layout.shards or layout.dp) if layout.zero else 1


def check(spec: EngineSpec) -> None:
    """Refuse by name what the engine does not do.

    Raises:
        RlhfsimError: tensor or context parallelism, offload of half of the states, 8-bit Adam.
    """
    broken = broken_rule(framework(OWN).trainers["fsdp2"], spec.layout)
    if broken is not None:
        raise RlhfsimError(
            "fsdp2-layout", broken, help="use dp, recompute: none or full, offloads cpu or none"
        )
    if spec.optimizer_kind == "adam8bit":
        raise RlhfsimError(
            "fsdp2-adam8bit", "8-bit Adam does not know FSDP2's shards", help="use optimizer: adam"
        )
