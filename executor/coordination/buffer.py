"""The experience buffer: which requests may start, which samples may be trained on.

Bookkeeping only: entries hold opaque references (to Ray's object store), so nothing here knows Ray, and
nothing blocks; the coordinator asks again after every event. An entry is what the trainer takes as a unit:
one sample, or the group of one prompt.

Legend: v version of the trainer's weights (updates it has made), o oldest version among the tokens of an
entry, eta staleness bound, B entries of a training batch. An entry may be trained on while v - o <= ceil(eta);
a fraction of eta only limits how many may start.

    room = min(concurrent - running, (eta + v + 1) B - (accepted + running), bound - (ready + running))

Source: AReaL, arXiv 2505.24298 section 5.1, equation 3. The last term is the bound of this buffer. Redis
would hold the same references under the same rules; only Ray's store is run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rlhfsim.errors import RlhfsimError

Policy = Literal["drop", "wait"]
"""What becomes of entries that the next update would make too old while they are generated. drop: they are
thrown away when they arrive; wait: the trainer waits for them, so that nothing is thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """How large, how old, how often."""

    batch: int
    """Entries of a training batch."""
    staleness: float = 0.0
    """eta; 0: on-policy, the buffer is empty after every update."""
    policy: Policy = "wait"
    uses: int = 1
    """Times that one entry may be trained on; above 1 entries are sampled again while they are young enough."""
    bound: int | None = None
    """Most entries, ready and running; None: what eta admits."""
    concurrent: int | None = None
    """Most running entries; None: no limit."""

    def __post_init__(self) -> None:
        """Check that a batch can come together."""
        assert self.batch >= 1, self.batch
        assert self.uses >= 1, self.uses
        assert self.staleness >= 0, self.staleness
        assert self.concurrent is None or self.concurrent >= 1, self.concurrent
        if self.bound is not None and self.bound < self.batch:
            raise RlhfsimError(
                "buffer-below-batch",
                f"a buffer of {self.bound} entries never holds a batch of {self.batch}",
                help="raise queue to at least one batch",
            )
        if self.uses > 1 and self.policy == "wait":
            raise RlhfsimError(
                "reuse-needs-drop",
                f"entries that are used {self.uses} times do not go with the policy wait",
                help="use policy drop: what is sampled again leaves by age",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferEntry:
    """What the trainer takes as a unit."""

    id: Hashable
    content: Any
    """Opaque reference."""
    oldest: int
    """Oldest weight version among its tokens."""
    uses: int = 0
    """Times that it was handed out."""


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """What has happened so far."""

    submitted: int = 0
    handed_out: int = 0
    dropped: int = 0
    """Too old when they finished, or too old before their turn came."""
    cancelled: int = 0


class Buffer:
    """Entries that run, entries that are ready, and the rules between them."""

    def __init__(
        self, settings: BufferSettings, version: int = 0, rng: np.random.Generator | None = None
    ) -> None:
        """`version` is that of the trainer's weights at the start; `rng` draws where entries are used again."""
        self.settings = settings
        self.version = version
        self.counts = BufferCounts()
        self._first = version
        self._rng = rng or np.random.default_rng(0)
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
        limits = [
            math.floor((s.staleness + self.version - self._first + 1) * s.batch + 1e-9)
            - self._accepted
            - self.running
        ]
        if s.concurrent is not None:
            limits.append(s.concurrent - self.running)
        if s.bound is not None:
            limits.append(s.bound - self.running - self.ready)
        return max(0, min(limits))

    def submit(self, id: Hashable, version: int | None = None) -> None:
        """Generation of an entry starts, with `version` (None: the trainer's) in the engine."""
        assert self.room() > 0, "submitted without room"
        assert id not in self._running, f"entry {id!r} runs already"
        self._running[id] = self.version if version is None else version
        self.counts.submitted += 1

    def finish(self, id: Hashable, content: Any, oldest: int) -> bool:
        """An entry is complete, its oldest token sampled by version `oldest`; False: too old, dropped."""
        del self._running[id]
        if oldest < self.oldest_allowed:
            self.counts.dropped += 1
            return False
        self._accepted += 1
        self._ready.append(BufferEntry(id=id, content=content, oldest=oldest))
        return True

    def cancel(self, id: Hashable) -> None:
        """An entry was lost (a replica died, the request was aborted); another may start."""
        del self._running[id]
        self.counts.cancelled += 1

    def due(self) -> int:
        """Running entries that would be too old after the next update."""
        return sum(version <= self.oldest_allowed for version in self._running.values())

    def doomed(self) -> tuple[Hashable, ...]:
        """Running entries that are too old already: they will be dropped, so they may as well be aborted."""
        return tuple(id for id, version in self._running.items() if version < self.oldest_allowed)

    def take(self) -> tuple[BufferEntry, ...] | None:
        """A batch for the trainer, or None: not yet (ask again after the next event)."""
        if self.ready < self.settings.batch or (self.settings.policy == "wait" and self.due()):
            return None
        chosen = self._chosen()
        left = [e for e in chosen if e.uses < self.settings.uses]
        ids = {e.id for e in chosen}
        self._ready = [e for e in self._ready if e.id not in ids] + left
        self.counts.handed_out += len(chosen)
        return tuple(chosen)

    def _chosen(self) -> list[BufferEntry]:
        """Oldest versions first; with several uses a random choice."""
        batch = self.settings.batch
        if self.settings.uses == 1:
            found = sorted(self._ready, key=lambda e: e.oldest)[:batch]
        else:
            order = self._rng.permutation(self.ready)[:batch]
            found = [self._ready[i] for i in sorted(order)]
        return [replace(entry, uses=entry.uses + 1) for entry in found]

    def publish(self, version: int) -> tuple[BufferEntry, ...]:
        """The trainer has new weights; entries that are too old now leave and are returned."""
        assert version >= self.version, (version, self.version)
        self.version = version
        gone = tuple(e for e in self._ready if e.oldest < self.oldest_allowed)
        self._ready = [e for e in self._ready if e.oldest >= self.oldest_allowed]
        unused = sum(e.uses == 0 for e in gone)
        self._accepted -= unused  # others may start in their place
        self.counts.dropped += unused
        return gone
