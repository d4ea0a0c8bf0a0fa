"""Why a measured step is longer or shorter than the predicted one: seconds by cause, which add up.

    W - P = lengths + sum_f (m_f - p'_f) + waiting + order          W, m: means over the counted steps

P is the sum of the phases p_f of the critical chain. Each is first priced again with the measured lengths
(p'_f = p_f c_f; c_f from the closed form with both): the difference is `lengths`. What is left of a phase
that was timed is split by the shares of its resources in the prediction. `waiting` is the time of the step
in which no call worked (W minus the union of all spans), less what the plan says of phases that the run did
not time. `order` is what remains: calls that ran at the same time in one of the two and not in the other.

Not known here: which resource was really short; the split says where the prediction put the phase's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from rlhfsim.calibration.observation import Observation, phase_seconds
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.trace import WAIT, Trace, covered

CAUSES = ("lengths", "compute", "hbm", "network", "overhead", "waiting", "order")
"""In the order in which they are told."""
CAUSE_OF = {
    "compute": "compute",
    "hbm": "hbm",
    "nvlink": "network",
    "network": "network",
    "wan": "network",
    "environment": "waiting",
    "bubble": "waiting",
    "tail": "waiting",
}
"""Resource of the prediction -> cause; of any other overhead."""


@frozen
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


@frozen
class Gap:
    """The gap of the mean step."""

    predicted_s: float
    measured_s: float
    parts: Mapping[str, float]
    """Seconds by cause, all of `CAUSES`; they add up to measured - predicted."""
    phases: tuple[PhaseGap, ...]
    """Phases of the critical chain, and those that were not planned."""
    idle_s: float
    """Time of the mean step in which no call worked."""
    untimed_s: float
    """What the plan says of the phases that the run did not time, with the measured lengths."""
    notes: tuple[str, ...] = ()


def gap(plan: Plan, seen: Observation, trace: Trace) -> Gap | None:
    """Causes of the difference between a run's mean step and the plan's; None: no step was timed."""
    if not seen.step_s:
        return None
    measured, busy_s = _means(seen, trace)
    factors, notes = length_factors(plan, seen)
    chain = [p for p in plan.prediction.phases if p.critical]
    rest = plan.prediction.step_s - math.fsum(p.seconds for p in chain)
    timed = {m: [p for p in chain if p.name in seen.covers.get(m, (m,))] for m in measured}
    grouped = {p.name for group in timed.values() for p in group}
    phases = [_phase(name, group, factors, measured[name]) for name, group in timed.items() if group]
    phases += [_phase(p.name, [p], factors, None) for p in chain if p.name not in grouped]
    # phases that only the run has are overhead; those that the plan hides behind others are in `order`
    planned = {p.name for p in plan.prediction.phases}
    phases += [
        _phase(name, [], factors, measured[name])
        for name, group in timed.items()
        if not group and not planned & set(seen.covers.get(name, (name,)))
    ]
    step_s = fmean(seen.step_s)
    idle = step_s - busy_s
    parts = {cause: math.fsum(p.parts.get(cause, 0.0) for p in phases) for cause in CAUSES}
    parts["waiting"] += idle - rest
    parts["order"] += step_s - plan.prediction.step_s - math.fsum(parts.values())
    return Gap(
        predicted_s=plan.prediction.step_s,
        measured_s=step_s,
        parts=parts,
        phases=tuple(phases),
        idle_s=idle,
        untimed_s=math.fsum(p.with_lengths_s for p in phases if p.measured_s is None),
        notes=notes,
    )


def _means(seen: Observation, trace: Trace) -> tuple[dict[str, float], float]:
    """Mean seconds of every phase, and of the union of all spans, over the counted steps."""
    spans = [s for s in trace.spans if s.step in seen.counted and s.kind != WAIT and s.name in seen.phases]
    means = {n: math.fsum(times) / len(seen.counted) for n, times in phase_seconds(spans).items()}
    busy = []
    for step, whole in zip(seen.counted, seen.step_s, strict=True):
        windows = covered((s.start_s, s.end_s) for s in spans if s.step == step)
        busy.append(min(whole, math.fsum(end - start for start, end in windows)))
    return means, fmean(busy)


def length_factors(plan: Plan, seen: Observation) -> tuple[dict[str, float], tuple[str, ...]]:
    """Phase -> seconds with the measured lengths, turns and answers over those planned, in closed form."""
    try:
        same = replace(seen, plan=plan, prompt_tokens=None, response_tokens=None, workload={}, covers={})
        before = pricer_of(same).seconds()
        after = pricer_of(replace(seen, plan=plan, covers={})).seconds()
    except RlhfsimError as error:
        return {}, (f"lengths were not told apart: {error.message}",)
    return {name: after[name] / s for name, s in before.items() if s > 0 and name in after}, ()


def _phase(
    name: str, planned: Sequence[PredictedPhase], factors: Mapping[str, float], measured_s: float | None
) -> PhaseGap:
    """What is left of a timed phase goes by its resources; an untimed one is in what the calls leave."""
    before = math.fsum(p.seconds for p in planned)
    after = math.fsum(p.seconds * factors.get(p.name, 1.0) for p in planned)
    parts = {"lengths": after - before} if planned else {}
    if measured_s is None:
        parts["waiting"] = -after
    else:
        for cause, share in shares(planned).items():
            parts[cause] = parts.get(cause, 0.0) + (measured_s - after) * share
    return PhaseGap(name=name, predicted_s=before, with_lengths_s=after, measured_s=measured_s, parts=parts)


def shares(planned: Sequence[PredictedPhase]) -> dict[str, float]:
    """Cause -> share of the predicted seconds; overhead where nothing is predicted."""
    by_cause: dict[str, float] = {}
    for phase in planned:
        for resource, seconds in phase.by_resource_s.items():
            cause = CAUSE_OF.get(resource, "overhead")
            by_cause[cause] = by_cause.get(cause, 0.0) + seconds
    whole = math.fsum(by_cause.values())
    return {k: v / whole for k, v in by_cause.items()} if whole > 0 else {"overhead": 1.0}
