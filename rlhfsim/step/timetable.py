"""Order of priced calls in time: one after the other in a pool, pools side by side, streaming, async.

Legend: a step is a priced call or move that waits for its place; a phase is a step with a start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.specs.placement.placement import Schedule

STREAM_CHUNKS = 8
"""Pieces in which finished samples are handed on when they stream."""
SYNC_POOL = "links"
"""Where a weight sync runs that hides behind generation."""
ROLLOUT = "actor.generate"
SYNC = "actor.sync"


@frozen
class Step:
    """A priced call or move that waits for its place in time."""

    name: str
    pools: tuple[str, ...]
    cost: Cost
    needs: tuple[str, ...] = ()
    streams: bool = False
    """Can take samples one by one as they finish: its role stays in GPU memory meanwhile."""
    ahead: bool = False
    """Takes them so under every schedule."""
    latency_s: float = 0.0
    """Latency of one sample: no piece is done sooner after it arrived."""


@frozen
class Phase:
    """A call or a move between calls, with its place in time."""

    name: str
    """`actor.generate`, `actor.generate.load`, `actor.train.unload`, ..."""
    pools: tuple[str, ...]
    start: float
    cost: Cost
    after: int | None
    """Index of the phase whose end let this one start; None at the start of the step."""
    work_s: float | None = None
    """All seconds of a call that streams; `cost` is what is left of them at `start`."""

    @property
    def end(self) -> float:
        """Seconds from the start of the step."""
        return self.start + self.cost.seconds


Timetable = tuple[tuple[Phase, ...], tuple[int, ...]]
"""Phases, and the indices of those that make up the step time, in order."""


def learner_steps(steps: Iterable[Step]) -> list[Step]:
    """Calls of the trainer: all but generation and sync."""
    return [s for s in steps if s.name != SYNC and not s.name.startswith(ROLLOUT)]


def timetable(steps: list[Step], schedule: Schedule, finish: tuple[float, ...] | None = None) -> Timetable:
    """Each step as soon as its pools are free and its inputs are there; then the critical chain.

    `finish`: seconds, from the start of generation, until equal shares of the samples are done;
    read by calls that take samples as they finish.
    """
    ends = streamed_ends(steps, schedule, finish) if finish else {}
    free: dict[str, int] = {}
    index: dict[str, int] = {}
    phases: list[Phase] = []
    over: list[float] = []
    for step in steps:
        waits = [index[n] for n in step.needs if n in index]
        waits += [free[p] for p in step.pools if p in free]
        after = max(waits, key=over.__getitem__, default=None)
        start = over[after] if after is not None else 0.0
        cost, work = step.cost, step.cost.seconds if step.name in ends else None
        if work is not None:
            until = max(0.0, ends[step.name] - start)
            cost = cost.scaled(until / work) if work else Cost(parts=(part("tail", until, "waits"),))
        phases.append(
            Phase(name=step.name, pools=step.pools, start=start, cost=cost, after=after, work_s=work)
        )
        over.append(phases[-1].end)
        index[step.name] = len(phases) - 1
        for pool in step.pools:
            free[pool] = len(phases) - 1
    return tuple(phases), chain(phases)


def streamed_ends(steps: list[Step], schedule: Schedule, finish: tuple[float, ...]) -> dict[str, float]:
    """When each call that works on samples as they arrive has done the last of them.

    Max-plus over pieces of the batch: a piece waits for its samples (or for the calls it needs) and
    for its pool, which takes all its calls for one piece before the next (StreamRL, arXiv 2504.15930);
    it is done its call's latency after it arrived at the soonest.
    A call streams if it can (`Step.streams`), shares no GPU with generation, and what it needs streams.
    """
    streamed = streaming_steps(steps, schedule)
    begin = _generation_start(steps)
    free: dict[str, float] = {}
    done: dict[str, float] = {}
    each = {step.name: step.cost.seconds / STREAM_CHUNKS for step in streamed}
    for piece in range(1, STREAM_CHUNKS + 1):
        arrived = begin + finish[-(-piece * len(finish) // STREAM_CHUNKS) - 1]
        for step in streamed:
            inputs = [done[n] for n in step.needs if n in done]
            start = max(arrived, *inputs, *(free.get(p, 0.0) for p in step.pools))
            free |= dict.fromkeys(step.pools, start + each[step.name])
            done[step.name] = max(start + each[step.name], arrived + step.latency_s)
    return done


def streaming_steps(steps: list[Step], schedule: Schedule) -> list[Step]:
    """Calls that take samples as they arrive, in order: all that can, or those that always do.

    A pool keeps the order of its calls: behind one that waits for the whole batch none streams.
    """
    busy = {p for s in steps if s.name == ROLLOUT for p in s.pools}
    streaming: list[Step] = []
    for step in steps:
        sources = {ROLLOUT, *(s.name for s in streaming)}
        waits = bool(step.needs) and set(step.needs) <= sources
        taken = step.ahead or (schedule.streaming and step.streams)
        if taken and waits and not busy & set(step.pools):
            streaming.append(step)
        else:
            busy |= set(step.pools)
    return streaming


def _generation_start(steps: list[Step]) -> float:
    """Seconds before generation: what is in its pool earlier in the order (waking the engine)."""
    before = 0.0
    for step in steps:
        if step.name == ROLLOUT:
            return before
        before += step.cost.seconds
    return before


def chain(phases: list[Phase]) -> tuple[int, ...]:
    """The phases from the start of the step to its end, each the one that the next waited for."""
    ends = [phase.end for phase in phases]
    critical = [ends.index(max(ends))] if phases else []
    while critical and (before := phases[critical[-1]].after) is not None:
        critical.append(before)
    return tuple(reversed(critical))


def steady_timetable(steps: list[Step], schedule: Schedule, continuous: Cost | None) -> Timetable:
    """Generation at the same time as everything else; the step is the slower side plus the exposed sync.

        T = max(T_gen', T_score + T_train) + T_sync          (sync overlapped: inside the max)

    T_gen' is `continuous`, the time per batch of an engine that never drains, where given; with
    staleness 1 each batch drains (one-step-off).
    """
    sync = [s for s in steps if s.name == SYNC]
    producing = [s for s in steps if s.name.startswith(ROLLOUT)]
    learning = [s for s in steps if s not in producing and s not in sync]
    if continuous is not None:
        producing = [replace(s, cost=continuous) if s.name == ROLLOUT else s for s in producing]
    plain = replace(schedule, streaming=False)
    producer, left = timetable(producing, plain)
    learner, right = timetable(learning, plain)
    offset = len(producer)
    moved = tuple(replace(p, after=p.after + offset if p.after is not None else None) for p in learner)
    ready = max((p.end for p in (*producer, *learner)), default=0.0)
    slow = _end(producer) > _end(learner)
    critical = left if slow else tuple(offset + i for i in right)
    first = offset + len(moved)
    if schedule.overlapped_sync:
        hidden = tuple(_placed(s, (SYNC_POOL,), 0.0, None) for s in sync)
        if _end(hidden) > ready:
            critical = tuple(range(first, first + len(hidden)))
        return (*producer, *moved, *hidden), critical
    exposed = tuple(_placed(s, s.pools, ready, critical[-1] if critical else None) for s in sync)
    return (*producer, *moved, *exposed), critical + tuple(range(first, first + len(exposed)))


def _end(phases: tuple[Phase, ...]) -> float:
    return max((p.end for p in phases), default=0.0)


def _placed(step: Step, pools: tuple[str, ...], start: float, after: int | None) -> Phase:
    return Phase(name=step.name, pools=pools, start=start, cost=step.cost, after=after)
