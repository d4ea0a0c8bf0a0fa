"""Predicted and measured side by side: phases, step, tokens, bytes; what only one of the two has.

A phase of the run is compared with the phases of the plan that its timer covers. Medians over the counted
steps; the ratio is measured over predicted, its interval (P10 to P90) that of the median:

    ln r +- t(0.9, n - 1) sqrt(pi/2) s / sqrt(n)      s: standard deviation of ln seconds over n steps

Not known here: how the prediction would look with other coefficients (`rlhfsim calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, stdev

import numpy as np
from scipy.special import stdtrit

from rlhfsim.calibration.observation import Observation, phase_seconds
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.provenance import content_hash
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.trace import WAIT, Span, Trace

STEP = "step"
"""Name of the row of the whole step."""
MEDIAN_LOSS = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of normal numbers."""


@frozen
class PhaseComparison:
    """One phase, or the step; None: not predicted, or not measured."""

    name: str
    covers: tuple[str, ...]
    """Phases of the plan behind `predicted_s`; empty where the plan has none."""
    predicted_s: float | None
    low_s: float | None
    """P10 of the prediction."""
    high_s: float | None
    """P90 of the prediction."""
    measured_s: float | None
    """Median over the steps."""
    p90_s: float | None
    """90th percentile over the steps."""
    ratio: float | None
    """Measured over predicted."""
    ratio_low: float | None
    """P10 of the ratio; None: one step says nothing about the scatter."""
    ratio_high: float | None
    """P90 of the ratio."""
    steps: int
    """Steps behind the measured columns."""
    spans: int = 0
    """Spans behind them: one for each GPU group, call and step."""


@frozen
class Amount:
    """Something else that both sides say: tokens, bytes."""

    name: str
    unit: str
    """`token`, `byte`, `token/s`, as in units."""
    predicted: float | None
    measured: float | None


def check_plan(plan: Plan, seen: Observation) -> tuple[str, ...]:
    """That the run executed this plan; a sentence where only the hardware profile differs.

    Raises:
        RlhfsimError: another workload or placement.
    """
    if plan.input_hash == seen.plan.input_hash:
        return ()
    ours, theirs = (content_hash(p.workload, p.placement) for p in (plan, seen.plan))
    if ours != theirs:
        part = "workload" if content_hash(plan.workload) != content_hash(seen.plan.workload) else "placement"
        raise RlhfsimError(
            "another-plan",
            f"the run executed another {part} than this plan",
            place=seen.folder or seen.name,
            help="compare it with the plan.json in its own folder, or price that plan again: rlhfsim "
            "estimate RUN/plan.json",
        )
    names = ", ".join(h.profile for h in seen.plan.hardware)
    return (f"the plan was priced with another profile than the run's own ({names})",)


# --- phases and step ------------------------------------------------------------------------------


