"""Which roles are out of memory between their calls, and the moves that bring them in and out again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor.resolve import Job
from rlhfsim.specs.placement.placement import RolePlacement

OPTIMIZER = "optimizer"
"""Only the optimizer states leave; weights stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One role on its way in or out."""

    method: Literal["load", "unload"]
    role: str
    how: str
    """offloaded, recreated, or `OPTIMIZER`."""
    name: str
    """Of its span."""
    folder: str | None
    """Where it lies meanwhile; None: in host memory."""


class Residency:
    """Knows where each role is; `move` carries it."""

    def __init__(self, job: Job, scratch: Path, move: Callable[[Move, int], None]) -> None:
        """`move` takes the move and the step it belongs to."""
        self._job = job
        self._scratch = scratch
        self._move = move
        self._away: dict[str, str] = {}
        """Role that is out of memory -> how."""

    @contextlib.contextmanager
    def present(self, role: str, call: str, step: int, *, states: bool = False) -> Iterator[None]:
        """The role is in memory inside the block, with its optimizer where `states` says; then where its role keeps it."""
        if self._away.get(role) in ((OPTIMIZER,) if states else ()) + ("offloaded", "recreated"):
            self._move(self._planned("load", role, self._away.pop(role), call), step)
        yield
        self.rest(role, step, call)

    def rest(self, role: str, step: int, call: str = "") -> None:
        """To where its role keeps it between calls."""
        how = self._resting_place(role)
        if how is not None and role not in self._away:
            self._move(self._planned("unload", role, how, call or f"{role}.start"), step)
            self._away[role] = how

    def _resting_place(self, role: str) -> str | None:
        """None: it stays in memory."""
        placed = self._job.plan.placement.roles[role]
        assert isinstance(placed, RolePlacement)
        if placed.residency != "resident":
            return placed.residency
        return OPTIMIZER if placed.offload_between else None

    def _planned(self, method: Literal["load", "unload"], role: str, how: str, call: str) -> Move:
        to_disk = how == "recreated" or not self._job.gpu  # on a CPU only files give memory back
        folder = str(self._scratch / f"away-{role}") if to_disk else None
        return Move(method=method, role=role, how=how, name=f"{call}.{method}", folder=folder)
