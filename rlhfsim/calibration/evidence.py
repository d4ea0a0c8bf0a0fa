"""What observed runs offer to a fit: one number a phase and run, with its scatter.

    y = ln(median seconds of the counted steps)      scatter of y: sqrt(pi/2) s / sqrt(steps)

s is the standard deviation of ln seconds between steps of one run, pooled over all runs of a phase.
Of a synchronous run the rest of the step counts as well (controller and gaps), of a run with stale
samples the whole step, because generation has no time of its own there. A run whose lengths vary from
step to step is a curve of time against length as well, by the steps of its shortest third and of its longest:

    y = ln(median seconds of the longest third / median seconds of the shortest)

What the framework and the run have in common cancels in the ratio, so that it tells what a step costs
however long its samples are (launches, moves, the host) from what every token costs. Three groups, of
which the middle one is left out, lose little against a straight line and need none: Bartlett 1949,
Biometrics 5, 207. What the model gets wrong grows with the distance, as from run to run (`DRIFT`). Each end
is priced with its own mean lengths and its own longest response.

Named and left out: phases that the cost model does not have, and those too short to matter.

Not known here: what else drifts while lengths grow over a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import BY_LENGTH, REST, STEP, RunPricer, pricer_of
from rlhfsim.calibration.priors import DRIFT
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.workload.lengths import LogNormal, Truncated

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
LEAST_STEPS = 5
"""Steps of a third; of fewer a median says little."""
MOST_STEPS = 30
"""Steps of an end of a long run: farther apart, and enough for a median."""
LEAST_RATIO = 1.05
"""Mean tokens of the longest third over those of the shortest, below which lengths tell nothing."""


@frozen
class Datum:
    """One phase of one run."""

    run: int
    """Index of the run."""
    phase: str
    seconds: float
    """Median over the counted steps; of a phase `BY_LENGTH` a ratio of two."""
    scatter: float
    """Standard error of ln seconds, from the scatter between steps; of a ratio also what the model gets wrong
    so far apart."""
    steps: int

    @property
    def within(self) -> bool:
        """Whether it compares steps of one run, and so says nothing of how runs differ."""
        return self.phase.endswith(BY_LENGTH)

    @property
    def log(self) -> float:
        """ln seconds."""
        return math.log(self.seconds)


def evidence(cases: Sequence[RunPricer]) -> tuple[tuple[Datum, ...], tuple[str, ...]]:
    """Every datum, and a sentence for every phase that is none."""
    phases: list[tuple[int, str, Sequence[float]]] = []
    notes: list[str] = []
    for i, case in enumerate(cases):
        run, predicted = case.seen, case.seconds()
        step = median(run.step_s) if run.step_s else predicted[STEP]
        for phase, times, least in _times(run, case.clocks):
            reason = _left_out(phase, times, predicted, least * step)
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
    return (*data, *_curves(cases, data)), tuple(notes)


def _curves(cases: Sequence[RunPricer], data: Sequence[Datum]) -> Iterator[Datum]:
    """How much longer the phases of `data` take on the longest samples of their run."""
    counted = {(d.run, f"{d.phase}{BY_LENGTH}") for d in data}
    for i, case in enumerate(cases):
        grown = growths(i, case.seen) if case.ends else ()
        yield from (datum for datum in grown if (i, datum.phase) in counted)


def _standard_error(spread: float, steps: int) -> float:
    """Standard error of the median of so many steps; of two or one it is the mean's."""
    return (MEDIAN_LOSS if steps > 2 else 1.0) * spread / math.sqrt(steps)


def _times(run: Observation, clocks: frozenset[str]) -> Iterator[tuple[str, Sequence[float], float]]:
    """Every phase with its times and the share of the step below which it is too short."""
    for phase, times in run.phases.items():
        if times:
            yield phase, times, SHORT
    if not run.step_s:
        return
    if run.plan.placement.schedule.asynchronous:
        yield STEP, run.step_s, SHORT
    elif not run.plan.placement.schedule.streaming:
        yield REST, _rest(run, clocks), SHORT_REST


def _rest(run: Observation, clocks: frozenset[str]) -> list[float]:
    """Step less its timed phases; by step where every phase has every step, else of the medians."""
    parts = [run.phases[name] for name in clocks if run.phases.get(name)]
    if all(len(times) == len(run.step_s) for times in parts):
        return [step - math.fsum(times[i] for times in parts) for i, step in enumerate(run.step_s)]
    return [median(run.step_s) - math.fsum(median(times) for times in parts)]


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


# --- one run as a curve ------------------------------------------------------------------------------


def thirds(run: Observation) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Indices of the counted steps with the shortest and the longest samples; None: too few, or too alike."""
    if run.plan.placement.schedule.asynchronous:
        return None
    tokens = [s.prompt + s.response for s in run.lengths]
    size, order = min(MOST_STEPS, len(tokens) // 3), sorted(range(len(tokens)), key=tokens.__getitem__)
    if size < LEAST_STEPS:
        return None
    groups = (tuple(order[:size]), tuple(order[-size:]))
    return groups if _apart(run, groups) >= LEAST_RATIO else None


def _apart(run: Observation, groups: Sequence[Sequence[int]]) -> float:
    """Mean tokens of the longest third over those of the shortest."""
    short, long = (fmean(run.lengths[i].prompt + run.lengths[i].response for i in group) for group in groups)
    return long / short


def with_ends(case: RunPricer, profile: Profile | None) -> RunPricer:
    """The case together with its shortest and longest third, where the run has them."""
    groups = thirds(case.seen)
    if groups is None:
        return case
    short, long = (replace(_third(case.seen, group, profile), kv_tokens=case.kv_tokens) for group in groups)
    return replace(case, ends=(short, long))


def growths(index: int, run: Observation) -> Iterator[Datum]:
    """How much longer every phase takes on long samples that was timed in every counted step."""
    groups = thirds(run)
    for phase, times in run.phases.items() if groups else ():
        if groups is None or len(times) != len(run.lengths) or min(times) <= 0:
            continue
        short, long = ([times[i] for i in group] for group in groups)
        squares = [stdev(map(math.log, part)) ** 2 / len(part) for part in (short, long)]
        of_medians = math.sqrt(math.pi / 2 * math.fsum(squares))
        yield Datum(
            run=index,
            phase=f"{phase}{BY_LENGTH}",
            seconds=median(long) / median(short),
            scatter=math.hypot(of_medians, DRIFT.value / Z90 * math.log(_apart(run, groups))),
            steps=len(short) + len(long),
        )


def _third(run: Observation, steps: Sequence[int], profile: Profile | None) -> RunPricer:
    """The run as if it had these steps alone."""
    lengths = [run.lengths[i] for i in steps]
    longest = [s.longest for s in lengths if s.longest is not None]
    work = run.plan.workload
    if longest and isinstance(work.response_len, LogNormal | Truncated):
        cut = replace(work.response_len, max=fmean(longest))
        work = replace(work, response_len=cut)
    return pricer_of(
        replace(
            run,
            plan=replace(run.plan, workload=work),
            prompt_tokens=fmean(s.prompt for s in lengths),
            response_tokens=fmean(s.response for s in lengths),
        ),
        profile,
    )
