"""The memory ledger: bytes per GPU of every role and component, phase by phase through one step.

A step starts where the previous one ended: weights synced, the engine's KV cache not yet mapped.
Then wake, generate, sleep, each scoring and training call between the moves that bring its role in
and out, and the sync, where training weights, rollout weights and transfer buffers are all held
at once (M9). The fullest GPU of a pool is shown: of the first or of the last pipeline stage.

Not known here: ranks that hold fewer bytes, and peaks of start and checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.memory.components import MemoryEntry
from rlhfsim.memory.kv_cache import EngineBytes, kv_bytes_per_token, rollout_weights
from rlhfsim.memory.residency import engine_in_plan, entries, plan_moments, pool_bytes, profile_of
from rlhfsim.memory.risk import Item, probability_above
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, RolloutPlacement
from rlhfsim.specs.workload.micro_batch import BatchLengths, batch_lengths
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import format


@frozen
class LedgerPhase:
    """One state of one pool."""

    name: str
    """`actor.generate`, `actor.train.load`, `start`, ..."""
    pool: str
    entries: tuple[MemoryEntry, ...]
    capacity: float
    """Bytes that the driver offers on a GPU of this pool."""
    doubt: float = 1.0
    """Deviation of the sum over that of its entries: above 1 far from measured peaks."""

    @property
    def bytes(self) -> float:
        """Sum of the entries."""
        return math.fsum(e.bytes for e in self.entries)

    @property
    def probability_out_of_memory(self) -> float:
        """P(sum of the entries > capacity), entries independent."""
        return self.risk()

    def risk(self, spread: float = 0.0) -> float:
        """P(sum of the entries > capacity) with a deviation of ln sum that no entry knows of."""
        items = [Item(e.bytes, e.low, e.high) for e in self.entries]
        return probability_above(items, self.capacity, self.doubt, spread)


@frozen
class EngineStart:
    """Whether the inference engine can start, and its KV cache."""

    pool: str
    kv_tokens: float
    """KV capacity of one replica."""
    needed_tokens: float
    """The longest sequence: the engine refuses to start when it does not fit."""
    probability_of_no_start: float


LIKELY = 0.5
"""Risk of running out of memory from which a plan does not count as fitting."""


@frozen
class Ledger:
    """Memory through one step."""

    phases: tuple[LedgerPhase, ...]
    host_bytes: dict[str, float]
    """Bytes per node of each pool: offloaded states, sleeping copies, processes."""
    host_capacity: dict[str, float]
    engine: EngineStart | None
    other_stages: tuple[LedgerPhase, ...] = ()
    """The pipeline stages that hold less in the same phases; one of them may be less certain."""

    @property
    def peak(self) -> LedgerPhase:
        """The phase that comes nearest to (or furthest beyond) its pool's capacity."""
        return max(self.phases, key=lambda p: p.bytes / p.capacity)

    def riskiest(self, spread: float = 0.0) -> LedgerPhase:
        """The phase that is most likely to exceed its GPU, see `LedgerPhase.risk`; of those the fullest."""
        return max(self.phases, key=lambda p: (round(p.risk(spread), 4), p.bytes / p.capacity))

    def breaks_in(self, likely: float) -> LedgerPhase:
        """Where a run ends: the first call of a step that is as likely as this to exceed its GPU.

        Where none is, the phase that is most likely to.
        """
        calls = (p for p in self.phases if p.name.count(".") == 1 and p.probability_out_of_memory >= likely)
        return next(calls, self.riskiest())

    @property
    def peak_entry(self) -> MemoryEntry:
        """The largest entry at the peak: whose and which component."""
        return max(self.peak.entries, key=lambda e: e.bytes)

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
        """Probability that some phase exceeds its GPU or that the engine does not start."""
        return self.risk()

    def risk(self, spread: float = 0.0) -> float:
        """The worst probability of all phases and of the engine's start, see `LedgerPhase.risk`.

        Their errors are the same, so they do not add up.
        """
        looked_at = {(id(p.entries), p.pool): p for p in (*self.phases, *self.other_stages)}
        worst = max((p.risk(spread) for p in looked_at.values()), default=0.0)
        return max(worst, self.engine.probability_of_no_start if self.engine else 0.0)

    @property
    def fits(self) -> bool:
        """Whether GPU, engine and host hold the plan, more likely than not."""
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
                f"actor.generate: the rollout engine has KV cache for {self.engine.kv_tokens:.0f} tokens, the"
                f" longest sequence has {self.engine.needed_tokens:.0f}"
            )
        for pool, held in self.host_bytes.items():
            if held > self.host_capacity[pool]:
                offered = format(self.host_capacity[pool], "byte")
                return f"pool {pool} needs {format(held, 'byte')} of {offered} host memory per node"
        if (chance := self.probability_out_of_memory) >= LIKELY:
            phase = self.breaks_in(LIKELY)
            return (
                f"{phase.name} needs {format(phase.bytes, 'byte')} of {format(phase.capacity, 'byte')}"
                f" per GPU in pool {phase.pool}, with a risk of {chance:.0%} of running out of memory"
            )
        return None


