"""Out of memory: recognised in the words of every library, explained by the plan's ledger."""

from __future__ import annotations

import re
from collections.abc import Callable

from executor.coordination.detectors import Detection
from executor.coordination.failures import causes
from executor.coordination.others import Held
from executor.refusals import SPLIT
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.units import format as shown
from rlhfsim.units import parse

WORDS = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "cannot allocate memory",
    "no available memory for the cache blocks",
    "running low on memory",
    "memory pressure",
)
"""How torch, CUDA, the C library, vLLM and Ray say it."""
_PIECES = re.compile(
    r"Tried to allocate ([\d.]+) ([KMGT]iB)\b.*?([\d.]+) ([KMGT]iB) is reserved by PyTorch but unallocated",
    re.S,
)
REMEDY = (
    "smaller micro-batch, recompute: full, offload_optimizer: cpu, "
    "or a lower memory_utilization of the rollout engine"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error or one of its causes says so."""
    # Ray guesses at "OOM killer" for every process that is gone: that is no evidence
    return any(
        isinstance(seen, MemoryError) or words in f"{type(seen).__name__} {seen}".lower()
        for seen in causes(error)
        for words in WORDS
    )


def out_of_memory(
    plan: Plan,
    phase: str,
    part: str,
    smallest_change: Callable[[], str | None] | None = None,
    held: Held | None = None,
    said: str = "",
) -> Detection:
    """The plan's ledger of the phase in which memory ran out, and the smallest change that fits.

    `phase` is a name of the plan (`actor.train`); one that its ledger lacks is explained by the peak.
    `smallest_change` asks the planner, which the executor does not import; None: nothing is known to fit.
    `held`: what others had of that memory before the engines were built; where the plan would fit without it,
    no change of the plan is asked for. `said`: torch's words, which tell fragmentation.
    """
    rows = _fullest(plan, phase)
    where = "has there" if rows else f"peaks in {plan.prediction.peak_phase} with"
    rows = rows or _fullest(plan, plan.prediction.peak_phase)
    listed = ", ".join(f"{r.role} {r.component} {shown(r.bytes, 'byte')}" for r in rows[:5])
    total = shown(sum(row.bytes for row in rows), "byte")
    capacity = shown(plan.prediction.capacity_bytes, "byte")
    pieces = _PIECES.search(said)
    if pieces is not None and _size(pieces[3], pieces[4]) >= _size(pieces[1], pieces[2]):
        return _fragmented(plan, f"{part} ran out of memory in {phase}", pieces)
    before = ""
    if held is None or not held.counts:
        advice = (smallest_change() if smallest_change else None) or REMEDY
    else:
        before = f"before the run {held}; "
        advice = (
            "end those processes or leave their GPUs out (CUDA_VISIBLE_DEVICES): the plan reckons with "
            f"all of this memory; or next to them: {REMEDY}"
        )
    what = f"{part} ran out of memory in {phase}; {before}the plan {where} {total} of {capacity}: {listed}"
    return _stop(what, advice)


def _stop(what: str, advice: str) -> Detection:
    return Detection(code="out-of-memory", severity="stop", what=what, advice=advice)


def _fragmented(plan: Plan, who: str, pieces: re.Match[str]) -> Detection:
    """Enough is free in torch's allocator, in pieces that are too small."""
    by_ipc = WEIGHT_PATHS[plan.placement.weight_path].transports.get(plan.topology) == "ipc"
    allocator = SPLIT if by_ipc else "expandable_segments:True"
    return _stop(
        f"{who}: {pieces[1]} {pieces[2]} were asked for and {pieces[3]} {pieces[4]} are free in torch's "
        "allocator, in smaller pieces (fragmentation)",
        f"set PYTORCH_ALLOC_CONF={allocator} in the settings' variables, or {REMEDY}",
    )


def _size(number: str, unit: str) -> float:
    return parse(f"{number} {unit}", "byte")


def _fullest(plan: Plan, phase: str) -> list[LedgerEntry]:
    """Ledger rows of a phase on the pool whose GPUs hold most then, largest first."""
    rows = [row for row in plan.prediction.ledger if row.phase == phase]
    pools = {pool: sum(r.bytes for r in rows if r.pool == pool) for pool in {r.pool for r in rows}}
    fullest = max(pools, key=lambda pool: (pools[pool], pool), default=None)
    return sorted((row for row in rows if row.pool == fullest), key=lambda row: -row.bytes)
