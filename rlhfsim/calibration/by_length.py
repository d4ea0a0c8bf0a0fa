"""One run as a curve of time against length: steps of its shortest third against those of its longest.

    y = ln(median seconds of the longest third / median seconds of the shortest)

What the framework and the run have in common cancels in the ratio, so that it tells what a step costs
however long its samples are (launches, moves, the host) from what every token costs. Three groups, of
which the middle one is left out, lose little against a straight line and need none: Bartlett 1949,
Biometrics 5, 207. What the model gets wrong grows with the distance, as from run to run (`DRIFT`). Each end
is priced with its own mean lengths and its own longest response.

Not known here: what else drifts while lengths grow over a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import RunPricer, pricer_of
from rlhfsim.calibration.priors import DRIFT
from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.workload.lengths import LogNormal, Truncated

LEAST_STEPS = 5
"""Steps of a third; of fewer a median says little."""
MOST_STEPS = 30
"""Steps of an end of a long run: farther apart, and enough for a median."""
LEAST_RATIO = 1.05
"""Mean tokens of the longest third over those of the shortest, below which lengths tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How much longer a phase takes on long samples, within one run."""

    phase: str
    ratio: float
    """Median seconds of the longest third over those of the shortest."""
    scatter: float
    """Standard error of its logarithm: of the medians, and what the model gets wrong so far apart."""
    steps: int


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


def with_ends(case: RunPricer, run: Observation, profile: Profile | None) -> RunPricer:
    """The case with its shortest and longest third beside it, where the run has them."""
    groups = thirds(run)
    if groups is None:
        return case
    short, long = (replace(_third(run, group, profile), kv_tokens=case.kv_tokens) for group in groups)
    return replace(case, ends=(short, long))


def growths(run: Observation) -> Iterator[Growth]:
    """Every phase that was timed in every counted step."""
    groups = thirds(run)
    for phase, times in run.phases.items() if groups else ():
        if groups is None or len(times) != len(run.lengths) or min(times) <= 0:
            continue
        short, long = ([times[i] for i in group] for group in groups)
        squares = [stdev(map(math.log, part)) ** 2 / len(part) for part in (short, long)]
        of_medians = math.sqrt(math.pi / 2 * math.fsum(squares))
        yield Growth(
            phase=phase,
            ratio=median(long) / median(short),
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
