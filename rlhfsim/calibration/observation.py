"""What one executed run says, ready for comparison and calibration.

`read_run` reads the folder that `rlhfsim launch` leaves (docs/executor.md); importers of other frameworks
and simulated runs build an `Observation` or call `observe` themselves. A phase takes as long as the GPU
group that was busy longest with it. The first step is left out where there are several: it compiles,
allocates and fills caches.

Not known here: what a GPU did inside a span, and how far the clocks of two nodes differ.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.rlhfsim.metrics import read_metrics
from rlhfsim.plan import Plan, read_plan
from rlhfsim.run_folder import (
    PLAN,
    TRACE,
    Row,
    check_run_folder,
    device_words,
    inputs_folder,
    mapping,
    read_environment,
)
from rlhfsim.specs.hardware.calibrated import Measurable
from rlhfsim.specs.workload.measurable import ANSWER, OWN_LOSS, RULES, TURNS, stated
from rlhfsim.step.rule_rewards import rounds, rules_ahead
from rlhfsim.trace import COVERS, CPU_POOL, GENERATE, JOINT, MEASURED, WAIT, Span, Trace, read_trace

RULE = re.compile(r"latency/.+/mean_s")
"""Metric of a rule: mean seconds of a sample."""
SCORE = "rules.score"
FAILED = "failed"
LOSS_S, ACTOR_TRAIN = "loss_s", "actor.train"
"""Attribute of a span whose work raised an error."""
ENVIRONMENT = "environment"
"""Role of spans that lie inside generation."""
JUMP = 20.0
"""A step that takes this many times the median step shows a clock that was set, not a slow step."""
SLACK_S = 0.05
"""Seconds by which a step may begin before the one before it: clocks of two nodes."""


@frozen
class StepLengths:
    """Tokens of one step's samples."""

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    longest: float | None = None
    """Longest response; None: not measured."""


@frozen
class Observation:
    """What one executed run says."""

    name: str
    """How people call it: the folder's name."""
    plan: Plan
    """What was executed, with its prediction."""
    phases: Mapping[str, tuple[float, ...]]
    """Seconds of every counted step by phase; a phase may be missing in some steps."""
    covers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Phases of the plan that a measured phase times, where they are not itself alone (imported runs)."""
    step_s: tuple[float, ...]
    """Seconds of every counted step; empty where the source does not say."""
    counted: tuple[int, ...] = ()
    """Which steps of the trace were counted, in the order of `step_s`."""
    prompt_tokens: float | None = None
    """Mean tokens of a prompt over the counted steps; None: not measured."""
    response_tokens: float | None = None
    """Mean tokens of a response over the counted steps; None: not measured."""
    workload: Mapping[Measurable, tuple[float, ...]] = field(default_factory=dict)
    """Fields of the workload as every counted step that says them measured them."""
    lengths: tuple[StepLengths, ...] = ()
    """Lengths in every counted step; empty where they were not measured in each."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library -> version."""
    device: str = "unknown"
    """What it ran on, in words."""
    date: str | None = None
    """Day of the run, `2026-11-21`; None: not known."""
    folder: Path | None = None
    """Where it was read from; None: built in memory."""
    left_out: tuple[str, ...] = ()
    """What was not counted and why, a sentence each."""

    @property
    def steps(self) -> int:
        """Counted steps."""
        return max([len(self.step_s), *map(len, self.phases.values())])

    @property
    def medians(self) -> dict[str, float]:
        """Median seconds of every phase."""
        return {name: median(times) for name, times in self.phases.items() if times}


# --- reading --------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> Observation:
    """The observation of a run folder of `rlhfsim launch`.

    Raises:
        RlhfsimError: no run, a truncated or empty trace, a trace of another plan or another format,
            or no step that can be counted.
    """
    path = Path(folder)
    check_run_folder(path)
    plan, trace = read_plan(inputs_folder(path) / PLAN), read_trace(path / TRACE)
    place = Place(file=str(path / TRACE))
    if trace.source != MEASURED:
        raise RlhfsimError(
            "trace-not-measured",
            "this trace was simulated, not measured",
            place=place,
            help="give folders that rlhfsim launch wrote",
        )
    rows, notes = read_metrics(path)
    return observe(
        plan,
        trace,
        name=os.path.basename(os.path.realpath(path)),
        rows=rows,
        environment=read_environment(path),
        folder=path,
        left_out=notes,
        place=place,
    )


