"""Which dispatcher brings tokens to their experts: the cheapest that the framework of a question runs.

A choice for each layout rather than one more dimension of the space: it changes no memory that is priced, and
nothing but the exchange. Without a framework, or where it runs none of them, the dispatcher stays open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlhfsim.kernels.collectives import dispatch
from rlhfsim.kernels.device import Device, group
from rlhfsim.kernels.devices import device_on
from rlhfsim.kernels.routing import routing_of
from rlhfsim.rollout.collective_time import exchange
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.mixers import BF16
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Dispatcher, RolloutLayout

TRAINED_TOKENS = 4096.0
"""Tokens of a GPU that the dispatchers of a training layout are compared at."""
DECODED_ROWS = 64.0
"""Sequences of an attention group that those of a rollout are compared at."""


def training_dispatcher(request: Request, model: ModelSpec, ep: int) -> Dispatcher | None:
    """The dispatcher of a training layout with `ep` ranks of experts; None: left open."""
    if request.runs is None or ep == 1 or model.moe is None or request.backend != "megatron":
        return None
    device = device_on(request.cluster, 0, request.backend)
    return _fastest(device, model, ep, request.runs.dispatchers)


@lru_cache(maxsize=1024)
def _fastest(device: Device, model: ModelSpec, ep: int, names: tuple[Dispatcher, ...]) -> Dispatcher | None:
    assert model.moe is not None
    ranks, size, routing = group(ep, 1, device.domain), BF16 * model.expert_width, routing_of(model.moe)

    def seconds(by: Dispatcher) -> float:
        return float(dispatch(device, TRAINED_TOKENS, size, routing, ranks, by=by))

    return min(_running(device, ep, names), key=seconds, default=None)


def rollout_dispatcher(
    request: Request, model: ModelSpec, layout: RolloutLayout, pool: NodeGroup
) -> Dispatcher | None:
    """The dispatcher of a rollout layout; None: left open, or tokens are on every GPU anyway."""
    if "dispatcher" in (fixed := request.fix.get("rollout", {})):
        return fixed["dispatcher"]  # type: ignore[return-value]  # checked where options are read
    if request.runs is None or not layout.open_dispatcher:
        return None
    device = device_on(request.cluster, request.cluster.node_groups.index(pool), request.backend)
    return _fastest_rollout(device, model, replace(layout, dp=1), request.runs.rollout_dispatchers)


@lru_cache(maxsize=1024)
def _fastest_rollout(
    device: Device, model: ModelSpec, layout: RolloutLayout, names: tuple[Dispatcher, ...]
) -> Dispatcher | None:
    def seconds(by: Dispatcher) -> float:
        step = exchange(device, model, replace(layout, dispatcher=by), np.asarray(DECODED_ROWS))
        return float(step.seconds)

    return min(_running(device, layout.ep, names), key=seconds, default=None)


def _running(device: Device, ranks: int, names: Iterable[Dispatcher]) -> list[Dispatcher]:
    """Those that run on the GPUs: DeepEP and HybridEP need NVLink and GPUs with FP8 (Hopper and later), and
    across domains a network that GPUs write to themselves (not EFA).
    """
    profile = device.profile
    hopper = profile.vendor == "nvidia" and profile.scale_up.kind == "nvlink" and "fp8" in profile.peak
    reached = ranks <= device.domain or device.fabric != "efa"
    return [name for name in names if name in ("alltoall", "allgather") or (hopper and reached)]
