"""Memory at every instant: bytes on the fullest GPU of each pool and on each node of the host.

The moments and components of `memory.residency`, put on the clock. A pool's state is what the engine does
(asleep, awake, running) and which calls hold a role in GPU memory: its bytes are those of the pool
at rest plus what each call adds. While a role moves out it is still there; when it moves in its
bytes are there from the start (M9).

    memory_timeline = timeline_of(setting, strict=True)         # raises where memory runs out
    memory_timeline.begin("actor.train.load", now); memory_timeline.end("actor.train.load", now); ...
    memory_timeline.level("trainer"), memory_timeline.peaks()

Names are those of the program's steps. Host memory: offloaded states, sleeping copies and processes
(M10, `memory.ledger.host_bytes`) all the time, the buffers of a weight sync while it runs.

Not known here: allocator caches that outlive a call, and start-up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.memory.components import EngineState, MemoryEntry
from rlhfsim.memory.ledger import host_bytes
from rlhfsim.memory.residency import Moment, entries, plan_moments, pool_bytes
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import ROLLOUT, SYNC
from rlhfsim.units import format


@frozen
class PoolPeak:
    """The fullest instant of a pool."""

    pool: str
    time: float
    name: str
    """The call that began then; `start` at the start."""
    bytes: float
    capacity: float


class MemoryTimeline:
    """What every pool holds now, and the most it held."""

    def __init__(
        self,
        models: Models,
        placement: Placement,
        workload: Workload,
        cluster: Cluster,
        *,
        sync_host: float,
        strict: bool,
    ) -> None:
        """`sync_host`: bytes on each node while the weight path runs."""
        self.strict = strict
        self._held = {
            p.name: pool_bytes(models, placement, workload, cluster, p.name) for p in placement.pools
        }
        self._lender = placement.actor.pool if placement.schedule.lend else None
        self._lent: EngineState = "idle"
        if self._lender is not None:
            self._held[self._lender] = pool_bytes(models, placement.lent, workload, cluster, self._lender)
        self._moments = {m.name: m for m in plan_moments(placement, workload)}
        self._engine = self._moments["start"].engine
        self._rollout = placement.rollout.pool if placement.rollout and workload.generates else None
        self._active: dict[str, dict[str, Moment]] = {pool: {} for pool in self._held}
        self._entries: dict[tuple[str, Moment], list[tuple[MemoryEntry, ...]]] = {}
        most = {pool: held.host for pool, held in self._held.items()}
        rest = {pool: held.host - held.swap_host for pool, held in self._held.items()}
        self._host = host_bytes(placement, cluster, rest)
        full = host_bytes(placement, cluster, most)
        self._swap_host = {pool: full[pool] - self._host[pool] for pool in full}
        """On the fullest node of each pool while a swapped reference runs: the actor's weights."""
        self._sync_host = sync_host
        self._recorder: Any = None
        self._peaks: dict[str, PoolPeak] = {}
        for pool in self._held:
            self._note(pool, "start", 0.0)
            self._note_host(pool, "start", 0.0)

    def attach(self, recorder: Any) -> None:
        """From now on every change becomes a counter of this recorder, beginning with the levels now."""
        self._recorder = recorder
        for pool in self._held:
            recorder.counter("memory_bytes", pool, 0.0, self.level(pool))
            recorder.counter("host_bytes", pool, 0.0, self._host[pool])

    # --- what happens ---------------------------------------------------------------------------------

    def begin(self, name: str, now: float) -> None:
        """A call or a move starts."""
        if name in (ROLLOUT, f"{ROLLOUT}.load"):
            self._engine = "running"
            if self._rollout is not None:
                self._note(self._rollout, name, now)
            return
        call = _call(name)
        moment = self._moments.get(call)
        if moment is None or call == ROLLOUT:  # rules, or the engine falling asleep: still awake
            return
        if call == SYNC and self._engine == "idle":
            self._engine = moment.engine  # weights need memory to arrive in
        for pool in moment.pools:
            self._active[pool][call] = replace(moment, moving=name != call)
            self._note(pool, name, now)
            if more := self._copied(pool, name, f"{REFERENCE}.load"):
                self._host[pool] += more
                self._note_host(pool, name, now)

    def end(self, name: str, now: float) -> None:
        """It ends."""
        call = _call(name)
        moment = self._moments.get(call)
        if moment is None or name.endswith(".load"):
            return
        if call == ROLLOUT:
            if name != ROLLOUT:
                self._engine = self._moments[name].engine if name in self._moments else "idle"
                self._note(moment.pools[0], name, now)
            return
        stays = name == call and f"{call}.unload" in self._moments and call != SYNC
        for pool in moment.pools:
            if stays:
                self._active[pool][call] = replace(moment, moving=True)
            else:
                self._active[pool].pop(call, None)
            if less := self._copied(pool, name, f"{REFERENCE}.unload"):
                self._host[pool] -= less
                self._note_host(pool, name, now)
            self._note(pool, name, now)

    def lend(self, now: float, *, awake: bool) -> None:
        """The engine on the trainer's GPUs wakes or sleeps."""
        assert self._lender is not None, "only a trainer that lends has one"
        self._lent = "running" if awake else "idle"
        self._note(self._lender, ROLLOUT, now)

    # --- what memory holds ----------------------------------------------------------------------------

    def level(self, pool: str) -> float:
        """Bytes on the fullest GPU of a pool now."""
        rest = self._bytes(pool, REST)
        return rest + math.fsum(self._bytes(pool, m) - rest for m in self._active[pool].values())

    def levels(self) -> dict[str, float]:
        """Bytes on the fullest GPU of every pool now."""
        return {pool: self.level(pool) for pool in self._held}

    def peaks(self) -> tuple[PoolPeak, ...]:
        """The fullest instant of each pool."""
        return tuple(self._peaks.values())

    def _copied(self, pool: str, name: str, swap: str) -> float:
        """Host bytes of a pool's node that come or go: of a weight sync, or with the move `swap`."""
        if name == swap:
            return self._swap_host[pool]
        return self._sync_host if _call(name) == SYNC else 0.0

    def _bytes(self, pool: str, moment: Moment) -> float:
        """Bytes with at most one role loaded, on the fullest stage."""
        return max(math.fsum(e.bytes for e in stage) for stage in self._at(pool, moment))

    def _at(self, pool: str, moment: Moment) -> list[tuple[MemoryEntry, ...]]:
        """The entries of each stage at a moment, with the engine as it is."""
        key = pool, replace(moment, engine=self._lent if pool == self._lender else self._engine)
        if key not in self._entries:
            self._entries[key] = entries(self._held[pool], key[1])
        return self._entries[key]

    def _note(self, pool: str, name: str, now: float) -> None:
        level, capacity = self.level(pool), self._held[pool].profile.usable_memory.value
        if self._recorder is not None:
            self._recorder.counter("memory_bytes", pool, now, level)
        if pool not in self._peaks or level > self._peaks[pool].bytes:
            self._peaks[pool] = PoolPeak(pool=pool, time=now, name=name, bytes=level, capacity=capacity)
        if self.strict and level > capacity:
            active = self._active[pool].values() or (REST,)
            every = (e for moment in active for stage in self._at(pool, moment) for e in stage)
            largest = max(every, key=lambda e: e.bytes)
            raise RlhfsimError(
                "out-of-memory",
                f"pool {pool} needs {format(level, 'byte')} of {format(capacity, 'byte')} per GPU"
                f" at {now:.3f} s, when {name} begins; {format(largest.bytes, 'byte')} of it"
                f" {largest.role} {largest.component.replace('_', ' ')}",
                help="offload a role between its calls, shard further, or give the pool more GPUs",
            )

    def _note_host(self, pool: str, name: str, now: float) -> None:
        held, capacity = self._host[pool], self._held[pool].profile.node.host_memory.value
        if self._recorder is not None:
            self._recorder.counter("host_bytes", pool, now, held)
        if self.strict and held > capacity:
            raise RlhfsimError(
                "out-of-memory",
                f"nodes of pool {pool} need {format(held, 'byte')} of {format(capacity, 'byte')}"
                f" host memory at {now:.3f} s, when {name} begins",
                help="keep roles in GPU memory, or use sleep level 2",
            )


REFERENCE = "reference.logprob"
REST = Moment(name="rest", pools=())
"""No role is loaded for a call."""


def _call(name: str) -> str:
    """The call that a move belongs to."""
    return name.removesuffix(".load").removesuffix(".unload")
