"""Seconds below which no option of a role comes, known before any of them is priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.search.least import Floor
from rlhfsim.search.options import ALONE, PriceKey
from rlhfsim.search.pricer import Pricer
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.step.calls import bias_of
from rlhfsim.step.speed_of_light import limit_of


def floor_of(pricer: Pricer, key: PriceKey) -> Floor:
    """The FLOP of the calls of a role at the peak of its GPUs; nothing for a rollout.

    What was measured of a phase scales it, as it scales the price.
    """
    seconds = {"train": 0.0, "forward": 0.0}
    alone = RolePlacement(pool=ALONE, layout=Layout(dp=key.gpus))
    setting = pricer.setting(key)
    roles: dict[str, Any] = {} if key.role == "rollout" else {key.role: alone}
    setting = replace(setting, placement=replace(setting.placement, **roles))
    for call in pricer.calls_of(key.role):
        limit = limit_of(setting, call, None) or 0.0
        kind = "train" if call.kind == "train" else "forward"
        seconds[kind] += min(1.0, bias_of(setting, call.name, ALONE)) * limit
    return Floor(
        key=key, options=lambda: pricer.legal(key), ready=seconds["forward"], training=seconds["train"]
    )
