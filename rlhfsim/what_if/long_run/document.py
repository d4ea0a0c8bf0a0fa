"""The file of `rlhfsim design --run`: how lengths, limits and batch change over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import Source, checked, convert, parse_yaml, read_text
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.quantities import Coefficient, CoefficientText, Seconds, Text
from rlhfsim.specs.ranges import Tokens
from rlhfsim.specs.workload.lengths import MAX_TOKENS, SIGMA, Floats, cut_log_normal
from rlhfsim.specs.workload.workload import Count, Workload
from rlhfsim.what_if.curve_files import rows_of
from rlhfsim.what_if.risk.run import CHECKPOINT, RESTART

MAX_STEPS = 1_000_000
MAX_POINTS = 10_000
CHANGES = (1.25, 1.5, 2.0, 4.0, math.inf)
"""Ratios of mean length within one stretch; the first that leaves at most `MAX_STRETCHES`."""
MAX_STRETCHES = 16
GRID = 129
"""Steps at which a curve is looked at between two limits."""
WARM_UP = Coefficient(
    value=180,
    low=30,
    high=600,
    dimension="s",
    source="prior: engines start, CUDA graphs are captured and kernels compiled again; up to ten minutes",
)

Step = Annotated[int, Field(ge=0, le=MAX_STEPS)]


@checked
@frozen
class LengthPoint:
    """Mean tokens of a response at one step, as a log shows them: cut at the limit."""

    step: Step
    mean: Tokens
    low: Tokens | None = None
    """P10 of the mean; default: the mean itself."""
    high: Tokens | None = None
    """P90 of the mean."""

    def __post_init__(self) -> None:
        """The range holds the mean."""
        if not (self.low or self.mean) <= self.mean <= (self.high or self.mean):
            raise RlhfsimError(
                "interval-without-value",
                f"the range of step {self.step} does not hold its mean of {self.mean:g} tokens",
                help="give low <= mean <= high",
            )


@checked
@frozen
class LengthStage:
    """From one step on: the longest response, and the batch where it changes."""

    start: Step = 0
    max: Tokens
    """Tokens at which a response is cut."""
    prompts: Count | None = None
    """Per step; default: those of the command line."""
    samples: Count | None = None


@checked
@frozen
class EvaluationText:
    """Evaluation between steps, on all GPUs."""

    every: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    """Steps from one to the next."""
    takes: Seconds | None = None
    """Seconds of one; or `prompts`, whose generation is priced with the plan."""
    prompts: Count | None = None
    samples: Count = 1

    def __post_init__(self) -> None:
        """One of the two says how long it takes."""
        if (self.takes is None) == (self.prompts is None):
            raise RlhfsimError(
                "takes-or-prompts",
                "an evaluation has one of takes and prompts",
                help="as in evaluation: {every: 50, prompts: 500}",
            )


@checked
@frozen
class LongRun:
    """The whole file."""

    title: str = ""
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    lengths: Annotated[tuple[LengthPoint, ...], Field(max_length=MAX_POINTS)] = ()
    """Mean lengths, straight lines between them."""
    curve: Text | None = None
    """Or a CSV of step and mean tokens from the log of a run; relative to this file."""
    sigma: Annotated[float, Field(ge=0.01, le=4)] = SIGMA
    """Standard deviation of the log of a length at each step."""
    stages: Annotated[tuple[LengthStage, ...], Field(min_length=1, max_length=MAX_STRETCHES)]
    evaluation: EvaluationText | None = None
    checkpoint: CoefficientText = CHECKPOINT
    """Seconds that one checkpoint blocks the run."""
    restart: CoefficientText = RESTART
    """Seconds from a failure, or the end of one plan, until the run goes on."""
    warm_up: CoefficientText = WARM_UP
    """Further seconds until a new plan runs at its speed."""

    def __post_init__(self) -> None:
        """Points and stages ascend and begin in time."""
        for name, steps in (
            ("lengths", [p.step for p in self.lengths]),
            ("stages", [s.start for s in self.stages]),
        ):
            if any(after <= before for before, after in pairwise(steps)):
                raise RlhfsimError(
                    "steps-not-ascending",
                    f"steps of {name} do not ascend",
                    help="list them in order, each once",
                )
        if self.stages[0].start != 0:
            raise RlhfsimError(
                "no-first-stage", "the first stage does not start at step 0", help="give start: 0"
            )
        if self.stages[-1].start >= self.steps:
            raise RlhfsimError(
                "stage-after-end",
                f"a stage starts at step {self.stages[-1].start:,} of {self.steps:,}",
                help="leave it out, or give more steps",
            )

    @property
    def replan_s(self) -> float:
        """Seconds that a change of plan costs: checkpoint, restart, warm-up."""
        return self.checkpoint.value + self.restart.value + self.warm_up.value


@frozen
class LengthCurve:
    """Mean tokens over steps, with P10 and P90; beyond its ends it stays as it is there."""

    step: Floats
    mean: Floats
    low: Floats
    high: Floats

    def at(self, steps: Floats, name: str = "mean") -> Floats:
        """Mean (or P10, P90) at the given steps, cut nowhere."""
        found: Floats = np.interp(steps, self.step, getattr(self, name))
        return found


@frozen
class RunStretch:
    """Steps that are alike enough to be priced as one."""

    start: int
    end: int
    """First step after it."""
    stage: LengthStage
    mean: float
    """Tokens of a mean response."""
    low: float
    high: float

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.end - self.start

    @property
    def middle(self) -> int:
        """The step at which a draft is as old as in the mean."""
        return (self.start + self.end) // 2


def read_run(path: Path) -> tuple[LongRun, LengthCurve]:
    """The file with its curve.

    Raises:
        RlhfsimError: the first thing wrong, with its place.
    """
    source = parse_yaml(read_text(path), str(path))
    run = convert(LongRun, source, source.data if isinstance(source.data, dict) else {})
    return run, curve_of(run, source)


def curve_of(run: LongRun, source: Source) -> LengthCurve:
    """The curve of a run: its points, or those of its CSV.

    Raises:
        RlhfsimError: neither or both, or a CSV that cannot be read.
    """
    if bool(run.lengths) == (run.curve is not None):
        raise RlhfsimError(
            "lengths-or-curve",
            "a run has one of lengths and curve",
            place=source.place(),
            help="as in curve: lengths.csv, or lengths: [{step: 0, mean: 2k}, {step: 1000, mean: 6k}]",
        )
    columns: list[tuple[float, float, float, float]]
    if run.curve is None:
        columns = [(p.step, p.mean, p.low or p.mean, p.high or p.mean) for p in run.lengths]
    else:
        columns = list(_measured(Path(source.name).parent / run.curve))
    step, mean, low, high = np.array(columns, dtype=float).T
    return LengthCurve(step=step, mean=mean, low=low, high=high)


def _measured(path: Path) -> Iterator[tuple[float, float, float, float]]:
    """Rows of a CSV as points without a range."""
    row = None
    for row in rows_of(path):
        if row.step < 0 or not 1 <= row.value <= MAX_TOKENS:
            raise RlhfsimError(
                "bad-length",
                f"step {row.step:g} has a mean of {row.value:g} tokens",
                place=Place(file=str(path)),
                help=f"two columns: steps from 0 on, mean tokens from 1 to {MAX_TOKENS:,}",
            )
        yield row.step, row.value, row.value, row.value
    if row is None:
        raise RlhfsimError(
            "empty-file",
            "the curve has no rows",
            place=Place(file=str(path)),
            help="two columns: step,tokens",
        )


# --- stretches ----------------------------------------------------------------------------------------


def stretches(run: LongRun, curve: LengthCurve, drafts: Speculation | None = None) -> tuple[RunStretch, ...]:
    """The run in stretches: a stage begins one; within it lengths and tokens of a draft hardly differ."""
    for ratio in CHANGES:
        cut = tuple(_stretches(run, curve, math.log(ratio), drafts))
        if len(cut) <= MAX_STRETCHES:
            return cut
    raise AssertionError("a stretch a stage is always few enough")


def _stretches(
    run: LongRun, curve: LengthCurve, change: float, drafts: Speculation | None
) -> list[RunStretch]:
    ends = [*(s.start for s in run.stages[1:]), run.steps]
    found = []
    for stage, end in zip(run.stages, ends, strict=True):
        for first, last in pairwise(_cuts(curve, stage.start, end, change, drafts)):
            inside = np.linspace(first, last - 1, GRID)
            tokens = {
                n: float(np.minimum(curve.at(inside, n), stage.max).mean()) for n in ("mean", "low", "high")
            }
            found.append(RunStretch(start=first, end=last, stage=stage, **tokens))
    return found


def _cuts(curve: LengthCurve, start: int, end: int, change: float, drafts: Speculation | None) -> list[int]:
    """Steps between which the logs of mean length and tokens of a draft move by at most `change` together."""
    points = curve.step[(curve.step > start) & (curve.step < end)]
    steps = np.union1d(np.linspace(start, end - 1, GRID), points)
    tokens = np.array([aged(drafts, int(step)).tokens_per_step if drafts else 1.0 for step in steps])
    logs = np.abs(np.diff(np.log(curve.at(steps)))) + np.abs(np.diff(np.log(tokens)))
    moved = np.concatenate([[0.0], np.cumsum(logs)])
    count = max(1, math.ceil(moved[-1] / change - 1e-9))
    inner = np.interp(np.linspace(0, moved[-1], count + 1)[1:-1], moved, steps)
    return sorted({start, *np.rint(inner).astype(int).tolist(), end})


def workload_at(
    workload: Workload, run: LongRun, stage: LengthStage, mean: float, steps: int = 0
) -> Workload:
    """The work of one step of a stage whose responses have this mean, after so many `steps` of the policy."""
    drafts = workload.speculation
    lengths = cut_log_normal(min(mean, stage.max), stage.max, run.sigma)
    return replace(
        workload,
        response_len=lengths,
        prompts=stage.prompts or workload.prompts,
        samples=stage.samples or workload.samples,
        speculation=drafts and aged(drafts, steps),
    )


def aged(drafts: Speculation, steps: int) -> Speculation:
    """A draft after so many further steps of the policy."""
    return replace(drafts, age=drafts.age + steps)
