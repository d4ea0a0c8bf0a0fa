"""What the engine on FSDP2 does not do, known before anything starts."""

from __future__ import annotations

from executor.engines.protocols import EngineSpec
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.backends import violation


def check(spec: EngineSpec) -> None:
    """Refuse by name what the engine does not do.

    Raises:
        RlhfsimError: tensor or context parallelism, offload of half of the states, 8-bit Adam.
    """
    layout = spec.layout
    broken = violation("fsdp2", layout)
    if broken is None and layout.tp * layout.cp > 1:
        broken = f"FSDP2 is run without tensor and context parallelism, the layout has {layout.label}"
    if broken is None and layout.recompute == "selective":
        broken = "FSDP2 is run without selective recompute"
    if broken is not None:
        raise RlhfsimError("fsdp2-layout", broken, help="use dp, and recompute: none or full")
    if spec.optimizer is not None and layout.offload_optimizer != layout.offload_params:
        raise RlhfsimError(
            "fsdp2-offload",
            "FSDP2 offloads weights and optimizer states together, the layout has "
            f"offload_optimizer={layout.offload_optimizer} and offload_params={layout.offload_params}",
            help="set both to cpu or both to none",
        )
    if spec.optimizer_kind == "adam8bit":
        raise RlhfsimError(
            "fsdp2-adam8bit", "8-bit Adam does not know FSDP2's shards", help="use optimizer: adam"
        )
