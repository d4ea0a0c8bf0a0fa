"""What of the roles is in GPU memory: brought in before a call that needs it, taken out after.

The states of the rollout engine are those of the memory ledger: running, asleep, and in between ready:
weights are mapped, the KV cache is not. A step begins ready, because the sync that ended the one before
needed the weights alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from executor.coordination.gpu_faults import Readings, check_asleep
from executor.resolve import Job

LOSES_WEIGHTS = 2
"""Sleep level after which weights must be received again."""
OPTIMIZER = "optimizer"
"""Only the optimizer states leave; weights stay."""
WEIGHTS = "weights"
"""Only the weights of a role that is offloaded come in: enough for a forward pass."""

Move = Callable[[Literal["load", "unload"], str, str, str | None, str, int], None]
"""Carries a role in or out: method, role, how (offloaded, recreated, `OPTIMIZER` or `WEIGHTS`), where it lies
meanwhile (None: in host memory), name of the span, step."""


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


@dataclass
class Residency:
    """Knows where each role is; `move` carries it."""

    job: Job
    scratch: Path
    move: Move
    _away: dict[str, str] = field(default_factory=dict)
    """Role that is out of memory -> how."""

    @contextlib.contextmanager
    def present(self, role: str, call: str, step: int, *, states: bool = False) -> Iterator[None]:
        """Inside the block the role is in memory, with its optimizer if `states`; then where it rests."""
        away = self._away.get(role)
        if away == "offloaded" and not states:
            self._carry("load", role, WEIGHTS, call, step)
            self._away[role] = OPTIMIZER
        elif away is not None and (states or away != OPTIMIZER):
            self._carry("load", role, self._away.pop(role), call, step)
        yield
        self.rest(role, step, call)

    def rest(self, role: str, step: int, call: str = "") -> None:
        """To where its role keeps it between calls."""
        how = self._resting_place(role)
        if how is not None and self._away.get(role) != how:
            self._carry("unload", role, how, call or f"{role}.start", step)
            self._away[role] = how

    def _resting_place(self, role: str) -> str | None:
        """None: it stays in memory."""
        placed = self.job.plan.placement.trainers[role]
        if placed.residency != "resident":
            return placed.residency
        return OPTIMIZER if placed.offload_between else None

    def _carry(self, method: Literal["load", "unload"], role: str, how: str, call: str, step: int) -> None:
        to_disk = how == "recreated" or not self.job.gpu  # on a CPU only files give memory back
        folder = str(self.scratch / f"away-{role}") if to_disk else None
        self.move(method, role, how, folder, f"{call}.{method}", step)