# --- the ledger -----------------------------------------------------------------------------------


def ledger(
    models: Models, placement: Placement, workload: Workload, cluster: Cluster, *, doubt: float = 1.0
) -> Ledger:
    """Memory of a plan through one step; `doubt`: see `step.measured.memory_doubt`.

    A trainer that lends its GPUs holds what it would with an engine that sleeps there and wakes.
    """
    if placement.schedule.lend:
        own = replace(placement, schedule=replace(placement.schedule, lend=False))
        ledgers = [ledger(models, each, workload, cluster, doubt=doubt) for each in (own, placement.lent)]
        return _with_lent(*ledgers, pool=placement.actor.pool)
    pools = {p.name: pool_bytes(models, placement, workload, cluster, p.name) for p in placement.pools}
    phases: list[LedgerPhase] = []
    others: list[LedgerPhase] = []
    alike: dict[object, list[tuple[MemoryEntry, ...]]] = {}
    """The entries of moments that differ in nothing but their name."""
    for moment in plan_moments(placement, workload):
        for pool, held in pools.items():
            if pool in moment.pools:
                capacity = held.profile.usable_memory.value
                state = pool, replace(moment, name="")
                alike[state] = alike.get(state) or entries(held, moment)
                stages = [
                    LedgerPhase(name=moment.name, pool=pool, entries=every, capacity=capacity, doubt=doubt)
                    for every in alike[state]
                ]
                fullest = max(stages, key=lambda p: p.bytes)
                phases.append(fullest)
                others += [p for p in stages if p is not fullest]
    return Ledger(
        phases=tuple(phases),
        host_bytes=host_bytes(placement, cluster, {name: held.host for name, held in pools.items()}),
        host_capacity={name: held.profile.node.host_memory.value for name, held in pools.items()},
        engine=_engine_start(models, placement, workload, cluster),
        other_stages=tuple(others),
    )


def _with_lent(own: Ledger, lent: Ledger, *, pool: str) -> Ledger:
    """The ledger of a plan, with that of its trainer's pool while an engine is there."""

    def merged(ours: tuple[LedgerPhase, ...], theirs: tuple[LedgerPhase, ...]) -> tuple[LedgerPhase, ...]:
        return (*(p for p in ours if p.pool != pool), *(p for p in theirs if p.pool == pool))

    return replace(
        own,
        phases=merged(own.phases, lent.phases),
        other_stages=merged(own.other_stages, lent.other_stages),
        host_bytes={name: max(size, lent.host_bytes[name]) for name, size in own.host_bytes.items()},
    )


def _engine_start(
    models: Models, placement: Placement, workload: Workload, cluster: Cluster
) -> EngineStart | None:
    rollout = placement.rollout
    if rollout is None or not workload.generates:
        return None
    profile = profile_of(placement, cluster, rollout.pool)
    held, batch = engine_in_plan(models, placement, workload, profile), batch_lengths(workload)
    return EngineStart(
        pool=rollout.pool,
        kv_tokens=held.kv_tokens,
        needed_tokens=batch.max_tokens,
        probability_of_no_start=no_start(models, rollout, profile, held, batch),
    )


def no_start(
    models: Models, rollout: RolloutPlacement, profile: Profile, held: EngineBytes, batch: BatchLengths
) -> float:
    """P(weights, reserves and one longest sequence exceed the engine's share)."""

    def item(size: float, coefficient: str) -> Item:
        c = profile.coefficient(coefficient)
        return Item(size, size * c.low / c.value, size * c.high / c.value) if size else Item(0.0, 0.0, 0.0)

    one = batch.max_tokens * kv_bytes_per_token(models.actor, rollout.layout)
    weights = rollout_weights(models.actor, rollout.layout)
    items = (
        Item(weights, weights * 0.99, weights * 1.02),
        item(held.profile_peak, "sampler_bytes_per_logit"),
        item(held.non_torch, "vllm_non_torch_bytes"),
        item(held.cuda_graphs, "cuda_graph_bytes"),
        Item(one, one, one),
    )
    return probability_above(items, rollout.layout.memory_utilization * profile.usable_memory.value)


def host_bytes(placement: Placement, cluster: Cluster, each: Mapping[str, float]) -> dict[str, float]:
    """Host bytes on the fullest node under each pool (M10), with the other pools of that node.

    `each`: pool -> bytes for each of its GPUs.
    """
    held = {}
    for pool in placement.pools:
        size = cluster.node_groups[pool.hardware].gpus_per_node
        nodes = {pool.start // size, (pool.start + size) // size, (pool.start + pool.gpus - 1) // size}
        held[pool.name] = max(
            sum(each[p.name] * p.gpus_on(pool.hardware, node, size) for p in placement.pools)
            for node in nodes
            if pool.gpus_on(pool.hardware, node, size)
        )
    return held
