"""Seconds below which no option of a role comes, known before any of them is priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.kernels.device import Device
from rlhfsim.search.least import Floor
from rlhfsim.search.options import ALONE, PriceKey
from rlhfsim.search.pricer import Pricer
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.step.calls import CallSetting, bias_of, stack_of
from rlhfsim.step.speed_of_light import limit_of
from rlhfsim.training.passes import kernel_rates


def floor_of(pricer: Pricer, key: PriceKey) -> Floor:
    """The FLOP of the calls of a role at the speed that kernels keep, and what its framework adds to each
    call; nothing for a rollout.

    What was measured of a phase scales it, as it scales the price.
    """
    seconds = {"train": 0.0, "forward": 0.0}
    alone = RolePlacement(pool=ALONE, layout=Layout(dp=key.gpus))
    setting = pricer.setting(key)
    roles: dict[str, Any] = {} if key.role == "rollout" else {key.role: alone}
    setting = replace(setting, placement=replace(setting.placement, **roles))
    device, workload = setting.device(alone), setting.workload
    own = device["rl_call_time"] if workload.generates else 0.0
    for call in pricer.calls_of(key.role):
        limit = (limit_of(setting, call, None) or 0.0) / kept_speed(setting, device)
        kind, times = ("train", workload.epochs) if call.kind == "train" else ("forward", 1)
        seconds[kind] += min(1.0, bias_of(setting, call.name, ALONE)) * (limit + times * own)
    return Floor(
        key=key, options=lambda: pricer.legal(key), ready=seconds["forward"], training=seconds["train"]
    )


def kept_speed(setting: CallSetting, device: Device) -> float:
    """Most of its peak that a GPU keeps up in a training step."""
    software = stack_of(setting)
    products, cores = kernel_rates(device, software)
    if setting.workload.train_precision != "bf16":
        products *= device["training_fp8_gain"] * device[f"fp8_speed_{software.stack}"]
    return min(1.0, max(products, cores))
