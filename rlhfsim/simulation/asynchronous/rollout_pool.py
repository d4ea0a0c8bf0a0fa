"""The rollout pool of a run with stale samples: admission, dispatch, the queue of finished groups.

Groups (a prompt with its G samples) are numbered in the order in which they start. Legend: v weight
version of a replica (updates it has received), eta staleness bound, P groups of a batch.

    a replica starts group j (from 1) only while  j <= (v + eta + 1) P        (AReaL, arXiv 2505.24298, eq. 3)

The trainer takes the oldest finished groups. A group is due in batch v + ceil(eta); batch k is taken
only if it leaves no more than (d - k) P groups due up to any batch d, so that none is ever late: the
trainer waits for old groups rather than take too many young ones. Proof by induction over starts and
takes: only replicas with the newest version v start groups, and then the groups due up to v + ceil(eta)
are all j - k P <= (v + eta + 1 - k) P untaken ones, k batches being taken.
Without partial rollouts v is the version at the start; with them samples go on under newer weights and
v is the version that wrote the last token (what wrote the first is counted apart).

Where late groups are thrown away (ROLL, verl's `max_off_policy_strategy=drop`) the trainer waits for none of
them. v is then always the version at the start; with new weights v every group that started before
v - ceil(eta) leaves, running or finished, and others may start in its place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from rlhfsim.simulation.asynchronous.replica import EPSILON, RolloutReplica
from rlhfsim.specs.placement.placement import Late

BatchLengths = Callable[[int], list[list[float]]]
"""Response lengths of batch k, one list a group, in the order in which its groups start."""


@dataclass(slots=True)
class SampleGroup:
    """A group in flight or finished."""

    start: int
    """Version at its start."""
    left: int
    """Samples that still run."""
    version: int
    """Version that its staleness is measured from."""
    lengths: list[float]
    """Response tokens of its samples."""


@dataclass(slots=True)
class Taken:
    """A batch handed to the trainer."""

    groups: list[int]
    staleness: list[int]
    """Versions between generation and training, one entry a group."""
    oldest: int
    """Version of the oldest token in the batch."""
    tokens: float
    """Response tokens."""


@dataclass(slots=True, kw_only=True)
class RolloutPool:
    """Replicas with one dispatcher and one queue."""

    replicas: list[RolloutReplica]
    lengths: BatchLengths
    batch: int
    """Groups of a batch (P)."""
    staleness: float
    """eta."""
    partial: bool = False
    """Weight updates interrupt; samples carry on."""
    queue: float | None = None
    """Most finished batches that wait; a full queue stops generation."""
    late: Late = "wait"
    lent: int = 0
    """Last replicas, which lie on the trainer's GPUs: asleep but from `lend` to `reclaim`."""
    anew: bool = False
    """What leaves them begins anew: the state of a conversation's environment stays in their processes."""
    started: int = 0
    """Groups that started and were not thrown away."""
    drawn: int = 0
    """Groups whose lengths were drawn."""
    rejected_tokens: float = 0.0
    """Response tokens of groups that were thrown away."""
    rejected_groups: int = 0
    taken: int = 0
    """Batches that the trainer took."""
    draining: bool = False
    """The trainer waits for every replica to drain: a full queue stops nothing."""
    held: bool = False
    """Stopped from outside."""
    blocked_seconds: float = 0.0
    """Time in which the full queue stopped generation."""
    groups: dict[int, SampleGroup] = field(default_factory=dict)
    finished: list[tuple[int, int]] = field(default_factory=list)
    """Version and number of the groups that wait for the trainer."""
    _events: list[tuple[float, int, int]] = field(default_factory=list)
    _stamp: list[int] = field(default_factory=list)
    _untaken: dict[int, int] = field(default_factory=dict)
    """Groups in flight or in the queue, by version."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """Groups in the queue, by version."""
    sums: list[tuple[float, float]] = field(default_factory=list)
    """Response tokens of each batch begun, and the sum of their squares."""
    _batch_lengths: list[list[float]] = field(default_factory=list)
    _again: deque[list[float]] = field(default_factory=deque)
    """Lengths of the groups that are generated again."""
    _number: int = 0
    _blocked_since: float | None = None
    _counted: bool = field(init=False)
    """Whether groups are counted by version, so that the trainer can wait for those that are due."""

    def __post_init__(self) -> None:
        """Fill the replicas at time 0."""
        self._counted = not self.partial and self.late == "wait"
        self._stamp = [0] * len(self.replicas)
        for replica in self.replicas:
            self._install(replica, 0)
            replica.closed = replica in self.borrowed
        self.pull_all()

    def release(self) -> None:
        """Lets go of all samples: processes of a clock that has stopped still hold the pool, in a circle."""
        self.replicas.clear()
        self.groups.clear()
        self._events.clear()
        self._batch_lengths, self._again = [], deque()

    # --- lent replicas --------------------------------------------------------------------------------

    @property
    def borrowed(self) -> list[RolloutReplica]:
        """Replicas on the trainer's GPUs."""
        return self.replicas[len(self.replicas) - self.lent :]

    def lend(self, time: float) -> None:
        """The trainer's GPUs take groups too; what `swap` held back starts."""
        self.settle(time)
        for replica in self.replicas:
            replica.closed = False
        self.pull_all()

    def reclaim(self, time: float) -> None:
        """They sleep; what runs there goes on on the other replicas, or begins anew there."""
        self.settle(time)
        own = self.replicas[: len(self.replicas) - self.lent]
        for sample in [sample for replica in self.borrowed for sample in replica.leave()]:
            length, done, group = sample
            target = min(own, key=lambda replica: replica.load)
            target.waiting.append((length, EPSILON if self.anew else max(done, EPSILON), group))
        for replica in own:
            replica.admit()
        self.pull_all()

    # --- time ---------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether the replicas are stopped."""
        return self.held or self._blocked_since is not None

    def next_time(self) -> float:
        """When something next happens inside the pool; inf while it is stopped or empty."""
        if self.held or self._blocked_since is not None:
            return math.inf
        events, stamp = self._events, self._stamp
        while events and events[0][1] != stamp[events[0][2]]:
            heappop(events)
        return events[0][0] if events else math.inf

    def run(self, until: float, *, batch: bool = False, idle: bool = False) -> float | None:
        """Let everything up to `until` happen; stops where a batch is ready or the pool has drained.

        Returns the time at which it stopped, None if it reached `until`.
        """
        events = self._events
        while self.next_time() <= until and events:
            time = events[0][0]
            finished = self._fire(events[0][2], time)
            if (batch and finished and self.ready) or (idle and self.idle):
                return time
        return None

    def _fire(self, r: int, time: float) -> bool:
        """The next event, of replica r; whether a group finished."""
        replica, groups, finished = self.replicas[r], self.groups, False
        for number in replica.fire(time):
            group = groups[number]
            group.left -= 1
            if not group.left:
                self._group_done(number, group, replica.version)
                finished = True
        if replica.pending is not None and not replica.running and not replica.waiting:
            self._take_pending(replica)
        if self.started < replica.limit and not replica.closed:
            self._pull(replica)
        stamp = self._stamp[r] = self._stamp[r] + 1
        following = replica.next_time()
        if following < math.inf:
            heapreplace(self._events, (following, stamp, r))
        else:
            heappop(self._events)
        if finished and self.queue is not None and not self.draining and self._full:
            self._block(time)
        return finished

    def settle(self, time: float) -> None:
        """Bring every replica to `time`, which lies before the next event."""
        for r, replica in enumerate(self.replicas):
            if self.paused:
                replica.now = time
            elif time > replica.now:
                replica.advance(time)
            self._schedule(r)

    def pause(self, time: float) -> None:
        """Stop every replica."""
        self.settle(time)
        self.held = True

    def resume(self, time: float) -> None:
        """Carry on after a pause."""
        self.settle(time)
        self.held = False

    def _schedule(self, r: int) -> None:
        self._stamp[r] += 1
        time = self.replicas[r].next_time()
        if time < math.inf:
            heappush(self._events, (time, self._stamp[r], r))

    # --- admission ----------------------------------------------------------------------------------

    def _install(self, replica: RolloutReplica, version: int) -> None:
        """New weights on a replica, and with them more groups that it may start."""
        replica.version, replica.pending, replica.closed = version, None, False
        replica.limit = int((version + self.staleness + 1.0) * self.batch + EPSILON)

    def _pull(self, replica: RolloutReplica) -> None:
        while self.started < replica.limit and self._takes(replica):
            self._start(replica)

    def _takes(self, replica: RolloutReplica) -> bool:
        """Whether a group may go there: what can be late is sent at once and waits in the engine."""
        return self.late != "wait" or (not replica.waiting and replica.room)

    def pull_all(self) -> None:
        """Deal what may start, always to the replica with the fewest samples."""
        order = [(replica.load, r) for r, replica in enumerate(self.replicas)]
        heapify(order)
        while order:
            load, r = order[0]
            replica = self.replicas[r]
            if not replica.closed and self.started < replica.limit and self._takes(replica):
                heapreplace(order, (load + self._start(replica), r))
            else:
                heappop(order)
        for r in range(len(self.replicas)):
            self._schedule(r)

    def _start(self, replica: RolloutReplica) -> int:
        """Starts a group; its samples."""
        lengths = self._again.popleft() if self._again else self._drawn()
        number, version, count = self._number, replica.version, len(lengths)
        self.groups[number] = SampleGroup(version, count, version, lengths)
        if self._counted:
            self._untaken[version] = self._untaken.get(version, 0) + 1
        self.started, self._number = self.started + 1, number + 1
        replica.add(number, lengths)
        return count

    def _drawn(self) -> list[float]:
        """Lengths of the next prompt."""
        index = self.drawn % self.batch
        if index == 0:
            self._batch_lengths = self.lengths(self.drawn // self.batch)
            flat = np.asarray(self._batch_lengths)
            self.sums.append((float(flat.sum()), float((flat * flat).sum())))
        self.drawn += 1
        return self._batch_lengths[index]

    # --- the queue ----------------------------------------------------------------------------------

    def _group_done(self, number: int, group: SampleGroup, version: int) -> None:
        if self._counted:
            self._waiting[group.version] = self._waiting.get(group.version, 0) + 1
        elif self.late == "wait":  # partial: none is ever late
            group.version = version
        heappush(self.finished, (group.version, number))

    @staticmethod
    def _left(counts: dict[int, int], version: int) -> None:
        """One group less of a version."""
        if counts[version] > 1:
            counts[version] -= 1
        else:
            del counts[version]

    @property
    def ready(self) -> bool:
        """Whether the trainer can take its next batch and none is late later on."""
        if len(self.finished) < self.batch:
            return False
        untaken = waiting = 0
        slack = math.ceil(self.staleness) - self.taken
        for version in sorted(self._untaken):
            untaken += self._untaken[version]
            waiting += self._waiting.get(version, 0)
            if untaken - min(self.batch, waiting) > max(0, version + slack) * self.batch:
                return False
        return True

    def take(self, time: float) -> Taken:
        """The oldest finished groups, one batch."""
        assert self.ready
        numbers = [heappop(self.finished)[1] for _ in range(self.batch)]
        groups = [self.groups.pop(number) for number in numbers]
        for group in groups if self._counted else ():
            self._left(self._untaken, group.version)
            self._left(self._waiting, group.version)
        taken = Taken(
            numbers,
            [self.taken - g.version for g in groups],
            max(self.taken - g.start for g in groups),
            math.fsum(map(math.fsum, (g.lengths for g in groups))),
        )
        self.taken += 1
        if self._blocked_since is not None and not self._full:
            self._unblock(time)
        return taken

    @property
    def _full(self) -> bool:
        limit = math.inf if self.queue is None else max(self.queue, 1.0) * self.batch
        return len(self.finished) >= limit - EPSILON and self.ready

    def _block(self, time: float) -> None:
        self.settle(time)
        self._blocked_since = time

    def _unblock(self, time: float) -> None:
        assert self._blocked_since is not None
        self.blocked_seconds += time - self._blocked_since
        self.settle(time)
        self._blocked_since = None

    @property
    def queued(self) -> int:
        """Groups in the queue; what finished beyond its capacity waits inside the engine."""
        limit = math.inf if self.queue is None else max(self.queue, 1.0) * self.batch
        return int(min(len(self.finished), limit))

    # --- weight updates -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits for a slot."""
        return not any(replica.load for replica in self.replicas)

    def expire(self, time: float) -> None:
        """Groups that are too old for the batch that the trainer takes next leave."""
        self.settle(time)
        self._expire(self.taken)
        self.pull_all()

    def _expire(self, version: int) -> None:
        """Groups that are too old under the newest weights leave."""
        oldest = version - math.ceil(self.staleness)
        gone = {number for number, group in self.groups.items() if group.start < oldest}
        if self.late == "wait" or not gone:
            return
        for replica in self.replicas:
            self.rejected_tokens -= replica.drop(gone)
        for number in sorted(gone):
            lengths = self.groups.pop(number).lengths
            self.rejected_tokens += math.fsum(lengths)
            if self.late == "requeue":
                self._again.append(lengths)
        self.finished = [x for x in self.finished if x[1] not in gone]
        heapify(self.finished)
        self.started -= len(gone)
        self.rejected_groups += len(gone)

    def close(self, time: float) -> None:
        """Start nothing new until `swap`: running requests drain."""
        self.draining = True
        if self._blocked_since is not None:
            self._unblock(time)
        for replica in self.replicas:
            replica.closed = True

    def swap(self, time: float, version: int, *, hold: bool = False) -> None:
        """New weights on every replica at once; running sequences prefill again.

        `hold`: nothing new starts before `lend`.
        """
        self.settle(time)
        self._expire(version)
        for replica in self.replicas:
            replica.interrupted()
            self._install(replica, version)
            replica.closed = hold or replica in self.borrowed
        self.draining = False
        self.pull_all()

    def swap_as_drained(self, time: float, version: int) -> None:
        """Each replica takes the new weights as soon as its running requests are done."""
        self.settle(time)
        self._expire(version)
        for replica in self.replicas:
            replica.pending, replica.closed = version, True
            if not replica.load:
                self._take_pending(replica)
        self.pull_all()

    def _take_pending(self, replica: RolloutReplica) -> None:
        assert replica.pending is not None
        self._install(replica, replica.pending)
