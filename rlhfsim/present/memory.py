"""What the fullest GPU of a pool holds, phase by phase, as charts show it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present.tables import added
from rlhfsim.present.words import MEMORY_GROUPS, is_move


@dataclass(frozen=True)
class State:
    """A phase and what a GPU holds in it."""

    phase: str
    entries: tuple[LedgerEntry, ...]

    @cached_property
    def bytes(self) -> float:
        """All of it."""
        return sum(e.bytes for e in self.entries)

    @cached_property
    def components(self) -> dict[str, float]:
        """Component of the ledger -> bytes."""
        return added((e.component, e.bytes) for e in self.entries)

    @cached_property
    def groups(self) -> dict[str, float]:
        """Group of components -> bytes."""
        named = {c for components in MEMORY_GROUPS.values() for c in components}
        return {
            group: sum(
                e.bytes
                for e in self.entries
                if e.component in components or not (components or e.component in named)
            )
            for group, components in MEMORY_GROUPS.items()
        }


def states(plan: Plan, pool: str) -> list[State]:
    """The phases of a pool in order; moves after which memory is as before are left out."""
    rows = [e for e in plan.prediction.ledger if e.pool == pool]
    every = [State(phase, tuple(entries)) for phase, entries in groupby(rows, key=lambda e: e.phase)]
    peak = max((state.bytes for state in every), default=0.0)
    shown: list[State] = []
    for state in every:
        moved = state.phase == "end" or is_move(state.phase)
        if not moved or state.bytes == peak or all(state.bytes != s.bytes for s in (*shown[:1], *shown[-1:])):
            shown.append(state)
    return shown
