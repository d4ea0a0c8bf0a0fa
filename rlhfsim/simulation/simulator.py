"""The simulator of a simulation: clock, pools that take calls in program order, links, memory, records.

How to use it (both kinds of schedule):

    simulator = Simulator(setting, record=True)                  # memory_timeline=...: bytes over time
    lane = simulator.lane("trainer")                         # one program-ordered pool
    turn = simulator.queue(("trainer", "rollout"))           # take a place in line, in program order
    def process():
        yield turn.ready                                 # everything before it in those pools is done
        done = yield from simulator.work(step, number)       # runs step.cost over the links of its pools
        turn.leave()                                     # the next in line may start
    simulator.env.process(process()); simulator.env.run()

`work` returns `Done(start, end, cost)`; its cost has a part `contention` where shared links made it
longer. It begins and ends the call in the memory timeline and records one span a pool. It takes no place
in line: what runs at the same time as the pool's calls (an overlapped sync, one replica) calls it alone.
Parts of a call (a replica, a piece) use `simulator.shared_links` and `simulator.recorder.span(...)`
themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost
from rlhfsim.memory.kv_cache import kv_bytes_per_token
from rlhfsim.provenance import installed_version
from rlhfsim.simulation.memory_timeline import MemoryTimeline
from rlhfsim.simulation.shared_links import Links, SharedLinks, Topology
from rlhfsim.step.calls import CallSetting, planned_sync
from rlhfsim.step.timetable import Step
from rlhfsim.trace import CPU_POOL, Counter, CounterName, Span, Trace

Running = Generator[simpy.Event, Any, None]
"""A simulated process."""
Record = Literal["memory", "strict", "trace"]
"""What is noted: bytes at every instant; the same, where a plan that does not fit raises; bytes and spans."""


@frozen
class Done:
    """A call that has run."""

    start: float
    end: float
    cost: Cost
    """Its price and, as parts on `contention`, what shared links added."""


@dataclass(slots=True, eq=False)
class Turn:
    """A place in the line of one pool or several."""

    ready: simpy.Event
    """Fires when all before it in its pools have left."""
    left: simpy.Event

    def leave(self) -> None:
        """Lets the next in line start."""
        self.left.succeed()


class PoolTurns:
    """One pool: calls run one after the other, strictly in the order in which they queued."""

    def __init__(self, env: simpy.Environment, name: str) -> None:
        self.env = env
        self.name = name
        self.last: simpy.Event | None = None
        """Fires when the call at the end of the line has left; None: nobody queued yet."""


@dataclass(slots=True)
class SpanRecorder:
    """Spans and counters as plain tuples, checked once when they become a trace."""

    on: bool = True
    spans: list[tuple[Any, ...]] = field(default_factory=list)
    counters: list[tuple[Any, ...]] = field(default_factory=list)

    def span(
        self,
        name: str,
        pool: str,
        step: int,
        start: float,
        end: float,
        bound_by: str,
        *,
        group: str = "all",
        version: int | None = None,
        **attributes: float | str,
    ) -> None:
        """Work named `role.kind` or `role.kind.move` on a GPU group of one pool."""
        if self.on:
            self.spans.append((name, pool, step, start, end, bound_by, group, version, attributes))

    def counter(self, name: CounterName, pool: str, time: float, value: float, group: str = "all") -> None:
        """A value from `time` on."""
        if self.on:
            self.counters.append((name, pool, time, value, group))

    def trace(self, *, seed: int | None, steps: int) -> Trace:
        """All of it as a trace, spans and counters in the order of time."""
        spans = sorted(self.spans, key=lambda s: (s[3], s[4], s[1], s[6], s[0]))
        counters = sorted(self.counters, key=lambda c: c[2])
        return Trace(
            source="predicted",
            rlhfsim_version=installed_version("rlhfsim"),
            plan_hash="",
            seed=seed,
            steps=steps,
            spans=tuple(map(_span, spans)),
            counters=tuple(
                Counter(name=n, pool=p, group=g, time_s=t, value=float(v)) for n, p, t, v, g in counters
            ),
        )


def _span(recorded: tuple[Any, ...]) -> Span:
    name, pool, step, start, end, bound_by, group, version, attributes = recorded
    words = name.split(".")
    kind = words[-1] if words[-1] in ("load", "unload") else words[min(1, len(words) - 1)]
    return Span(
        name=name,
        role=words[0],
        kind=kind,
        pool=pool,
        group=group,
        step=step,
        start_s=start,
        end_s=end,
        bound_by=bound_by,
        version=version,
        attributes=attributes,
    )


class Simulator:
    """Everything that a simulated plan runs on."""

    def __init__(
        self, setting: CallSetting, *, record: bool = False, memory_timeline: MemoryTimeline | None = None
    ) -> None:
        self.setting = setting
        self.env = simpy.Environment()
        self.shared_links = SharedLinks(self.env)
        self.topology = Topology(setting.cluster, setting.placement.pools)
        self.recorder = SpanRecorder(on=record)
        self.memory_timeline = memory_timeline
        self._lanes: dict[str, PoolTurns] = {}
        if memory_timeline is not None:
            memory_timeline.attach(self.recorder)

    def lane(self, name: str) -> PoolTurns:
        """The pool `name`; the CPU workers are one too."""
        return self._lanes.setdefault(name, PoolTurns(self.env, name))

    def queue(self, pools: Iterable[str]) -> Turn:
        """A place at the end of the line of each of these pools."""
        lanes = [self.lane(name) for name in pools]
        before = [lane.last for lane in lanes if lane.last is not None]
        turn = Turn(self.all_of(before), self.env.event())
        for lane in lanes:
            lane.last = turn.left
        return turn

    def all_of(self, events: list[simpy.Event]) -> simpy.Event:
        """Fires when all have; at once for none."""
        return simpy.AllOf(self.env, events)

    def links(self, pools: tuple[str, ...]) -> Links:
        """Links of a call on these pools."""
        return {} if pools == (CPU_POOL,) else self.topology.links(pools)

    def kv_cache(self, tokens: float, group: str = "all") -> None:
        """From now on a rollout replica holds so many tokens: the bytes on each of its GPUs."""
        role = self.setting.placement.rollout
        if self.recorder.on and role is not None:
            each = kv_bytes_per_token(self.setting.models.actor, role.layout)
            held = tokens / role.layout.attention_dp * each
            self.recorder.counter("kv_bytes", role.pool, self.env.now, held, group)

    def work(
        self,
        step: Step,
        number: int = 0,
        *,
        version: int | None = None,
        links: Links | None = None,
        group: str = "all",
        **attributes: float | str,
    ) -> Generator[simpy.Event, Any, Done]:
        """Runs a priced step of iteration `number` over its links, and records it.

        `links` replaces those of `step.pools` (an overlapped sync waits in no pool but uses two).
        """
        start = self.env.now
        if self.memory_timeline is not None:
            self.memory_timeline.begin(step.name, start)
        extra = Cost()
        if step.cost.parts:
            flow = yield self.shared_links.run(step.cost, self.links(step.pools) if links is None else links)
            extra = Cost(parts=flow.contention)
        end = self.env.now
        if self.memory_timeline is not None:
            self.memory_timeline.end(step.name, end)
        done = Done(start=start, end=end, cost=step.cost + extra)
        self.record(step, done, number, version=version, group=group, **attributes)
        return done

    def record(
        self,
        step: Step,
        done: Done,
        number: int,
        *,
        version: int | None = None,
        group: str = "all",
        **attributes: float | str,
    ) -> None:
        """One span a pool of a call that has run; nothing of calls that take no time."""
        if not self.recorder.on or done.end <= done.start:
            return
        waited = done.cost.seconds - step.cost.seconds
        if waited > 1e-9 * done.cost.seconds:
            attributes["contention_s"] = waited
        for pool in step.pools:
            self.recorder.span(
                step.name,
                pool,
                number,
                done.start,
                done.end,
                str(done.cost.bound_by),
                group=group,
                version=version,
                **attributes,
            )


def simulator_of(setting: CallSetting, record: Record | None) -> Simulator:
    """The simulator of a plan that notes what was asked for; None: step times alone."""
    watched = timeline_of(setting, strict=record == "strict") if record else None
    return Simulator(setting, record=record == "trace", memory_timeline=watched)


def timeline_of(setting: CallSetting, *, strict: bool) -> MemoryTimeline:
    """The memory of a plan at the start, with what its weight path takes of the host."""
    placement, workload = setting.placement, setting.workload
    syncs = placement.rollout is not None and workload.generates
    sync_host = planned_sync(setting).extra_host_bytes if syncs else 0.0
    return MemoryTimeline(
        setting.models, placement, workload, setting.cluster, sync_host=sync_host, strict=strict
    )
