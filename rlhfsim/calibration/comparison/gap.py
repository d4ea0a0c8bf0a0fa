"""Why a measured step is longer or shorter than the predicted one: seconds by cause, which add up.

    W - P = lengths + sum_f (m_f - p'_f) + waiting + order          W, m: means over the counted steps

P is the sum of the phases p_f of the critical chain. Each is first priced again with the measured lengths
(p'_f = p_f c_f; c_f from the closed form with both): the difference is `lengths`. What is left of a phase
that was timed is split by the shares of its resources in the prediction. `waiting` is the time of the step
in which no call worked (W minus the union of all spans), less what the plan says of phases that the run did
not time. `order` is what remains: calls that ran beside each other in one of the two and not in the other.

Not known here: which resource was really short; the split says where the prediction put the phase's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rlhfsim.calibration.observation import Observation, phase_seconds
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.trace import WAIT, Span, Trace, covered

CAUSES = ("lengths", "compute", "hbm", "network", "overhead", "waiting", "order")
"""In the order in which they are told."""
CAUSE_OF = {
    "compute": "compute",
    "hbm": "hbm",
    "nvlink": "network",
    "network": "network",
    "pcie": "overhead",
    "storage": "overhead",
    "host": "overhead",
    "overhead": "overhead",
    "bubble": "waiting",
    "tail": "waiting",
}
"""Resource of the prediction -> cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseGap:
    """What one phase adds to the gap."""

    name: str
    predicted_s: float
    """As planned; 0 where the plan does not have it."""
    with_lengths_s: float
    """Priced with the measured lengths."""
    measured_s: float | None
    """Mean over the counted steps; None: not timed."""
    parts: Mapping[str, float]
    """Seconds by cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The gap of the mean step."""

    predicted_s: float
    measured_s: float
    parts: Mapping[str, float]
    """Seconds by cause, all of `CAUSES`; they add up to measured - predicted."""
    phases: tuple[PhaseGap, ...]
    """Of the critical chain, and those that were not planned."""
    idle_s: float
    """Time of the mean step in which no call worked."""
    untimed_s: float
    """What the plan says of the phases that the run did not time, with the measured lengths."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Means over the counted steps."""

    step_s: float
    phases: Mapping[str, float]
    busy_s: float
    """Union of all spans."""


def gap(plan: Plan, seen: Observation, trace: Trace) -> Gap | None:
    """Causes of the difference between a run's mean step and the plan's; None: no step was timed."""
    if not seen.step_s:
        return None
    measured = _means(seen, trace)
    factors, notes = length_factors(plan, seen)
    chain = [p for p in plan.prediction.phases if p.critical]
    rest = plan.prediction.step_s - math.fsum(p.seconds for p in chain)
    timed = _timed(chain, seen, measured)
    phases = [
        _phase(name, [p for p in chain if p.name in group], factors, measured)
        for name, group in timed.items()
    ]
    grouped = {name for group in timed.values() for name in group}
    untimed = [p for p in chain if p.name not in grouped]
    phases += [_untimed(p, factors) for p in untimed]
    phases += _unplanned(plan, seen, measured, timed)
    idle, hidden = (
        measured.step_s - measured.busy_s,
        math.fsum(p.with_lengths_s for p in phases if p.measured_s is None),
    )
    parts = {cause: math.fsum(p.parts.get(cause, 0.0) for p in phases) for cause in CAUSES}
    parts["waiting"] += idle - rest
    total = measured.step_s - plan.prediction.step_s
    parts["order"] += total - math.fsum(parts.values())
    return Gap(
        predicted_s=plan.prediction.step_s,
        measured_s=measured.step_s,
        parts=parts,
        phases=tuple(phases),
        idle_s=idle,
        untimed_s=hidden,
        notes=notes,
    )