def observe(
    plan: Plan,
    trace: Trace,
    *,
    name: str,
    rows: Sequence[Row] = (),
    environment: Row | None = None,
    folder: Path | None = None,
    left_out: Sequence[str] = (),
    place: Place | None = None,
) -> Observation:
    """The observation of a plan and its trace; `rows` are lines of metrics.jsonl.

    Raises:
        RlhfsimError: the trace is empty, of another plan, mixed, or no step can be counted.
    """
    trace, ahead = _of_the_steps(plan, trace)
    check_trace(plan, trace, place)
    lines = _by_step(rows, trace.steps)
    counted, notes = counted_steps(plan, trace, lines, place)
    spans = [s for s in trace.spans if s.step in counted and s.kind != WAIT and s.role != ENVIRONMENT]
    known_rows = [lines[step] for step in counted if step in lines]
    measured, (prompt, response) = map(_lengths, known_rows), _tokens(known_rows)
    each = tuple(lengths for lengths in measured if lengths is not None)
    known, phases, covers = environment or {}, phase_seconds(spans), covered(spans)
    return Observation(
        name=name,
        plan=plan,
        phases=phases,
        covers=covers,
        step_s=tuple(_step_seconds(trace, counted, lines)),
        counted=tuple(counted),
        prompt_tokens=prompt,
        response_tokens=response,
        workload=_workload(plan, phases, covers, known_rows) | _own_loss(plan, spans),
        lengths=each if len(each) == len(counted) else (),
        versions={str(k): str(v) for k, v in mapping(known.get("libraries")).items()},
        device=device_words(known, plan),
        date=_day(known["date"]) if "date" in known else _date(folder),
        folder=folder,
        left_out=(*left_out, *ahead, *notes),
    )


