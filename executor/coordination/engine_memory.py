"""What of the rollout engine is in GPU memory: brought in before a call that needs it, taken out after.

The states are those of the memory ledger: running, asleep, and in between ready: weights are mapped, the KV
cache is not. A step begins ready, because the sync that ended the one before needed the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable

from executor.coordination.gpu_faults import Readings, check_asleep
from executor.resolve import Job

LOSES_WEIGHTS = 2
"""Sleep level after which weights must be received again."""


class EngineMemory:
    """Moves of all replicas together; asked again, they do nothing."""

    def __init__(self, job: Job, move: Callable[..., Readings], resend: Callable[[int], object]) -> None:
        """`move(method, *arguments, span=, step=)` acts on all replicas and says what each then holds,
        `resend(step)` sends the weights."""
        role, schedule = job.plan.placement.rollout, job.plan.placement.schedule
        idles = role is not None and role.residency != "recreated" and not schedule.asynchronous
        self._level = role.sleep_level if role is not None and idles else 0
        self._move, self._resend = move, resend
        self._plan, self._counted = job.plan, job.gpu and job.fakes is None
        self._away: set[str] = set()
        self._lost = False
        """The weights in GPU memory are no weights."""

    def built(self) -> None:
        """Engines are new and whole: ready from here on."""
        self._away, self._lost = set(), False
        if self._level:
            self._move("release_kv_cache")
            self._away = {"kv_cache"}

    def for_generation(self, step: int) -> None:
        """Running, with weights."""
        if self._lost:
            self._wake_weights("actor.generate.load", step)
            self._resend(step)
            self._lost = False
        if self._away:
            self._move("wake", True, span="actor.generate.load", step=step)
            self._away = set()

    def for_sync(self, step: int) -> None:
        """Weights have a place to arrive in; the KV cache stays out."""
        self._wake_weights("actor.sync.load", step)
        self._lost = False

    def _wake_weights(self, span: str, step: int) -> None:
        if "weights" in self._away:
            self._move("wake", False, span=span, step=step)
            self._away -= {"weights"}

    def rest(self, step: int) -> None:
        """Asleep, where the plan lets it sleep."""
        if self._level and "weights" not in self._away:
            leaving, span = {"weights", "kv_cache"} - self._away, "actor.generate.unload"
            readings = self._move("sleep", self._level, span=span, step=step)
            if self._counted:
                check_asleep(self._plan, span, leaving, readings)
            self._away = {"weights", "kv_cache"}
            self._lost = self._level == LOSES_WEIGHTS
