"""What observed runs offer to a fit: one number a phase and run, with its scatter.

    y = ln(median seconds of the counted steps)      scatter of y: sqrt(pi/2) s / sqrt(steps)

s is the standard deviation of ln seconds between steps of one run, pooled over all runs of a phase.
Of a synchronous run the rest of the step counts as well (controller and gaps), of a run with stale
samples the whole step, because generation has no time of its own there. A run whose lengths vary from
step to step also says how its phases grow with them (`by_length`). Named and left out: phases
that the cost model does not have, and those too short to matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

from rlhfsim.calibration.by_length import growths
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import BY_LENGTH, REST, STEP, RunPricer

SHORT = 0.005
"""Share of the step below which a phase is not fitted: clock and calls, not work."""
SHORT_REST = 0.02
"""The same for the rest of the step, which is a difference of large numbers."""
MEDIAN_LOSS = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of normal numbers."""
ODD = 4.0
"""Ratio of scatters from which one of them is odd."""
UNKNOWN_SCATTER = 0.1
"""Standard deviation of ln seconds between steps where no run has two: prior; runs show 2 to 30 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One phase of one run."""

    run: int
    """Index of the run."""
    phase: str
    seconds: float
    """Median over the counted steps; of a phase `BY_LENGTH` a ratio of two."""
    scatter: float
    """Standard error of ln seconds, from the scatter between steps."""
    steps: int

    @property
    def within(self) -> bool:
        """Whether it compares steps of one run, and so says nothing of how runs differ."""
        return self.phase.endswith(BY_LENGTH)

    @property
    def log(self) -> float:
        """ln seconds."""
        return math.log(self.seconds)


def evidence(
    runs: Sequence[Observation], cases: Sequence[RunPricer]
) -> tuple[tuple[Datum, ...], tuple[str, ...]]:
    """Every datum, and a sentence for every phase that is none."""
    phases: list[tuple[int, str, Sequence[float]]] = []
    notes: list[str] = []
    for i, (run, case) in enumerate(zip(runs, cases, strict=True)):
        predicted = case.seconds()
        for phase, times, least in _times(run, case):
            reason = _left_out(phase, times, predicted, least * _step(run, predicted))
            if reason is None:
                phases.append((i, phase, times))
            else:
                notes.append(f"{run.name}, {phase}: {reason}")
    spread = _scatter(phases)
    data = tuple(
        Datum(
            run=i,
            phase=phase,
            seconds=median(times),
            steps=len(times),
            scatter=_standard_error(spread.get(phase, UNKNOWN_SCATTER), len(times)),
        )
        for i, phase, times in phases
    )
    return (*data, *_curves(runs, cases, data)), tuple(notes)


def _curves(
    runs: Sequence[Observation], cases: Sequence[RunPricer], data: Sequence[Datum]
) -> Iterator[Datum]:
    """How much longer the phases of `data` take on the longest samples of their run."""
    counted = {(d.run, d.phase) for d in data}
    for i, (run, case) in enumerate(zip(runs, cases, strict=True)):
        for grown in growths(run) if case.ends else ():
            if (i, grown.phase) in counted:
                name = f"{grown.phase}{BY_LENGTH}"
                yield Datum(run=i, phase=name, seconds=grown.ratio, scatter=grown.scatter, steps=grown.steps)


def _standard_error(spread: float, steps: int) -> float:
    """Standard error of the median of so many steps; of two or one it is the mean's."""
    return (MEDIAN_LOSS if steps > 2 else 1.0) * spread / math.sqrt(steps)


def _times(run: Observation, case: RunPricer) -> Iterator[tuple[str, Sequence[float], float]]:
    """Every phase with its times and the share of the step below which it is too short."""
    for phase, times in run.phases.items():
        if times:
            yield phase, times, SHORT
    if not run.step_s:
        return
    if run.plan.placement.schedule.asynchronous:
        yield STEP, run.step_s, SHORT
    elif not run.plan.placement.schedule.streaming:
        yield REST, _rest(run, case.clocks), SHORT_REST


def _rest(run: Observation, clocks: frozenset[str]) -> list[float]:
    """Step less its timed phases; by step where every phase has every step, else of the medians."""
    parts = [run.phases[name] for name in clocks if run.phases.get(name)]
    if all(len(times) == len(run.step_s) for times in parts):
        return [step - sum(times[i] for times in parts) for i, step in enumerate(run.step_s)]
    return [median(run.step_s) - sum(median(times) for times in parts)]


def _left_out(phase: str, times: Sequence[float], predicted: Mapping[str, float], least: float) -> str | None:
    """Why a phase is no datum, or None."""
    if phase not in predicted:
        return "the cost model has no such phase"
    if min(times) <= 0:
        return "the timed phases fill the step" if phase == REST else "a time of zero"
    if median(times) < least:
        return "too short a part of the step to matter"
    if predicted[phase] <= 0:
        return "predicted to take no time"
    return None


def _step(run: Observation, predicted: Mapping[str, float]) -> float:
    return median(run.step_s) if run.step_s else predicted[STEP]


def _scatter(phases: Sequence[tuple[int, str, Sequence[float]]]) -> dict[str, float]:
    """Standard deviation of ln seconds between steps by phase, pooled over runs.

    A run that scatters `ODD` times as much as the usual one, such as one with a stalled step, is left out.
    """
    spreads: dict[str, list[tuple[float, int]]] = {}
    for _, phase, times in phases:
        if len(times) > 1:
            own = stdev(math.log(t) for t in times)
            spreads.setdefault(phase, []).append((own, len(times) - 1))
    pooled = {phase: _pooled(items) for phase, items in spreads.items()}
    usual = median(pooled.values()) if pooled else UNKNOWN_SCATTER
    return {phase: max(spread, usual / ODD) for phase, spread in pooled.items()}


def _pooled(items: Sequence[tuple[float, int]]) -> float:
    usual = median(spread for spread, _ in items)
    usual_runs = [(spread, n) for spread, n in items if spread <= ODD * usual]
    return math.sqrt(sum(spread**2 * n for spread, n in usual_runs) / sum(n for _, n in usual_runs))
