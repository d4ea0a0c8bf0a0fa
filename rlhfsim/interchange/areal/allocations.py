"""AReaL's allocations, as `megatron:d4p2t2e8`, or `fsdp:d8c2` (1.0.4: areal/api/alloc_mode.py)."""

from __future__ import annotations

import math
import re

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout


def degrees_of(spelled: str) -> dict[str, int]:
    """`megatron:(attn:d4t4|ffn:d2t2e4)` -> degrees of attention, together with those of the experts.

    Raises:
        RlhfsimError: it is no allocation.
    """
    attention, _, experts = spelled.partition("|")
    parts = re.fullmatch(r"(?:\w+:)?\(?(?:attn:)?((?:[dptce]0*[1-9][0-9]{0,6})+)\)?", attention.strip())
    beside = re.fullmatch(r"(?:ffn:)?((?:[dpte]0*[1-9][0-9]{0,6})+)\)", experts.strip())
    if parts is None or (experts and beside is None):
        raise RlhfsimError(
            "bad-setting",
            f"{spelled!r} is no allocation",
            help="write it as megatron:d4p2t2e8, fsdp:d8c2 or megatron:(attn:d4t4|ffn:d2t2e4)",
        )
    sizes = {name: int(size) for name, size in re.findall(r"([dptce])(\d+)", parts[1])}
    if beside is not None:
        cut = {name: int(size) for name, size in re.findall(r"([dpte])(\d+)", beside[1])}
        sizes |= {"e": cut.get("e", 1), "etp": cut.get("t", 1)}
    return sizes


def gpus_of(spelled: str) -> int:
    """GPUs of an allocation."""
    return math.prod(size for name, size in degrees_of(spelled).items() if name in "dptc")


def allocation(layout: Layout, *, megatron: bool) -> str:
    """AReaL's `fsdp:d8c2`, `megatron:d4p2t2e8`, or attention and experts apart where experts are cut too."""
    degrees = {"d": layout.dp, "p": layout.pp, "t": layout.tp, "c": layout.cp}
    if not megatron:
        return "fsdp:" + spelled({name: size for name, size in degrees.items() if name != "p"})
    if layout.etp == 1:
        return "megatron:" + spelled({**degrees, "e": layout.ep})
    copies = layout.gpus // (layout.pp * layout.etp * layout.ep)
    experts = {"d": copies, "p": layout.pp, "t": layout.etp, "e": layout.ep}
    return f"megatron:(attn:{spelled(degrees)}|ffn:{spelled(experts)})"


def spelled(degrees: dict[str, int]) -> str:
    """`d8c2`: degrees above 1, and the data-parallel one."""
    return "".join(f"{name}{size}" for name, size in degrees.items() if size > 1 or name == "d")
