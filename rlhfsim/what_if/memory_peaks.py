"""The fullest instant of a plan on every GPU pool and node: each call and move on the clock, and the saves.

Start-up holds no more than these: roles are built one by one as a training call holds them, and the engine's
profile run counts as its rollout.
"""

from __future__ import annotations

import math

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import Ledger
from rlhfsim.memory.residency import Moment, entries, pool_bytes
from rlhfsim.simulation.memory_timeline import PoolPeak
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.units import format
from rlhfsim.what_if.estimate import priced_placement


@frozen
class MemoryPeaks:
    """What a plan holds at its fullest."""

    gpus: tuple[PoolPeak, ...]
    """Peak of each pool."""
    host_bytes: float
    """On the fullest node, against `host_capacity`."""
    host_capacity: float


def memory_peaks(placement: Placement, workload: Workload, cluster: Cluster) -> MemoryPeaks:
    """The fullest instants of a placement.

    Raises:
        RlhfsimError: "out-of-memory", with the first instant that a GPU or a host does not hold.
    """
    priced = priced_placement(placement, workload, cluster)
    ran = simulate(priced.setting, priced.kv_tokens, record="strict")
    if (reason := priced.memory.rejected_by) is not None:
        raise _too_much(reason)
    saves = _saves(priced.setting)
    for save in saves:
        if save.bytes > save.capacity:
            held, offered = (format(size, "byte") for size in (save.bytes, save.capacity))
            raise _too_much(f"{save.name} needs {held} of {offered} per GPU in pool {save.pool}")
    return MemoryPeaks(gpus=_fullest((*ran.peaks, *saves)), **_host(priced.memory))


def _too_much(reason: str) -> RlhfsimError:
    return RlhfsimError(
        "out-of-memory",
        reason,
        help="offload a role between its calls, shard further, or give the pool more GPUs",
    )


def _saves(setting: CallSetting) -> tuple[PoolPeak, ...]:
    """Each trained role with its states in GPU memory; the rollout engine rests meanwhile, as in a launch."""
    placement, workload = setting.placement, setting.workload
    saved = []
    for role in TRAINED:
        if role not in placement.roles:
            continue
        pool = placement.roles[role].pool
        held = pool_bytes(setting.models, placement, workload, setting.cluster, pool)
        name = f"{role}.save"
        moment = Moment(name=name, pools=(pool,), role=role, state="train", moving=True)
        size = max(math.fsum(entry.bytes for entry in stage) for stage in entries(held, moment))
        capacity = held.profile.usable_memory.value
        saved.append(PoolPeak(pool=pool, time=math.nan, name=name, bytes=size, capacity=capacity))
    return tuple(saved)


def _fullest(peaks: tuple[PoolPeak, ...]) -> tuple[PoolPeak, ...]:
    pools = dict.fromkeys(peak.pool for peak in peaks)
    return tuple(max((p for p in peaks if p.pool == pool), key=lambda p: p.bytes) for pool in pools)


def _host(memory: Ledger) -> dict[str, float]:
    pool = max(memory.host_bytes, key=lambda name: memory.host_bytes[name] / memory.host_capacity[name])
    return {"host_bytes": memory.host_bytes[pool], "host_capacity": memory.host_capacity[pool]}