def _means(seen: Observation, trace: Trace) -> _Measured:
    """Seconds of phases, of the busy union and of the step, means over the counted steps."""
    spans = [s for s in trace.spans if s.step in seen.counted and s.kind != WAIT]
    known = [s for s in spans if s.name in seen.phases]
    steps = len(seen.counted)
    sums = {name: math.fsum(times) / steps for name, times in phase_seconds(known).items()}
    busy = [_busy(known, step, whole) for step, whole in zip(seen.counted, seen.step_s, strict=True)]
    return _Measured(step_s=fmean(seen.step_s), phases=sums, busy_s=fmean(busy))


def _busy(spans: Sequence[Span], step: int, whole: float) -> float:
    """Time of a step in which some call worked, at most the step."""
    windows = covered((s.start_s, s.end_s) for s in spans if s.step == step)
    return min(whole, math.fsum(end - start for start, end in windows))


def length_factors(plan: Plan, seen: Observation) -> tuple[dict[str, float], tuple[str, ...]]:
    """Phase -> seconds with the measured lengths over seconds with the planned ones, in closed form."""
    try:
        same = replace(seen, plan=plan, prompt_tokens=None, response_tokens=None, covers={})
        before = pricer_of(same).seconds()
        after = pricer_of(replace(seen, plan=plan, covers={})).seconds()
    except RlhfsimError as error:
        return {}, (f"lengths were not told apart: {error.message}",)
    return {name: after[name] / s for name, s in before.items() if s > 0 and name in after}, ()


def _timed(
    chain: Sequence[PredictedPhase], seen: Observation, measured: _Measured
) -> dict[str, tuple[str, ...]]:
    """Measured phase -> phases of the chain that it times."""
    names = {p.name for p in chain}
    groups = {m: tuple(n for n in seen.covers.get(m, (m,)) if n in names) for m in measured.phases}
    return {m: group for m, group in groups.items() if group}


def _phase(
    name: str, planned: Sequence[PredictedPhase], factors: Mapping[str, float], measured: _Measured
) -> PhaseGap:
    before = math.fsum(p.seconds for p in planned)
    after = math.fsum(p.seconds * factors.get(p.name, 1.0) for p in planned)
    residual = measured.phases[name] - after
    parts = {"lengths": after - before}
    for cause, share in shares(planned).items():
        parts[cause] = parts.get(cause, 0.0) + residual * share
    return PhaseGap(
        name=name, predicted_s=before, with_lengths_s=after, measured_s=measured.phases[name], parts=parts
    )


def shares(planned: Sequence[PredictedPhase]) -> dict[str, float]:
    """Cause -> share of the predicted seconds; overhead where nothing is predicted."""
    found: dict[str, float] = {}
    for phase in planned:
        for resource, seconds in phase.by_resource_s.items():
            cause = CAUSE_OF.get(resource, "overhead")
            found[cause] = found.get(cause, 0.0) + seconds
    whole = math.fsum(found.values())
    return {k: v / whole for k, v in found.items()} if whole > 0 else {"overhead": 1.0}


def _untimed(planned: PredictedPhase, factors: Mapping[str, float]) -> PhaseGap:
    """A phase that the run did not time: its time is in what the calls leave of the step."""
    after = planned.seconds * factors.get(planned.name, 1.0)
    parts = {"lengths": after - planned.seconds, "waiting": -after}
    return PhaseGap(
        name=planned.name, predicted_s=planned.seconds, with_lengths_s=after, measured_s=None, parts=parts
    )


def _unplanned(
    plan: Plan, seen: Observation, measured: _Measured, timed: Mapping[str, object]
) -> list[PhaseGap]:
    """Phases that only the run has: overhead. Those that the plan hides behind others are in `order`."""
    planned = {p.name for p in plan.prediction.phases}
    mine = [m for m in measured.phases if m not in timed and not planned & set(seen.covers.get(m, (m,)))]
    return [
        PhaseGap(
            name=m,
            predicted_s=0.0,
            with_lengths_s=0.0,
            measured_s=measured.phases[m],
            parts={"overhead": measured.phases[m]},
        )
        for m in mine
    ]