def rows(
    plan: Plan, phases: Mapping[str, Sequence[float]], covers: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[PhaseComparison, ...]:
    """Every phase of either side, those of the plan first, in their order."""
    predicted = {p.name: p for p in plan.prediction.phases}
    behind = {name: tuple(p for p in (covers or {}).get(name, (name,)) if p in predicted) for name in phases}
    taken = {p for name, group in behind.items() for p in group if p != name}
    order = [*(n for n in predicted if n not in taken or n in phases), *phases]
    return tuple(
        _row(name, [predicted[p] for p in behind.get(name, (name,)) if p in predicted], phases.get(name, ()))
        for name in dict.fromkeys(order)
    )


def _row(name: str, predicted: Sequence[PredictedPhase], times: Sequence[float]) -> PhaseComparison:
    """One row; intervals of several predicted phases add up as if they moved together.

    A span of a call that streams is its work, not what is left of it after the last sample.
    """
    columns = zip(*map(_work, predicted), strict=True)
    return row(name, times, tuple(p.name for p in predicted), [math.fsum(column) for column in columns])


def _work(phase: PredictedPhase) -> tuple[float, float, float]:
    """Seconds of work, P10 and P90."""
    if phase.work_s is None:
        return phase.seconds, phase.low_s, phase.high_s
    if not phase.seconds:
        return phase.work_s, phase.work_s, phase.work_s
    share = phase.work_s / phase.seconds
    return phase.work_s, phase.low_s * share, phase.high_s * share


def row(
    name: str, times: Sequence[float], covers: tuple[str, ...], predicted: Sequence[float]
) -> PhaseComparison:
    """A row from times and a prediction: seconds, P10 and P90; empty: none."""
    predicted_s, low_s, high_s = predicted or (None, None, None)
    middle = median(times) if times else None
    ratio = middle / predicted_s if middle is not None and predicted_s else None
    spread = _spread(times)
    factor = math.exp(spread) if ratio and spread is not None else None
    return PhaseComparison(
        name=name,
        covers=covers,
        predicted_s=predicted_s,
        low_s=low_s,
        high_s=high_s,
        measured_s=middle,
        p90_s=float(np.percentile(times, 90)) if times else None,
        ratio=ratio,
        steps=len(times),
        ratio_low=ratio / factor if ratio and factor else None,
        ratio_high=ratio * factor if ratio and factor else None,
    )


def step_row(times: Sequence[float], plan: Plan | None) -> PhaseComparison:
    """The row of the whole step, as the plan predicts it where there is one."""
    p = plan.prediction if plan else None
    return row(STEP, times, (STEP,), (p.step_s, p.low_s, p.high_s) if p else ())


def _spread(times: Sequence[float]) -> float | None:
    """Half width of the interval of the median, in ln seconds; None where it cannot be told."""
    n = len(times)
    if n < 2 or min(times) <= 0:
        return None
    s = stdev(math.log(t) for t in times)
    return float(stdtrit(n - 1, 0.9)) * MEDIAN_LOSS * s / math.sqrt(n)


def warm(trace: Trace) -> dict[str, tuple[float, ...]]:
    """Seconds of every phase in the steps after the first; a phase of the first step alone counts too."""
    spans = [s for s in trace.spans if s.kind != WAIT]
    later = {s.name for s in spans if s.step > 0}
    return phase_seconds([s for s in spans if s.step > 0 or s.name not in later])


@frozen
class Comparison:
    """All of it but memory and the gap's parts, which are `footprint` and `gap`."""

    rows: tuple[PhaseComparison, ...]
    step: PhaseComparison
    missing: tuple[str, ...]
    """Phases of the plan that the run did not time."""
    unplanned: tuple[str, ...]
    """Phases of the run that the plan does not have."""
    amounts: tuple[Amount, ...]


def compare(plan: Plan, seen: Observation, trace: Trace) -> Comparison:
    """A plan and a run of it."""
    counted = [s for s in trace.spans if s.step in seen.counted and s.kind != WAIT]
    compared = tuple(
        replace(r, spans=sum(s.name == r.name for s in counted)) for r in rows(plan, seen.phases, seen.covers)
    )
    return Comparison(
        rows=compared,
        step=step_row(seen.step_s, plan),
        missing=tuple(r.name for r in compared if r.measured_s is None),
        unplanned=tuple(r.name for r in compared if r.predicted_s is None),
        amounts=amounts(plan, seen, counted),
    )


# --- tokens and bytes -----------------------------------------------------------------------------


def amounts(plan: Plan, seen: Observation, counted: Sequence[Span]) -> tuple[Amount, ...]:
    """Tokens of prompts and responses, tokens per second and GPU, bytes of a weight sync."""
    work, gpus = plan.workload, sum(p.gpus for p in plan.placement.pools)
    prompt, response = seen.prompt_tokens, seen.response_tokens
    pace = None
    if seen.step_s and prompt is not None and response is not None:
        pace = work.num_sequences * (prompt + response) / median(seen.step_s) / gpus
    table: list[tuple[str, str, float | None, float | None]] = [
        ("prompt, mean", "token", stats(work.prompt_len).mean, prompt)
    ]
    if work.generates:
        table.append(("response, mean", "token", stats(work.response_len).mean, response))
    table.append(("per second and GPU", "token", plan.prediction.tokens_per_s_per_gpu, pace))
    sent = [float(s.attributes["bytes"]) for s in counted if s.kind == "sync" and "bytes" in s.attributes]
    if sent:
        table.append(("weights, each sync (plan: BF16)", "byte", _weights(plan), max(sent)))
    return tuple(Amount(name=n, unit=u, predicted=p, measured=m) for n, u, p, m in table)


def _weights(plan: Plan) -> float | None:
    """Bytes of the policy in BF16; None for adapters, whose bytes the plan does not say."""
    rules = WEIGHT_PATHS[plan.placement.weight_path]
    if rules.adapters_only or not rules.copies:
        return None
    return 2.0 * next(m.params for m in plan.models if m.role == "actor")
