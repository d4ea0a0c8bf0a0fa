"""Memory of a run against the ledger of its plan: the fullest GPU of each pool, phase by phase.

A counter counts whole GPUs, so roles are told apart only by what they hold in the plan, and by the phase in
which they work. On a machine without GPUs the counter is the process's memory, libraries included, of which
the plan's ledger counts the model's part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlhfsim.calibration.observation import Observation
from rlhfsim.frozen import frozen
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.trace import ALLOCATED, ENGINE_INSIDE, RESERVED, WAIT, Span, Trace

MEMORY = "memory_bytes"
ROLLOUT = "rollout"
NOT_TORCH = frozenset(("framework", "nccl"))
NOT_ALLOCATED = NOT_TORCH | {"fragmentation"}
"""Components of the ledger that torch does not count as allocated."""
POOL = ("weights", "kv_cache")
"""Components of an engine that lie in its pool, counted while it sleeps."""


@frozen
class PhaseMemory:
    """Bytes on the fullest GPU of a pool during a phase."""

    phase: str
    pool: str
    predicted: float | None
    """None: the plan has no such phase."""
    roles: Mapping[str, float]
    """Role -> bytes of the prediction, the largest first."""
    low: float | None
    """P10, components moving together."""
    high: float | None
    """P90, components moving together."""
    measured: float | None
    """Most in any counted step; None: not recorded."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def footprint(plan: Plan, seen: Observation, trace: Trace) -> tuple[PhaseMemory, ...]:
    """Every phase and pool of the ledger, then those that only the run has."""
    entries: dict[tuple[str, str], list[LedgerEntry]] = defaultdict(list)
    for entry in plan.prediction.ledger:
        entries[entry.phase, entry.pool].append(entry)
    peaks = measured(seen, trace)
    return tuple(
        _held(key, entries.get(key, []), peaks.get(key)) for key in dict.fromkeys([*entries, *peaks])
    )


def torch_counts(plan: Plan, seen: Observation, trace: Trace) -> tuple[PhaseMemory, ...]:
    """What torch counted in the trainer's process over the run, against all that its roles hold at once.

    Context and libraries are not torch's; what the allocator wastes is reserved, not allocated. A sleeping
    engine of that process counts with its pool, though no memory is behind it.
    """
    spans = [s for s in trace.spans if s.step in seen.counted]
    return tuple(
        _held((words, plan.placement.actor.pool), _counted(plan, apart, spans), peak)
        for key, words, apart in (
            (ALLOCATED, "all, allocated by torch", NOT_ALLOCATED),
            (RESERVED, "all, reserved by torch", NOT_TORCH),
        )
        if (peak := max((float(s.attributes.get(key, 0.0)) for s in spans), default=0.0))
    )


def _counted(plan: Plan, apart: frozenset[str], spans: Sequence[Span]) -> list[LedgerEntry]:
    """Entries that torch counts: of the trainer's fullest phase, and of the engine in the same process."""
    here = [e for e in plan.prediction.ledger if e.pool == plan.placement.actor.pool]
    trainer = [e for e in here if e.role != ROLLOUT and e.component not in apart]
    inside = any(s.attributes.get(ENGINE_INSIDE) for s in spans)
    engine = [e for e in here if inside and e.role == ROLLOUT and e.component in POOL]
    return _fullest(trainer) + _fullest(engine)


def _fullest(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    by_phase: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        by_phase[entry.phase].append(entry)
    return max(by_phase.values(), key=lambda held: sum(e.bytes for e in held), default=[])


def _held(key: tuple[str, str], entries: Sequence[LedgerEntry], peak: float | None) -> PhaseMemory:
    roles: dict[str, float] = defaultdict(float)
    for entry in entries:
        roles[entry.role] += entry.bytes
    return PhaseMemory(
        phase=key[0],
        pool=key[1],
        roles=dict(sorted(roles.items(), key=lambda item: -item[1])),
        measured=peak,
        predicted=sum(roles.values()) if entries else None,
        low=sum(e.low_bytes for e in entries) if entries else None,
        high=sum(e.high_bytes for e in entries) if entries else None,
    )


def measured(seen: Observation, trace: Trace) -> dict[tuple[str, str], float]:
    """Phase and pool -> most bytes on one of its GPUs while a span of the phase ran there."""
    levels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for c in sorted(trace.counters, key=lambda c: (c.time_s, c.value)):
        if c.name == MEMORY:
            levels[c.pool][c.group].append((c.time_s, c.value))
    largest: dict[tuple[str, str], float] = {}
    for span in trace.spans:
        if span.step not in seen.counted or span.kind == WAIT:
            continue
        peaks = (_most(rows, span.start_s, span.end_s) for rows in levels[span.pool].values())
        known = [peak for peak in peaks if peak is not None]
        if known:
            key = (span.name, span.pool)
            largest[key] = max(largest.get(key, 0.0), *known)
    return largest


def _most(rows: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """The largest value that holds at some instant between start and end."""
    first = max(0, bisect_right(rows, (start, float("inf"))) - 1)
    held = [value for time, value in rows[first:] if time <= end]
    return max(held, default=None)
