"""The memory ledger: bytes per GPU of every role and component, phase by phase through one step.

A step starts where the previous one ended: weights synced, the engine's KV cache not yet mapped.
Then wake, generate, sleep, each scoring and training call between the moves that bring its role in
and out, and the sync, where training weights, rollout weights and transfer buffers stand side by
side (M9). The fullest GPU of a pool is shown: of the first or of the last pipeline stage.

Not known here: ranks that hold fewer bytes, and peaks of start and checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlhfsim.memory.kv_cache import kv_bytes_per_token, rollout_weights
from rlhfsim.memory.residency import (
    Entry,
    Moment,
    PoolBytes,
    engine_in_plan,
    entries,
    moments,
    pool_bytes,
    profile_of,
    stages_of,
)
from rlhfsim.memory.risk import Item, probability_above
from rlhfsim.memory.role_bytes import DEFAULT_STACK, Batch, EngineBytes, Stack, batch_of
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import format

__all__ = ["Engine", "Entry", "Ledger", "Phase", "host_bytes", "ledger", "no_start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One state of one pool."""

    name: str
    """`actor.generate`, `actor.train.load`, `start`, ..."""
    pool: str
    entries: tuple[Entry, ...]
    capacity: float
    """Bytes that the driver offers on a GPU of this pool."""

    @property
    def bytes(self) -> float:
        """Sum of the entries."""
        return math.fsum(e.bytes for e in self.entries)

    @property
    def largest(self) -> Entry | None:
        """The entry that matters most."""
        return max(self.entries, key=lambda e: e.bytes, default=None)

    @property
    def probability_out_of_memory(self) -> float:
        """P(sum of the entries > capacity), entries independent."""
        items = [Item(value=e.bytes, low=e.low, high=e.high) for e in self.entries]
        return probability_above(items, self.capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Whether the inference engine can start, and its KV cache."""

    pool: str
    kv_tokens: float
    """KV capacity of one replica."""
    needed_tokens: float
    """The longest sequence: the engine refuses to start when it does not fit."""
    probability_of_no_start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Memory through one step."""

    phases: tuple[Phase, ...]
    host_bytes: dict[str, float]
    """Bytes per node of each pool: offloaded states, sleeping copies, processes."""
    host_capacity: dict[str, float]
    engine: Engine | None
    other_stages: tuple[Phase, ...] = ()
    """The pipeline stages that hold less in the same phases; one of them may be less certain."""

    @property
    def peak(self) -> Phase:
        """The phase that comes nearest to (or furthest beyond) its pool's capacity."""
        return max(self.phases, key=lambda p: p.bytes / p.capacity)

    @property
    def peak_entry(self) -> Entry:
        """The largest entry at the peak: whose and which component."""
        largest = self.peak.largest
        assert largest is not None
        return largest

    @property
    def peak_bytes(self) -> float:
        """Bytes per GPU at the peak."""
        return self.peak.bytes

    @property
    def kv_tokens(self) -> float | None:
        """KV capacity of one rollout replica, tokens; None without a rollout."""
        return self.engine.kv_tokens if self.engine else None

    @property
    def host_peak_bytes(self) -> float:
        """Host bytes of the fullest node."""
        return max(self.host_bytes.values(), default=0.0)

    @property
    def probability_out_of_memory(self) -> float:
        """Probability that some phase exceeds its GPU or that the engine does not start.

        The worst of them: their errors are the same, so they do not add up.
        """
        looked_at = (*self.phases, *self.other_stages)
        worst = max((p.probability_out_of_memory for p in looked_at), default=0.0)
        return max(worst, self.engine.probability_of_no_start if self.engine else 0.0)

    @property
    def fits(self) -> bool:
        """Whether the central values fit on GPU and host and the engine starts."""
        return self.rejected_by is None

    @property
    def rejected_by(self) -> str | None:
        """What does not fit, in words; None when all does."""
        peak = self.peak
        if peak.bytes > peak.capacity:
            who = self.peak_entry
            return (
                f"{peak.name} needs {format(peak.bytes, 'byte')} of {format(peak.capacity, 'byte')}"
                f" per GPU in pool {peak.pool}, {format(who.bytes, 'byte')} of it"
                f" {who.role} {who.component.replace('_', ' ')}"
            )
        if self.engine and self.engine.kv_tokens < self.engine.needed_tokens:
            return (
                f"the rollout engine has KV cache for {self.engine.kv_tokens:.0f} tokens, the"
                f" longest sequence has {self.engine.needed_tokens:.0f}"
            )
        for pool, held in self.host_bytes.items():
            if held > self.host_capacity[pool]:
                offered = format(self.host_capacity[pool], "byte")
                return f"pool {pool} needs {format(held, 'byte')} of {offered} host memory per node"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, one record an entry."""
        return {
            "peak": {
                "phase": self.peak.name,
                "pool": self.peak.pool,
                "bytes": self.peak_bytes,
                "role": self.peak_entry.role,
                "component": self.peak_entry.component,
                "capacity_bytes": self.peak.capacity,
            },
            "fits": self.fits,
            "rejected_by": self.rejected_by,
            "probability_out_of_memory": self.probability_out_of_memory,
            "kv_tokens": self.kv_tokens,
            "host_bytes_per_node": self.host_bytes,
            "entries": [
                {
                    "phase": p.name,
                    "pool": p.pool,
                    "role": e.role,
                    "component": e.component,
                    "bytes": e.bytes,
                    "low_bytes": e.low,
                    "high_bytes": e.high,
                }
                for p in self.phases
                for e in p.entries
            ],
        }


# --- the ledger -----------------------------------------------------------------------------------


def ledger(
    models: Models,
    placement: Placement,
    workload: Workload,
    cluster: Cluster,
    *,
    stack: Stack = DEFAULT_STACK,
) -> Ledger:
    """Memory of a plan through one step; `stack` says where a framework differs from its backend."""
    states = list(moments(placement, workload))
    phases: dict[tuple[int, str], Phase] = {}
    others: list[Phase] = []
    for pool in placement.pools:
        views = [
            _pool_phases(pool_bytes(models, placement, workload, cluster, pool.name, stage, stack), states)
            for stage in stages_of(placement, pool.name)
        ]
        fullest = {key: max((v[key] for v in views), key=_bytes) for key in views[0]}
        others += [v[key] for v in views for key in v if v[key] is not fullest[key]]
        phases.update(fullest)
    return Ledger(
        phases=tuple(phases[key] for key in sorted(phases, key=lambda k: k[0])),
        host_bytes=host_bytes(models, placement, workload, cluster),
        host_capacity={
            p.name: profile_of(placement, cluster, p.name).node.host_memory.value for p in placement.pools
        },
        engine=_engine(models, placement, workload, cluster),
        other_stages=tuple(others),
    )


def _bytes(phase: Phase) -> float:
    return phase.bytes


def _pool_phases(held: PoolBytes, states: list[Moment]) -> dict[tuple[int, str], Phase]:
    return {
        (i, held.name): Phase(
            name=m.name,
            pool=held.name,
            entries=tuple(entries(held, m)),
            capacity=held.profile.usable_memory.value,
        )
        for i, m in enumerate(states)
        if held.name in m.pools
    }


def _engine(models: Models, placement: Placement, workload: Workload, cluster: Cluster) -> Engine | None:
    rollout = placement.rollout
    if rollout is None or not workload.generates:
        return None
    profile = profile_of(placement, cluster, rollout.pool)
    held = engine_in_plan(models, placement, workload, profile)
    batch = batch_of(workload)
    return Engine(
        pool=rollout.pool,
        kv_tokens=held.kv_tokens,
        needed_tokens=batch.max_tokens,
        probability_of_no_start=no_start(models, rollout, profile, held, batch),
    )


def no_start(
    models: Models, rollout: RolloutPlacement, profile: Profile, held: EngineBytes, batch: Batch
) -> float:
    """P(weights, reserves and one longest sequence exceed the engine's share)."""
    sampler = profile.coefficient("sampler_bytes_per_logit")
    spread = profile.coefficient("vllm_non_torch_bytes")
    one = batch.max_tokens * kv_bytes_per_token(models.actor, rollout.layout)
    weights, peak = rollout_weights(models.actor, rollout.layout), held.profile_peak
    items = [
        Item(value=weights, low=weights * 0.99, high=weights * 1.02),
        Item(value=peak, low=peak * sampler.low / sampler.value, high=peak * sampler.high / sampler.value),
        Item(
            value=held.non_torch,
            low=held.non_torch * spread.low / spread.value,
            high=held.non_torch * spread.high / spread.value,
        ),
        Item(value=one, low=one, high=one),
    ]
    return probability_above(items, rollout.layout.memory_utilization * profile.usable_memory.value)


def host_bytes(
    models: Models, placement: Placement, workload: Workload, cluster: Cluster
) -> dict[str, float]:
    """Host bytes on the fullest node under each pool (M10), with the other pools of that node.

    Offloaded states, sleeping copies, processes.
    """
    each = {p.name: _host_per_gpu(models, placement, workload, cluster, p) for p in placement.pools}
    held = {}
    for pool in placement.pools:
        size = cluster.node_groups[pool.hardware].gpus_per_node
        nodes = {pool.start // size, (pool.start + size) // size, (pool.start + pool.gpus - 1) // size}
        held[pool.name] = max(
            sum(each[p.name] * _gpus_on(p, pool.hardware, node, size) for p in placement.pools)
            for node in nodes
            if _gpus_on(pool, pool.hardware, node, size)
        )
    return held


def _gpus_on(pool: ResourcePool, hardware: int, node: int, size: int) -> int:
    """GPUs of a pool on one node."""
    if pool.hardware != hardware:
        return 0
    first, last = node * size, (node + 1) * size
    return max(0, min(last, pool.start + pool.gpus) - max(first, pool.start))


def _host_per_gpu(
    models: Models, placement: Placement, workload: Workload, cluster: Cluster, pool: ResourcePool
) -> float:
    stage = stages_of(placement, pool.name)[0]
    view = pool_bytes(models, placement, workload, cluster, pool.name, stage)
    processes = sum(r.framework > 0 for r in view.roles.values()) + (view.engine is not None)
    own = sum(r.host for r in view.roles.values()) + (view.engine.host if view.engine else 0.0)
    return own + processes * view.profile["host_process_bytes"]
