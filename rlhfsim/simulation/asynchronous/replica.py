"""Rollout replicas that never drain: continuous batching, completion by completion.

Decode steps are the clock of a replica. Between two events (a completion, a KV cache that is full, a
weight update) n sequences run and their mean context grows by one token a step, so an interval costs
the integral of tau(n, c) over c (phases.drain, G8); a token is never an event. Progress is fluid: an
interruption takes hold at once, not at the next step boundary (an error below one decode step).

Prompts are prefilled when their group is admitted, at the price per prompt of a whole batch
(`rollout.prefill.group_prefill`), and decode of that replica waits meanwhile, as in the closed form.

Not known here: which replica holds which prefix, requests that move between replicas.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from heapq import heapify, heappop, heappush

from rlhfsim.simulation.asynchronous.engine import ReplicaEngine

WATERMARK = 0.01
"""Share of the KV cache kept free when a sequence is admitted. Source: vLLM block manager, default."""
EPSILON = 1e-9
"""Decode steps below which a sequence counts as finished."""
MOST_EVICTED = 4
"""Sequences in the heap for one that runs, above which the evicted ones are taken out."""
Sequence = tuple[float, int, float, int, float]
"""Step at which it ends, order of its start, step at which it would have begun, group, length."""


class RolloutReplica:
    """One inference engine: the sequences that run, those that wait for a slot, and its clock."""

    __slots__ = (
        "_again",
        "_began",
        "_ends",
        "_fired",
        "_first",
        "_order",
        "_target",
        "attended",
        "busy",
        "closed",
        "engine",
        "limit",
        "now",
        "pace",
        "pending",
        "preempted",
        "prefilled",
        "reprefilled",
        "running",
        "step",
        "tokens",
        "version",
        "waiting",
    )

    def __init__(self, engine: ReplicaEngine, pace: float = 1.0) -> None:
        self.engine = engine
        self.pace = pace
        """Seconds per second of the priced engine; above 1 on a straggler."""
        self.now = 0.0
        self.step = 0.0
        self.running: dict[int, Sequence] = {}
        """By the order of their start, in that order."""
        self._ends: list[Sequence] = []
        """A heap of them; but for its first, sequences that were evicted may still lie in it."""
        self.waiting: deque[tuple[float, float, int]] = deque()
        """Length, tokens that it has already, group."""
        self._began = 0.0
        self._first = self._again = 0.0
        """Seconds of prefill still to do before the next decode step: prompts, and once more."""
        self._target = 0.0
        self._fired = False
        self._order = 0
        self.version = 0
        self.limit = 0
        """Groups of the whole pool that may have started before it starts another."""
        self.pending: int | None = None
        """Weights that it takes once it has drained."""
        self.closed = False
        """Starts nothing new until it has drained."""
        self.attended = 0.0
        """Sum over the tokens generated of the context at which each was generated."""
        self.tokens = self.prefilled = self.reprefilled = self.busy = 0.0
        self.preempted = 0

    @property
    def context(self) -> float:
        """Mean context of the running sequences, tokens."""
        n = len(self.running)
        return self.engine.prompt + self.step - self._began / n if n else self.engine.prompt

    @property
    def kv_tokens(self) -> float:
        """Tokens in the KV cache."""
        return len(self.running) * (self.engine.own + self.step) - self._began

    @property
    def load(self) -> int:
        """Samples that run or wait."""
        return len(self.running) + len(self.waiting)

    @property
    def room(self) -> bool:
        """Whether one more new sequence fits; an empty replica takes any."""
        n, engine = len(self.running), self.engine
        if not n:
            return True
        held = n * (engine.own + self.step) - self._began + engine.own
        return n < engine.slots and held <= (1.0 - WATERMARK) * engine.capacity

    def add(self, group: int, lengths: list[float]) -> None:
        """Take a group: its prompt is prefilled, its samples start as slots allow."""
        self._first += self.engine.prefill * self.pace
        for length in lengths:
            self.waiting.append((length, 0.0, group))
        self.admit()

    def admit(self) -> None:
        """Start waiting samples, oldest first, while there is room."""
        waiting, running, engine, ends = self.waiting, self.running, self.engine, self._ends
        step, room = self.step, (1.0 - WATERMARK) * engine.capacity - engine.own
        n, began = len(running), self._began
        while waiting:
            length, done, group = waiting[0]
            if n and (n >= engine.slots or n * (engine.own + step) - began + done > room):
                break
            waiting.popleft()
            if done > 0:
                self._prefill_again(1.0, engine.prompt + done)
            self._order += 1
            begin = step - done
            running[self._order] = started = (begin + length, self._order, begin, group, length)
            heappush(ends, started)
            n += 1
            began += begin
        self._began = began

    def interrupted(self) -> None:
        """New weights: every running sequence prefills its prompt and what it has generated."""
        if self.running:
            self._prefill_again(float(len(self.running)), self.context)

    def drop(self, groups: Collection[int]) -> float:
        """The samples of these groups leave; tokens that they still had to generate."""
        gone = [s for s in self.running.values() if s[3] in groups]
        left = math.fsum(s[0] - self.step for s in gone)
        left += math.fsum(length - done for length, done, group in self.waiting if group in groups)
        self.waiting = deque(w for w in self.waiting if w[2] not in groups)
        if gone:
            self.running = {order: s for order, s in self.running.items() if s[3] not in groups}
            self._rebuild()
            self._began = math.fsum(s[2] for s in self._ends)
        self.admit()
        return left

    def leave(self) -> list[tuple[float, float, int]]:
        """All samples go, to be prefilled elsewhere: length, tokens that each has, group."""
        running = sorted(self.running.values())
        gone = [(length, self.step - begin, group) for _, _, begin, group, length in running]
        gone += self.waiting
        self.running, self._ends, self._began, self.closed = {}, [], 0.0, True
        self._first = self._again = 0.0
        self.waiting.clear()
        return gone

    def _prefill_again(self, sequences: float, context: float) -> None:
        seconds = self.engine.again(sequences, context) * self.pace
        self._again += seconds

    def next_time(self) -> float:
        """When the next sequence finishes or must be evicted; inf when nothing runs.

        One call an event, hence written out: the same as `StepClock.seconds`.
        """
        step, engine, began = self.step, self.engine, self._began
        n = len(self.running)
        if not n:
            return math.inf
        target = self._ends[0][0] - step
        self._fired = True
        if n > 1:
            left = (engine.capacity + began) / n - engine.own - step
            if left < target - EPSILON:
                target, self._fired = left, False
        if target < 0.0:
            target = 0.0
        self._target = target
        clock = engine.clock
        grid, last = clock.grid, clock.last
        tau, half, area = clock.rows.get(n) or clock.row(n)
        context = engine.prompt + step - began / n
        i = bisect_right(grid, context, 1, last) - 1
        end = context + target
        x = context - grid[i]
        if end < grid[i + 1]:
            y = end - grid[i]
            decode = area[i] + y * (tau[i] + y * half[i]) - area[i] - x * (tau[i] + x * half[i])
        else:
            j = bisect_right(grid, end, 1, last) - 1
            y = end - grid[j]
            decode = area[j] + y * (tau[j] + y * half[j]) - area[i] - x * (tau[i] + x * half[i])
        return self.now + self._first + self._again + decode * self.pace

    def advance(self, time: float) -> None:
        """Prefill and decode up to `time`, which lies before the next event."""
        elapsed = time - self.now
        if elapsed <= 0:
            return
        self.now = time
        if not self.running:  # prefill of what runs is owed; an empty engine owes nothing
            return
        self.busy += elapsed
        elapsed = self._pay(elapsed)
        if elapsed > 0:
            steps = self.engine.clock.steps(len(self.running), self.context, elapsed / self.pace)
            self._decode(min(steps, max(0.0, self._ends[0][0] - self.step)))

    def _pay(self, elapsed: float) -> float:
        first = min(elapsed, self._first)
        again = min(elapsed - first, self._again)
        self._first -= first
        self._again -= again
        self.prefilled += first
        self.reprefilled += again
        return elapsed - first - again

    def _decode(self, steps: float) -> None:
        n = len(self.running)
        middle = n * (self.engine.prompt + self.step + steps / 2) - self._began
        self.attended += middle * steps
        self.step += steps
        self.tokens += steps * n

    def fire(self, time: float) -> list[int]:
        """The event announced by `next_time`; groups of the samples that finish, one entry a sample."""
        running, ends = self.running, self._ends
        if self._first or self._again:
            self._pay(self._first + self._again)
        self.busy += time - self.now
        self.now = time
        self._decode(self._target)
        if not self._fired:
            self._evict()
            return []
        end = self.step + EPSILON
        _, order, begin, group, _ = heappop(ends)
        del running[order]
        began, done = self._began - begin, [group]
        while ends:
            last, order, begin, group, _ = ends[0]
            if order in running:
                if last > end:
                    break
                del running[order]
                began -= begin
                done.append(group)
            heappop(ends)
        self._began = began if running else 0.0
        if self.waiting:
            self.admit()
        return done

    def _evict(self) -> None:
        """The sequence that started last gives up its KV cache and waits first in line."""
        running, ends = self.running, self._ends
        _, (_, _, begin, group, length) = running.popitem()
        if len(ends) > MOST_EVICTED * len(running):
            self._rebuild()
        while ends[0][1] not in running:
            heappop(ends)
        self._began -= begin
        self.waiting.appendleft((length, self.step - begin, group))
        self.preempted += 1

    def _rebuild(self) -> None:
        """The heap without what was evicted."""
        self._ends[:] = self.running.values()
        heapify(self._ends)
