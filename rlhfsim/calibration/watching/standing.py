"""How a running job compares with its plan: the newest steps against the prediction, and what grows.

Phases are those of `rlhfsim compare`, over the newest steps; the first step of a run, which warms up, does
not count. Memory is what the framework logs; its limit is what the plan leaves on the fullest GPU for what is
counted there.

Not known here: GPUs that no metric speaks of, and a framework's memory between two logged peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from rlhfsim.calibration.comparison.memory import NOT_ALLOCATED, NOT_TORCH, POOL, ROLLOUT
from rlhfsim.calibration.comparison.phases import PhaseComparison, rows, step_row
from rlhfsim.calibration.watching.trend import Trend, trend
from rlhfsim.frozen import frozen
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.imported import LoggedStep, first, timers
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.units import GIB

RECENT = 50
"""Steps that say how the run is now."""
LATEST = 5
"""Steps that say whether it is slower than at its start, and how many responses are cut."""


@frozen
class Baseline:
    """What a run is held against."""

    plan: Plan
    mapped: Mapping[str, tuple[str, ...]]
    """Metric -> phases of the plan that it covers."""
    engine_inside: bool = False
    """Whether the pool of the rollout engine is in what torch counts, also while it sleeps."""
    said_by: str
    """`plan.json`, or the doctor."""


@frozen
class Standing:
    """How a run is, as far as its log says."""

    steps: int
    """Whole steps that were looked at."""
    logged: int
    """The framework's count of the newest one."""
    step: PhaseComparison
    phases: tuple[PhaseComparison, ...] = ()
    memory: Trend | None = None
    """Bytes on the fullest GPU; None: not logged."""
    response: Trend | None = None
    """Mean tokens, against the length at which they are cut."""
    longest: float | None = None
    """Longest response of the newest steps."""
    clipped: float | None = None
    """Share of the responses that were cut, mean of the latest steps."""
    slowdown: float | None = None
    """Latest steps over those after the warm-up, medians; None: too few."""
    not_finite: tuple[str, ...] = ()
    """Metrics of the newest step that are nan or infinite."""
    oom_risk: float | None = None
    """Risk by the trend of memory; where none is logged, that of the plan."""
    quiet_s: float | None = None
    """Seconds since the newest step came; None: nobody waits for one."""


def standing(
    steps: Sequence[LoggedStep],
    framework: Framework,
    baseline: Baseline | None,
    *,
    cap: float | None,
    capacity: float | None,
    ahead: int,
) -> Standing:
    """How a run is, from its steps since it began; `cap`: tokens at which responses are cut; `capacity`:
    bytes of a GPU where there is no plan; `ahead`: steps that are looked ahead."""
    warm = list(steps[1:]) or list(steps)
    recent = warm[-RECENT:]
    seconds = [s for step in recent if (s := framework.seconds_of(step.values))]
    memory = _memory(steps, framework, baseline, capacity, ahead)
    response = [first(step.values, framework.response) for step in warm]
    known = [r for r in response if r is not None]
    risk = memory.risk if memory and memory.limit and memory.each_step is not None else None
    if risk is None and baseline is not None:
        risk = baseline.plan.prediction.probability_out_of_memory
    return Standing(
        steps=len(steps),
        logged=steps[-1].logged,
        step=step_row(seconds, baseline.plan if baseline else None),
        phases=_phases(recent, framework, baseline) if baseline else (),
        memory=memory,
        response=trend(known, cap, ahead),
        longest=max((v for s in recent if (v := first(s.values, framework.longest))), default=None),
        clipped=_clipped(warm[-LATEST:], framework),
        slowdown=_slowdown(warm, framework),
        not_finite=tuple(n for n, v in steps[-1].values.items() if not math.isfinite(v)),
        oom_risk=risk,
    )


def _phases(
    steps: Sequence[LoggedStep], framework: Framework, baseline: Baseline
) -> tuple[PhaseComparison, ...]:
    """Phases that the run times and the plan has."""
    times: dict[str, list[float]] = {}
    covers: dict[str, tuple[str, ...]] = {}
    stale = baseline.plan.placement.schedule.asynchronous
    for timer in timers(framework, stale):
        if covered := baseline.mapped.get(timer.metric):
            name = timer.phase if timer.phase in covered else covered[0]
            covers[name] = covered
            times[name] = [step.values[timer.metric] for step in steps if timer.metric in step.values]
    if framework.rest is not None and times:
        name = framework.rest.phase
        covers[name] = framework.rest.covers
        times[name] = [rest for step in steps if (rest := _rest(step, framework, baseline)) > 0]
    compared = rows(baseline.plan, {name: t for name, t in times.items() if t}, covers)
    return tuple(r for r in compared if r.measured_s is not None and r.predicted_s)


def _rest(step: LoggedStep, framework: Framework, baseline: Baseline) -> float:
    """What the timers leave of the step."""
    timed = math.fsum(step.values.get(metric, 0.0) for metric in baseline.mapped)
    return step.values.get(framework.step, 0.0) - timed


# --- memory and lengths -----------------------------------------------------------------------------


def _memory(
    steps: Sequence[LoggedStep],
    framework: Framework,
    baseline: Baseline | None,
    capacity: float | None,
    ahead: int,
) -> Trend | None:
    """The trend of what is held on the fullest GPU: by all, else by tensors, else reserved by torch."""
    for names, apart in (
        (framework.device_gib, frozenset[str]()),
        (framework.allocated_gib, NOT_ALLOCATED),
        (framework.reserved_gib, NOT_TORCH),
    ):
        held = [v * GIB for step in steps if (v := first(step.values, names)) is not None]
        if held:
            room = capacity
            if baseline:
                whole = baseline.plan.prediction.capacity_bytes
                room = torch_room(baseline, apart) if apart else whole
            return trend(held, room, ahead)
    return None


def torch_room(baseline: Baseline, apart: frozenset[str]) -> float:
    """Bytes that torch can count in the trainer's process before its GPU is full.

    What else the ledger has there comes off; the pool of an engine in the same process counts although no
    memory is behind it while it sleeps.
    """
    plan = baseline.plan
    by_phase: dict[str, list[LedgerEntry]] = {}
    for entry in plan.prediction.ledger:
        if entry.pool == plan.placement.actor.pool:
            by_phase.setdefault(entry.phase, []).append(entry)

    def torchs(phase: str) -> float:
        return sum(e.bytes for e in by_phase[phase] if e.role != ROLLOUT and e.component not in apart)

    fullest = by_phase[max(by_phase, key=torchs)] if by_phase else []
    others = sum(e.bytes for e in fullest if e.role == ROLLOUT or e.component in apart)
    pools = (
        sum(e.bytes for e in entries if e.role == ROLLOUT and e.component in POOL)
        for entries in by_phase.values()
    )
    asleep = max(pools, default=0.0) if baseline.engine_inside else 0.0
    return plan.prediction.capacity_bytes - others + asleep


def _clipped(steps: Sequence[LoggedStep], framework: Framework) -> float | None:
    """Share of responses that were cut; None: not logged."""
    shares = [step.values[name] for step in steps for name in framework.clipped[:1] if name in step.values]
    return math.fsum(shares) / len(shares) if shares else None


def _slowdown(warm: Sequence[LoggedStep], framework: Framework) -> float | None:
    seconds = [s for step in warm if (s := framework.seconds_of(step.values))]
    if len(seconds) < 2 * LATEST:
        return None
    return median(seconds[-LATEST:]) / median(seconds[:LATEST])
