"""Which roles are out of memory between their calls, and the moves that bring them in and out again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from executor.resolve import Job

OPTIMIZER = "optimizer"
"""Only the optimizer states leave; weights stay."""
WEIGHTS = "weights"
"""Only the weights of a role that is offloaded come in: enough for a forward pass."""

Move = Callable[[Literal["load", "unload"], str, str, str | None, str, int], None]
"""Carries a role in or out: method, role, how (offloaded, recreated, `OPTIMIZER` or `WEIGHTS`), where it lies
meanwhile (None: in host memory), name of the span, step."""


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
