"""Measured spans and counters: collected in every process, put on one clock, written as a Trace.

A worker collects in absolute seconds of its own clock; the driver learns the offset of every node's clock
by asking for the time (Cristian 1989, the method of NTP), and `assemble` shifts all to the driver's clock
and counts from the start of the first step. What a GPU does inside a span is not known here: `bound_by`
is `measured`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.provenance import installed_version
from rlhfsim.trace import ALL, MEASURED, Counter, CounterName, Span, Trace, covered

Clock = Callable[[], float]
ENGINE_KINDS = frozenset({"generate", "logprob", "score", "value", "train", "sync", "load", "unload"})
"""Kinds of spans in which engines or reward rules work; `controller` and `wait` are the rest."""


@frozen
class Recorded:
    """What one process collected, in seconds of its clock."""

    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()


@frozen
class ClockOffset:
    """Another clock against the own one."""

    value_s: float = 0.0
    """The other clock's time minus the own one's."""
    uncertainty_s: float = 0.0
    """The true offset lies within `value_s` +- this, whatever the two ways of the message took."""


SAME_CLOCK = ClockOffset()
"""Processes of one node share a clock."""


@frozen
class Tags:
    """How the span of a remote call is labelled."""

    name: str
    """`actor.train`"""
    step: int
    version: int | None = None

    @property
    def kind(self) -> str:
        """`train`."""
        return self.name.rpartition(".")[2]


@frozen
class Reply:
    """What a remote call returns."""

    value: Any
    recorded: Recorded = Recorded()
    memory: Mapping[str, float] | None = None
    """Bytes after the call and at most during it, by the keys of `engines.memory`."""


class Tracer:
    """Collects spans and counters of one process; threads may share it."""

    def __init__(self, clock: Clock = time.time) -> None:
        """`clock` gives absolute seconds, equal in all processes of a node."""
        self._clock = clock
        self._lock = Lock()
        self._spans: list[Span] = []
        self._counters: list[Counter] = []

    @contextmanager
    def span(
        self,
        name: str,
        role: str,
        kind: str,
        pool: str,
        group: str = ALL,
        step: int = 0,
        version: int | None = None,
        **attributes: float | str,
    ) -> Iterator[dict[str, float | str]]:
        """Record the block as one span; what the block puts into the dict becomes attributes.

        A block that raises is recorded too, with attribute `failed`.
        """
        notes = dict(attributes)
        start = self._clock()
        try:
            yield notes
        except BaseException as error:
            notes["failed"] = type(error).__name__
            raise
        finally:
            end = max(start, self._clock())  # a wall clock may be set back meanwhile
            self.add(
                Span(
                    name=name,
                    role=role,
                    kind=kind,
                    pool=pool,
                    group=group,
                    step=step,
                    start_s=start,
                    end_s=end,
                    bound_by=MEASURED,
                    version=version,
                    attributes=notes,
                )
            )

    def add(self, span: Span) -> None:
        """Keep a span that was measured elsewhere on the same clock."""
        with self._lock:
            self._spans.append(span)

    def counter(
        self, name: CounterName, pool: str, value: float, group: str = ALL, at: float | None = None
    ) -> None:
        """Record a value that holds from now on, or from `at`."""
        time_s = self._clock() if at is None else at
        item = Counter(name=name, pool=pool, group=group, time_s=time_s, value=value)
        with self._lock:
            self._counters.append(item)

    def take(self) -> Recorded:
        """All since it was last taken; open spans stay for the next time."""
        with self._lock:
            recorded = Recorded(spans=tuple(self._spans), counters=tuple(self._counters))
            self._spans, self._counters = [], []
        return recorded


def offset(ask: Clock, tries: int = 8, clock: Clock = time.time) -> ClockOffset:
    """Offset of the clock that `ask` reads, from the question with the shortest round trip.

        value = remote - (sent + received) / 2        uncertainty = (received - sent) / 2

    Source: Cristian 1989, Distributed Computing 3, 146-158. The bound holds for any split of the round
    trip into its two ways; drift between two calls of this function is not seen.
    """
    assert tries >= 1, tries
    answers = []
    for _ in range(tries):
        sent, remote = clock(), ask()
        received = max(sent, clock())
        middle, half = (sent + received) / 2, (received - sent) / 2
        answers.append(ClockOffset(value_s=remote - middle, uncertainty_s=half))
    return min(answers, key=lambda answer: answer.uncertainty_s)


def assemble(
    recorded: Iterable[tuple[Recorded, ClockOffset]],
    *,
    start_s: float,
    plan_hash: str,
    steps: int,
    seed: int | None = None,
    first_step: int = 0,
) -> Trace:
    """The measured trace: seconds from `start_s` of the driver's clock, sorted by start.

    Steps count from `first_step`, the iteration that a resumed run began with. Start-up work that ended
    before `start_s` is left out; a span that reaches over it begins at 0. So is what begins after the last
    step, as an evaluation does. Responses generated ahead count to the last step.
    """
    parts = tuple(recorded)
    shifted = [
        _shifted(s, start_s + off.value_s, first_step)
        for part, off in parts
        for s in part.spans
        if s.end_s - off.value_s > start_s
    ]
    last_s = max((s.end_s for s in shifted if s.step < steps), default=0.0)
    spans = [replace(s, step=min(s.step, steps - 1)) for s in shifted if s.step < steps or s.start_s < last_s]
    counters = [
        replace(c, time_s=max(0.0, c.time_s - off.value_s - start_s))
        for part, off in parts
        for c in part.counters
    ]
    return Trace(
        source="measured",
        rlhfsim_version=installed_version("rlhfsim"),
        plan_hash=plan_hash,
        seed=seed,
        steps=steps,
        spans=tuple(sorted(spans, key=lambda s: (s.start_s, -s.end_s, s.pool, s.group, s.name))),
        counters=tuple(sorted(counters, key=lambda c: (c.time_s, c.name, c.pool, c.group))),
    )


def _shifted(span: Span, zero: float, first_step: int) -> Span:
    """The span in seconds from `zero`, which is an instant of the clock that it was measured with."""
    start, end = max(0.0, span.start_s - zero), span.end_s - zero
    return replace(span, start_s=start, end_s=max(start, end), step=max(0, span.step - first_step))


class RunRecorder:
    """What all processes of a run measured, by the replies of their calls; threads may share it."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._parts: list[tuple[Recorded, ClockOffset]] = []
        self._lock = Lock()
        self._seen = 0
        self.memory: dict[str, tuple[str, Mapping[str, float]]] = {}
        """Node and bytes of every part by name: the latest, its peaks since `readings`."""

    def add(self, reply: Reply, offset: ClockOffset = SAME_CLOCK, part: str = "", node: str = "") -> None:
        """Keep what a reply of `part` on `node` brought."""
        with self._lock:
            self._parts.append((reply.recorded, offset))
            if reply.memory is not None and part:
                _, before = self.memory.get(part, ("", {}))
                peaks = {k: max(v, before.get(k, 0.0)) for k, v in reply.memory.items() if k.endswith("peak")}
                self.memory[part] = (node, {**reply.memory, **peaks})

    def readings(self) -> list[tuple[str, Mapping[str, float]]]:
        """Node and bytes of every part, peaks since the last call of this."""
        with self._lock:
            found, self.memory = list(self.memory.values()), {}
        return found

    def fresh(self) -> list[Span]:
        """Spans since the last call of this, on the driver's clock."""
        with self._lock:
            self._parts.append((self.tracer.take(), SAME_CLOCK))
            new = [
                replace(span, start_s=span.start_s - off.value_s, end_s=span.end_s - off.value_s)
                if off.value_s
                else span
                for recorded, off in self._parts[self._seen :]
                for span in recorded.spans
            ]
            self._seen = len(self._parts)
        return new

    def trace(self, **facts: Any) -> Trace:
        """All so far; `facts` are those of `assemble`."""
        with self._lock:
            self._parts.append((self.tracer.take(), SAME_CLOCK))
            return assemble(self._parts, **facts)


def coordination_overhead(trace: Trace) -> dict[int, float]:
    """Share of every step's wall time in which no engine works, by step.

        share = 1 - |union of engine spans in the window| / |window|

    The window of a step runs from its first span to the first span of the next one, so that what happens
    between two steps counts as well; engine work of any step counts, as asynchronous steps overlap.
    """
    busy = tuple(covered((s.start_s, s.end_s) for s in trace.spans if s.kind in ENGINE_KINDS))
    return {
        step: 1 - sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy) / (end - start)
        for step, (start, end) in _windows(trace).items()
        if end > start
    }


def _windows(trace: Trace) -> Mapping[int, tuple[float, float]]:
    """Start and end of every step, without gaps."""
    starts: dict[int, float] = {}
    for span in sorted(trace.spans, key=lambda s: (s.step, s.start_s)):
        starts.setdefault(span.step, span.start_s)
    ends = [*list(starts.values()), trace.end_s][1:]
    return {step: (start, end) for (step, start), end in zip(starts.items(), ends, strict=True)}