def _of_the_steps(plan: Plan, trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """The trace without what asynchronous rollouts do ahead of the steps, and a sentence about it."""
    if not plan.placement.schedule.asynchronous:
        return trace, ()
    spans = tuple(s for s in trace.spans if s.kind != GENERATE and s.step < trace.steps)
    note = "actor.generate runs ahead of training and is of no single step: only the step holds it"
    return replace(trace, spans=spans), (note,)


def _day(said: object) -> str | None:
    """The day that an imported run says itself."""
    return said if isinstance(said, str) else None


def _date(folder: Path | None) -> str | None:
    """Day on which the trace was written; the formats carry none."""
    if folder is None or not (folder / TRACE).is_file():
        return None
    return datetime.fromtimestamp((folder / TRACE).stat().st_mtime, UTC).date().isoformat()


# --- what is refused ------------------------------------------------------------------------------


def check_trace(plan: Plan, trace: Trace, place: Place | None = None) -> None:
    """That the trace is of this plan, and of nothing else.

    Raises:
        RlhfsimError: empty, another plan, spans beyond the last step, or a pool that the plan lacks.
    """
    if not trace.spans:
        raise RlhfsimError(
            "empty-trace",
            "the trace holds no spans",
            place=place,
            help="the run ended before its first step; give one that ran",
        )
    if trace.plan_hash != plan.input_hash:
        raise RlhfsimError(
            "another-plan",
            f"the trace is of plan {trace.plan_hash}, the plan is {plan.input_hash}",
            place=place,
            help="keep plan.json and trace.json of one run together; rlhfsim launch writes both",
        )
    pools = {pool.name for pool in plan.placement.pools} | {CPU_POOL}
    for span in trace.spans:
        if span.step >= trace.steps:
            code, rule = "mixed-trace", f"is of step {span.step}, but the trace has {trace.steps} steps"
            help = "two traces were joined; give each run its own folder"
        elif span.pool not in pools:
            code, rule = "foreign-trace", f"ran in pool {span.pool!r}, which the plan does not have"
            help = f"the plan has {', '.join(sorted(pools))}"
        elif span.start_s < 0:
            code, rule = (
                "span-before-start",
                f"of step {span.step} starts at {span.start_s:g} s, before the trace",
            )
            help = "seconds count from the start of the first step"
        else:
            continue
        raise RlhfsimError(code, f"span {span.name!r} {rule}", place=place, help=help)


# --- what is counted ------------------------------------------------------------------------------


def counted_steps(
    plan: Plan, trace: Trace, rows: Mapping[int, Row], place: Place | None = None
) -> tuple[list[int], list[str]]:
    """Steps that count, and a sentence for each that does not.

    Raises:
        RlhfsimError: none is left.
    """
    windows = step_windows(trace)
    why = dict(_bad(plan, trace, windows))
    steps = sorted(windows)
    if len(steps) > 1:
        why.setdefault(steps[0], "the first step, which also warms up")
    counted = [step for step in steps if step not in why]
    if not counted:
        raise RlhfsimError(
            "no-step-counts",
            f"none of {len(steps)} steps can be counted: {next(iter(why.values()))}",
            place=place,
            help="run at least two whole steps with a clock that is not set meanwhile",
        )
    return counted, [f"step {step}: {reason}" for step, reason in sorted(why.items())]


def step_windows(trace: Trace) -> dict[int, tuple[float, float]]:
    """First start and last end of every step, seconds."""
    windows: dict[int, tuple[float, float]] = {}
    for span in trace.spans:
        start, end = windows.get(span.step, (math.inf, -math.inf))
        windows[span.step] = (min(start, span.start_s), max(end, span.end_s))
    return dict(sorted(windows.items()))


def _bad(plan: Plan, trace: Trace, windows: Mapping[int, tuple[float, float]]) -> Iterator[tuple[int, str]]:
    for span in trace.spans:
        if FAILED in span.attributes:
            yield span.step, f"{span.name} failed ({span.attributes[FAILED]})"
    usual = median(end - start for start, end in windows.values())
    for step, (start, end) in windows.items():
        if len(windows) > 2 and end - start > JUMP * usual:
            yield (
                step,
                f"it lasts {end - start:.3g} s, {(end - start) / usual:.0f} times the median step: the "
                "clock was set",
            )
    if not plan.placement.schedule.asynchronous:
        yield from _overlapping(windows)


def _overlapping(windows: Mapping[int, tuple[float, float]]) -> Iterator[tuple[int, str]]:
    """Synchronous steps that begin before the one before them ends: the clock was set back."""
    steps = list(windows)
    for before, step in pairwise(steps):
        back = windows[before][1] - windows[step][0]
        if back > SLACK_S:
            reason = f"step {step} begins {back:.3g} s before step {before} ends: the clock was set back"
            yield before, reason
            yield step, reason


def phase_seconds(spans: Sequence[Span]) -> dict[str, tuple[float, ...]]:
    """Seconds of every phase in every step that has it: of the GPU group that was busy longest."""
    busy: dict[tuple[str, int, str, str], float] = defaultdict(float)
    for span in spans:
        busy[span.name, span.step, span.pool, span.group] += span.seconds
    longest: dict[tuple[str, int], float] = defaultdict(float)
    for (name, step, _, _), seconds in busy.items():
        longest[name, step] = max(longest[name, step], seconds)
    by_phase: dict[str, list[float]] = defaultdict(list)
    for (name, _), seconds in sorted(longest.items(), key=lambda item: item[0][1]):
        by_phase[name].append(seconds)
    return {name: tuple(times) for name, times in by_phase.items()}


def covered(spans: Sequence[Span]) -> dict[str, tuple[str, ...]]:
    """Phases of the plan that a span of each name covers, where the span says so."""
    attributes = ((span.name, span.attributes.get(COVERS)) for span in spans)
    return {name: tuple(str(text).split(JOINT)) for name, text in attributes if text is not None}


def _by_step(rows: Sequence[Row], steps: int) -> dict[int, Row]:
    """Rows by the step of the trace; a resumed run's trace holds only the steps of its last life."""
    if not rows:
        return {}
    first = max(0, max(int(row["step"]) for row in rows) + 1 - steps)
    return {int(row["step"]) - first: row for row in rows if int(row["step"]) >= first}


def _step_seconds(trace: Trace, counted: Sequence[int], rows: Mapping[int, Row]) -> Iterator[float]:
    """Seconds of the counted steps: the metric, else until the next step begins."""
    windows = step_windows(trace)
    for step in counted:
        logged = _number(rows.get(step, {}), "time/step")
        following = windows.get(step + 1)
        start, end = windows[step]
        measured = following[0] - start if following and following[0] > start else end - start
        yield logged if logged and logged > 0 else measured


def _lengths(row: Row) -> StepLengths | None:
    """Lengths of one step; None where a mean is missing."""
    prompt, response = _tokens([row])
    if prompt is None or response is None:
        return None
    return StepLengths(prompt=prompt, response=response, longest=_number(row, "response/length_max"))


def _tokens(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Mean tokens of prompt and response.

    prompt + response = tokens a second / samples a second of a step (executor.algorithms.metrics).
    """
    responses = [_number(row, "response/length_mean") for row in rows]
    prompts = []
    for row, response in zip(rows, responses, strict=True):
        tokens = _number(row, "throughput/tokens_per_sec")
        samples = _number(row, "throughput/samples_per_sec")
        if tokens and samples and response is not None and tokens / samples - response >= 1:
            prompts.append(tokens / samples - response)
    known = [response for response in responses if response and response > 0]
    return (fmean(prompts) if prompts else None), (fmean(known) if known else None)


def _workload(
    plan: Plan, phases: Mapping[str, Sequence[float]], covers: Mapping[str, object], rows: Sequence[Row]
) -> dict[Measurable, tuple[float, ...]]:
    """What rules, environment and own parts of the plan's workload took, and turns."""
    found: dict[Measurable, tuple[float, ...]] = {RULES: _rules(plan, phases, covers, rows)}
    for name in stated(plan.workload):
        if name in phases:  # an own part, all samples of the step
            found[name] = tuple(seconds / plan.workload.num_sequences for seconds in phases[name])
    if plan.workload.environment is not None:
        both = [[_number(row, f"environment/{n}_mean") for row in rows] for n in ("turns", "seconds")]
        whole = [(t, s) for t, s in zip(*both, strict=True) if t and t > 0 and s is not None and s >= 0]
        found |= {TURNS: tuple(t for t, _ in whole), ANSWER: tuple(s / t for t, s in whole)}
    return {name: values for name, values in found.items() if values}


def _own_loss(plan: Plan, spans: Sequence[Span]) -> dict[Measurable, tuple[float, ...]]:
    """What the user's loss took of a sample in a pass, in each step: of the rank where it took longest.

    Its forward pass with what surrounds it in the loss; its gradient is a part of the backward pass.
    """
    by_step: dict[int, float] = defaultdict(float)
    for span in spans:
        seconds = span.attributes.get(LOSS_S)
        if span.name == ACTOR_TRAIN and isinstance(seconds, float):
            by_step[span.step] = max(by_step[span.step], seconds)
    if not by_step or not plan.workload.custom.loss:
        return {}
    samples = plan.workload.num_sequences * plan.workload.epochs / plan.placement.actor.layout.dp
    return {OWN_LOSS: tuple(seconds / samples for _, seconds in sorted(by_step.items()))}


def _rules(
    plan: Plan, phases: Mapping[str, Sequence[float]], covers: Mapping[str, object], rows: Sequence[Row]
) -> tuple[float, ...]:
    """Seconds of a sample in each step: by the counts of the rules, else by a phase of their own.

    A phase of rules that work while others are decoded holds only what is left of them.
    """
    if plan.workload.reward.rules is None or not plan.workload.generates:
        return ()
    counted = [sum(s for name in row if RULE.fullmatch(name) and (s := _number(row, name))) for row in rows]
    if any(counted):
        return tuple(seconds for seconds in counted if seconds > 0)
    if SCORE in covers or rules_ahead(plan.workload, plan.framework):
        return ()
    return tuple(seconds / rounds(plan.workload) for seconds in phases.get(SCORE, ()) if seconds > 0)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
