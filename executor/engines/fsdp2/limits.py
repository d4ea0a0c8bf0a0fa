"""What the engine on FSDP2 does not do, known before anything starts."""

from __future__ import annotations

from executor.engines.protocols import EngineSpec
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.placement.backends import broken_rule


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
