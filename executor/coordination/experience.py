"""The experience buffer of a run: the rules of `buffer.py`, samples in Ray's object store, safe for threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from executor.coordination.buffer import Buffer, BufferSettings
from executor.coordination.failures import PartFailed
from executor.samples import Sample
from rlhfsim.plan import Plan

LOOK_S = 0.5
"""Between two looks of a trainer that waits."""


def settings_of(plan: Plan) -> BufferSettings:
    """Bounds as the plan's schedule sets them; an entry is the group of one prompt."""
    schedule, prompts = plan.placement.schedule, plan.workload.prompts
    bound = None if schedule.queue is None else math.ceil((schedule.queue + 1) * prompts)
    return BufferSettings(batch=prompts, staleness=schedule.staleness, bound=bound)


class Experience:
    """Groups of samples between the rollout's thread and the trainer's."""

    def __init__(self, settings: BufferSettings, version: int) -> None:
        self._buffer = Buffer(settings, version)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

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
        with self._changed:
            self._buffer.finish(group[0].group, content, oldest)
            self._changed.notify_all()

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
                    raise PartFailed(
                        "rollout",
                        "timed out",
                        f"{self._buffer.ready} of {self._buffer.settings.batch} groups were ready after {limit_s:g} s",
                    )
                self._changed.wait(LOOK_S)
        groups = ray.get([e.content for e in sorted(entries, key=lambda e: e.id)], timeout=limit_s)  # type: ignore[arg-type,return-value]
        return [sample for group in groups for sample in group]

    def fail(self, error: BaseException) -> None:
        """The rollout cannot go on: whoever waits hears it."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def published(self, version: int) -> None:
        """The trainer has new weights."""
        with self._changed:
            self._buffer.publish(version)
            self._changed.notify_all()

    @property
    def ready(self) -> int:
        """Groups that wait for the trainer."""
        return self._buffer.ready
