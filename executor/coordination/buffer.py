"""The experience buffer: which groups may start, which samples may be trained on.

An entry is what the trainer takes as a unit: the group of one prompt. `Buffer` keeps the rules and never
blocks; `Experience` keeps the samples in Ray's object store, for the threads of rollout and trainer.

Legend: v version of the trainer's weights (updates it has made), o oldest version among the tokens of an
entry, eta staleness bound, B entries of a training batch. An entry may be trained on while
v - o <= ceil(eta); a fraction of eta only limits how many may start. The trainer waits for entries that the
next update would make too old while they are generated, and takes no young entry where the old ones that
are left would then need more updates than they may wait for: none is thrown away. Where the schedule drops or
requeues them it does not, and what comes too late is counted and handed back.

    room = min((eta + v + 1) B - (accepted + running), bound - (ready + running))

Source: AReaL, arXiv 2505.24298 section 5.1, equation 3. The last term is the bound of this buffer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import ray

from executor.coordination.failures import PartFailed
from executor.samples import Sample
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan

LOOK_S = 0.5
"""Between two looks of a trainer that waits."""


@frozen
class BufferSettings:
    """How large, how old."""

    batch: int
    """Entries of a training batch."""
    staleness: float = 0.0
    """eta; 0: on-policy, the buffer is empty after every update."""
    bound: int | None = None
    """Most entries, ready and running; None: what eta admits."""
    waits: bool = True
    """The trainer waits for entries that would be too old."""

    def __post_init__(self) -> None:
        """Check that a batch can come together."""
        assert self.batch >= 1, self.batch
        assert self.staleness >= 0, self.staleness
        if self.bound is not None and self.bound < self.batch:
            raise RlhfsimError(
                "buffer-below-batch",
                f"a buffer of {self.bound} entries never holds a batch of {self.batch}",
                help="raise queue to at least one batch",
            )


@frozen
class BufferEntry:
    """What the trainer takes as a unit."""

    id: Any
    """Hashable and sortable."""
    content: Any
    """Opaque reference."""
    oldest: int
    """Oldest weight version among its tokens."""


class Buffer:
    """Entries that run, entries that are ready, and the rules between them."""

    def __init__(self, settings: BufferSettings, version: int = 0) -> None:
        """`version` is that of the trainer's weights at the start."""
        self.settings = settings
        self.version = version
        self._first = version
        self._accepted = 0
        self._running: dict[Hashable, int] = {}
        self._ready: list[BufferEntry] = []

    @property
    def running(self) -> int:
        """Entries that are being generated."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Entries that have finished and are young enough."""
        return len(self._ready)

    @property
    def oldest_allowed(self) -> int:
        """An entry with an older token is never handed out now."""
        return self.version - math.ceil(self.settings.staleness)

    def room(self) -> int:
        """Entries that may be submitted now."""
        s = self.settings
        admitted = math.floor((s.staleness + self.version - self._first + 1) * s.batch + 1e-9)
        fresh = admitted - self._accepted - self.running
        bounded = fresh if s.bound is None else s.bound - self.running - self.ready
        return max(0, min(fresh, bounded))

    def submit(self, id: Hashable, version: int | None = None) -> None:
        """Generation of an entry starts, with `version` (None: the trainer's) in the engine."""
        assert self.room() > 0, "submitted without room"
        assert id not in self._running, f"entry {id!r} runs already"
        self._running[id] = self.version if version is None else version

    def finish(self, id: Hashable, content: Any, oldest: int) -> bool:
        """An entry is complete, its oldest token sampled by version `oldest`; False: too old, dropped."""
        del self._running[id]
        if oldest < self.oldest_allowed:
            return False
        self._accepted += 1
        self._ready.append(BufferEntry(id=id, content=content, oldest=oldest))
        return True

    def skip(self, id: Hashable) -> None:
        """An entry is complete and not wanted: another may start in its place."""
        del self._running[id]

    def due(self) -> int:
        """Running entries that would be too old after the next update."""
        return sum(version <= self.oldest_allowed for version in self._running.values())

    def take(self) -> tuple[BufferEntry, ...] | None:
        """A batch for the trainer, oldest versions first; None: not yet, ask again after the next event."""
        split = self._split()
        if split is None:
            return None
        chosen, self._ready = split
        return tuple(chosen)

    def whole(self) -> bool:
        """Whether the trainer can take a batch."""
        return self._split() is not None

    def _split(self) -> tuple[list[BufferEntry], list[BufferEntry]] | None:
        """The batch that `take` hands out, and what is left."""
        batch, waits = self.settings.batch, self.settings.waits
        if self.ready < batch or (waits and self.due()):
            return None
        by_age = sorted(self._ready, key=lambda e: e.oldest)
        chosen, left = by_age[:batch], by_age[batch:]
        older_runs = any(version < chosen[-1].oldest for version in self._running.values())
        if waits and older_runs and not self._in_time([e.oldest for e in left]):
            return None
        return chosen, left

    def _in_time(self, left: Sequence[int]) -> bool:
        """Whether entries that are left, and those that run, can be trained on before they are too old."""
        ages = sorted([*left, *self._running.values()])
        return all(o - self.oldest_allowed > i // self.settings.batch for i, o in enumerate(ages))

    def publish(self, version: int) -> tuple[BufferEntry, ...]:
        """The trainer has new weights; entries that are too old now leave and are returned."""
        assert version >= self.version, (version, self.version)
        self.version = version
        gone = tuple(e for e in self._ready if e.oldest < self.oldest_allowed)
        self._ready = [e for e in self._ready if e.oldest >= self.oldest_allowed]
        self._accepted -= len(gone)  # others may start in their place
        return gone


def settings_of(plan: Plan) -> BufferSettings:
    """Bounds as the plan's schedule sets them."""
    schedule, prompts = plan.placement.schedule, plan.workload.prompts
    bound = None if schedule.queue is None else math.ceil((schedule.queue + 1) * prompts)
    waits = schedule.late == "wait"
    return BufferSettings(batch=prompts, staleness=schedule.staleness, bound=bound, waits=waits)


class Experience:
    """Groups of samples between the rollout's thread and the trainer's."""

    def __init__(self, settings: BufferSettings, version: int) -> None:
        self._buffer = Buffer(settings, version)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._tokens: dict[int, int] = {}
        """Response tokens of the groups that wait for the trainer."""
        self._rejected: dict[int, int] = {}
        """Groups that were too old since somebody asked, and their response tokens."""

    def room(self) -> int:
        """Groups that may be submitted now."""
        with self._changed:
            return self._buffer.room()

    def submitted(self, groups: Sequence[int]) -> None:
        """Generation of these groups starts."""
        with self._changed:
            for group in groups:
                self._buffer.submit(group)

    def put(self, group: Sequence[Sample]) -> None:
        """All samples of one prompt."""
        oldest = min(
            int(s.versions.min()) if s.versions is not None and len(s.versions) else self._buffer.version
            for s in group
        )
        content: Any = ray.put(list(group))
        id, tokens = group[0].group, sum(len(s.response) for s in group)
        with self._changed:
            kept = self._buffer.finish(id, content, oldest)
            (self._tokens if kept else self._rejected)[id] = tokens
            self._changed.notify_all()

    def skip(self, group: int) -> None:
        """A group that was generated is not trained on."""
        with self._changed:
            self._buffer.skip(group)
            self._changed.notify_all()

    def whole(self) -> bool:
        """Whether `take` need not wait."""
        with self._changed:
            return self._buffer.whole()

    def take(self, limit_s: float) -> list[Sample]:
        """One batch of whole groups, in the order of their ids.

        Raises:
            PartFailed: none came together in time; or the failure of the rollout.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            while (entries := self._buffer.take()) is None:
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() > deadline:
                    count = f"{self._buffer.ready} of {self._buffer.settings.batch}"
                    raise PartFailed("rollout", "timed out", f"{count} groups were ready after {limit_s:g} s")
                self._changed.wait(LOOK_S)
            for entry in entries:
                del self._tokens[entry.id]
        in_order = sorted(entries, key=lambda e: e.id)
        groups = ray.get([e.content for e in in_order], timeout=limit_s)
        return [sample for group in groups for sample in group]

    def fail(self, error: BaseException) -> None:
        """The rollout cannot go on: whoever waits hears it."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def published(self, version: int) -> None:
        """The trainer has new weights."""
        with self._changed:
            for entry in self._buffer.publish(version):
                self._rejected[entry.id] = self._tokens.pop(entry.id)
            self._changed.notify_all()

    def rejected(self) -> dict[int, int]:
        """Groups that became too old since the last call of this, with their response tokens."""
        with self._changed:
            rejected, self._rejected = self._rejected, {}
        return rejected
