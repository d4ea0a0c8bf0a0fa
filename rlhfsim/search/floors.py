"""Seconds below which no option of a role comes, known before any of them is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.flop import forward_flop
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.memory.states import CUT
from rlhfsim.search.fitting_options import memory_of
from rlhfsim.search.layout_shapes import CutShapes, LayoutShape
from rlhfsim.search.least import Floor
from rlhfsim.search.options import PriceKey
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.role_rows import ALONE
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.step.calls import CallSetting, bias_of, stack_of
from rlhfsim.step.framework_overhead import launched_layers
from rlhfsim.step.speed_of_light import limit_of
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.passes import host_time, kernel_rates
from rlhfsim.training.training import micro_batches


def floor_of(pricer: Pricer, key: PriceKey, *, close: bool = False) -> Floor:
    """What the calls of a role take at least in any of its layouts; nothing for a rollout.

    The FLOP, and what its framework adds to each call; `close`: also the bubble of its pipeline and what its
    host launches, in the best cut whose weights fit.

    What was measured of a phase scales it, as it scales the price.
    """
    seconds = {"train": 0.0, "forward": 0.0}
    alone = RolePlacement(pool=ALONE, layout=Layout(dp=key.gpus))
    setting = pricer.setting(key)
    roles: dict[str, Any] = {} if key.role == "rollout" else {key.role: alone}
    setting = replace(setting, placement=replace(setting.placement, **roles))
    device = setting.device(alone)
    blocks = _held(pricer, key) if close and key.role != "rollout" else []
    for call in pricer.calls_of(key.role):
        floor, kind = _CallFloor.of(setting, call, device), "train" if call.kind == "train" else "forward"
        one = max(floor.of_any(), floor.of_cuts(blocks) if blocks else 0.0)
        seconds[kind] += min(1.0, bias_of(setting, call.name, ALONE)) * (one if one < inf else floor.of_any())
    return Floor(
        key=key, options=lambda: pricer.legal(key), ready=seconds["forward"], training=seconds["train"]
    )


def _held(pricer: Pricer, key: PriceKey) -> list[CutShapes]:
    """Cuts of a role, the leanest shape of which fits into a GPU whatever its micro-batch."""
    memory, profile = memory_of(pricer.request, pricer.models, key), pricer.hardware(key).profile
    blocks = [block for block in pricer.blocks(key) if block.shapes.fields]
    if blocks and not memory.borrowed and not key.beside_actor:  # else the actor's weights, or its place
        cuts = [LayoutShape({**block.shapes.leanest, "dp": block.dp}, ()).cut for block in blocks]
        usable = (
            profile.usable_memory.value + len(CUT) * profile["nccl_bytes"]
        )  # others may have fewer groups
        blocks = [blocks[i] for i in np.flatnonzero(memory.standing_bytes(cuts) <= usable)]
    return blocks


class _CallFloor(NamedTuple):
    """What a call of a role takes at least, and a pass over its data."""

    setting: CallSetting
    call: Call
    device: Device
    sequences: Sequences
    steps: int
    epochs: int
    flop_s: float
    """Seconds of the FLOP of one optimizer step, or of a forward, at the speed that kernels keep up."""
    again_s: float
    """Seconds of the forward of one optimizer step."""
    host_s: float
    """In which a host launches one direction of all layers."""
    layers: int

    @classmethod
    def of(cls, setting: CallSetting, call: Call, device: Device) -> _CallFloor:
        """Floor of a call in a setting that places its role on all GPUs of a pool."""
        work, model, train = setting.workload, setting.models.of(call.role), call.kind == "train"
        steps, epochs = (work.mini_batches, work.epochs) if train else (1, 1)
        kept, gpus = kept_speed(setting, device), setting.placement.roles[call.role].layout.gpus
        frozen = work.lora is not None and call.role == "actor"
        graphs = stack_of(setting).graphs
        launches = min(
            sum(kind.layers * host_time(device, graphs, kind=kind) for kind in one.kinds)
            for one in model.each
        )
        ahead = forward_flop(model, sequences_of(replace(work, packing=True)))
        return cls(
            setting,
            call,
            device,
            sequences_of(work, setting.trained),
            steps,
            epochs,
            (limit_of(setting, call, None) or 0.0) / kept / epochs / steps,
            ahead / (gpus * device.peak(work.train_precision)) / kept / steps,
            launches * (2 if frozen else 1),
            round(model.launched_layers),
        )

    def of_any(self) -> float:
        """In any layout: its FLOP, and what its framework adds to the call."""
        own = self.device["rl_call_time"] if self.setting.workload.generates else 0.0
        return self.epochs * (self.steps * self.flop_s + own)

    def of_cuts(self, blocks: Sequence[CutShapes]) -> float:
        """In any layout of some cuts; inf where there is none.

            T >= n max(F, m H / p) (1 + (p - 1) / (v m)) + c + n m h

        n optimizer steps of m micro-batches, p stages of v chunks, F seconds of the FLOP of a step, H and h
        of a host that launches all layers, alone and inside an RL framework, c of one that calls. Source:
        `pipeline.makespan`, whose slowest stage is no faster than the mean one; `framework_call`.
        """
        train, work = self.call.kind == "train", self.setting.workload
        outlines = [list(block.outlines) for block in blocks]
        if not any(outlines):
            return inf
        layouts = columns_of(chain.from_iterable(outlines))
        most = [max((vp for vp, *_ in block.shapes.homes), default=1) if train else 1 for block in blocks]
        chunks = np.repeat(most, list(map(len, outlines)))
        again = (layouts.recompute == "full") & train
        flop = self.flop_s + np.where(again, self.again_s, 0.0)
        packs = pack_len(work, layouts, self.setting.trained, scoring=not train)
        count = micro_batches(layouts, self.sequences, self.steps, packs, scoring=not train)[1]
        host = count * self.host_s * (2 + again if train else 1) / layouts.pp
        one = self.steps * np.maximum(flop, host) * (1 + (layouts.pp - 1) / (chunks * count))
        if work.generates:
            launched = launched_layers(layouts, self.layers, self.steps * count, trained=train)
            one += self.device["rl_call_time"] + launched * self.device["rl_layer_time"]
        return float(self.epochs * one.min())


def kept_speed(setting: CallSetting, device: Device) -> float:
    """Most of its peak that a GPU keeps up in a training step."""
    software = stack_of(setting)
    products, cores = kernel_rates(device, software)
    if setting.workload.train_precision != "bf16":
        products *= device["training_fp8_gain"] * device[f"fp8_speed_{software.stack}"]
    return min(1.0, max(products, cores))
