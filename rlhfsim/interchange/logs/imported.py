"""A run of another framework: its logs and its configuration as specs, steps and a map of its timers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.described import Lengths, RunDescription, RunSpecs, setup
from rlhfsim.interchange.configuration.forms import Said
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.contradictions import check_against_log
from rlhfsim.interchange.logs.files import console_text, find, framework_times, read_log
from rlhfsim.interchange.logs.framework import Framework, Timer
from rlhfsim.interchange.logs.gpu_kind import GpuEvidence, gpu_kind
from rlhfsim.interchange.logs.records import Log, Record, total
from rlhfsim.interchange.logs.said import (
    Questions,
    check_given,
    date_of,
    described,
    framework_of,
    models_by_name,
    said_of,
    settings_of_run,
)
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.lengths import MAX_TOKENS
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.trace import CONTROLLER, WAIT
from rlhfsim.units import GIB

LEAST_S, MOST_S = 1e-9, 30 * 86400.0
"""Shorter and longer times are no time of a step; 0 is, of what was left out."""
AT_LIMIT = 0.99
"""Share of the limit from which the longest response was cut: some logs leave out its last token."""
SLACK = 0.02
"""Share by which the timers of a step may exceed it: they are rounded and read one after the other."""


@frozen
class Choices:
    """What a user says about a run in addition to its files."""

    gpu: str | None = None
    """Kind of GPU that trains; None: as the log gives it away."""
    rollout_gpu: str | None = None
    configs: tuple[Path, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    """Settings of the framework, over those of the files."""
    prompt_tokens: float | None = None
    """Mean tokens of a prompt, where nothing logged them."""


@frozen
class LoggedStep:
    """One step of ours: metrics of the logged steps that make it up."""

    logged: int
    """The framework's count of its last one."""
    values: Mapping[str, float]


@frozen
class Imported:
    """A run as specs and times, before it has a plan."""

    framework: Framework
    setup: RunSpecs
    settings: FrameworkSettings
    lengths: Lengths
    steps: tuple[LoggedStep, ...]
    mapped: Mapping[str, tuple[str, ...]]
    """Metric -> phases of the plan that it covers."""
    unmapped_times: tuple[str, ...]
    """Metrics that are times and have no counterpart here."""
    unmapped: tuple[str, ...]
    """All other metrics that were not used."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The configuration by dotted key, models under names that are known."""
    max_response: int | None = None
    """Tokens at which a response is cut; None: not known."""
    date: str | None = None
    """Day of the run, `2026-08-20`; None: the log does not say."""
    notes: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Whether generation runs at the same time as training."""
        return self.setup.placement.schedule.asynchronous


def import_run(path: Path, framework: Framework | None, choices: Choices) -> Imported:
    """The run whose logs lie at `path`; `framework`: None where its configuration or its lines say it.

    Raises:
        RlhfsimError: no logs, logs of something else, no step that can be used, or something open that
            decides the time: all of it is asked for at once.
    """
    files = find(path)
    text = console_text(files)
    said = said_of(text, files, choices.configs)
    try:
        framework = framework or framework_of(said, text, files)
    except RlhfsimError as error:
        raise error.at(Place(file=str(path))) from error
    return run_of(path, framework, said, text, read_log(path, files, framework), choices)


def run_of(path: Path, framework: Framework, said: Said, text: str, log: Log, choices: Choices) -> Imported:
    """The run of a log, of whose console `text` is what says on which GPU it ran, and of which models.

    Raises:
        RlhfsimError: as `import_run`.
    """
    settings = settings_of_run(framework, said, choices.given, log.names)
    questions = Questions()
    run = None
    if said.values or choices.given:
        run = described(framework, settings, questions)
    else:
        questions.ask("its configuration", "--config FILE (its launch script or configuration)")
    if run is not None:
        run = models_by_name(run, text, questions)
    gpu = _gpu(path, text, framework, run, log, choices, questions)
    prompt = _prompt(framework, settings if run else None, log.records, choices)
    if prompt is None:
        questions.ask("the lengths of prompts", "--prompt-len TOKENS")
    questions.check(path)
    assert run is not None, "what is open was asked for"
    assert prompt is not None, "what is open was asked for"
    steps, notes = steps_of(path, log, framework, framework.group(settings))
    check_given(framework, settings, said, choices.given)
    records = [Record(step=s.logged, values=s.values) for s in steps]
    lengths = _lengths(path, framework, records, prompt, run)
    specs = setup(run, lengths, gpu.name or "", choices.rollout_gpu)
    used = mapped_to(specs.workload, framework, log.names, stale=run.staleness > 0)
    check_against_log(path, framework, run, specs, [s.values for s in steps], used)
    named = {"model": run.model, "critic_model": run.critic}
    models = {framework.keys[what]: name for what, name in named.items() if name and what in framework.keys}
    values = {**settings.values, **{key: name for key, name in models.items() if settings.find(key)}}
    whole = _imported(framework, specs, used, settings, lengths, steps, log, (*_said(gpu, choices), *notes))
    return replace(whole, configuration=values, max_response=run.max_response, date=date_of(text))


def _imported(
    framework: Framework,
    specs: RunSpecs,
    used: Mapping[str, tuple[str, ...]],
    settings: FrameworkSettings,
    lengths: Lengths,
    steps: tuple[LoggedStep, ...],
    log: Log,
    notes: tuple[str, ...],
) -> Imported:
    times = framework_times(log.names, framework)
    known = {
        *used,
        framework.step,
        *framework.disturbing,
        *framework.prompt,
        *framework.response,
        *framework.longest,
    }
    inside = tuple(name for name in log.names if name.startswith(framework.inside or ("\0",)))
    return Imported(
        framework=framework,
        setup=specs,
        settings=settings,
        lengths=lengths,
        steps=steps,
        mapped=used,
        unmapped_times=tuple(n for n in times if n not in known and n not in inside),
        unmapped=tuple(n for n in log.names if n not in known and n not in times),
        notes=(*log.notes, *notes, *_unpriced(used, specs)),
    )


def _gpu(
    path: Path,
    text: str,
    framework: Framework,
    run: RunDescription | None,
    log: Log,
    choices: Choices,
    questions: Questions,
) -> GpuEvidence:
    """What it ran on: as given, else as the log gives it away; asked for where it does not."""
    if choices.gpu is not None:
        return GpuEvidence(name=choices.gpu)
    utilization = run.rollout.memory_utilization or 0.0 if run else 0.0
    held = [r.values[n] * GIB for r in log.records for n in framework.reserved_gib if n in r.values]
    known = gpu_kind(
        path,
        text,
        peak=framework.peak(run, [r.values for r in log.records]) if run and not questions.what else None,
        held_bytes=max(held, default=None),
        utilization=utilization,
        kinds=framework.peaks,
    )
    if known.name is None:
        fits = f"; {', '.join(known.candidates)} would fit" if known.candidates else ""
        how = f" ({known.how}{fits})" if known.how else ""
        if run is None and any("mfu" in name for name in log.names):
            how = " (its MFU may tell, once the configuration is known)"
        questions.ask(f"on which GPU it ran{how}", "--gpu NAME")
    return known


def _said(gpu: GpuEvidence, choices: Choices) -> tuple[str, ...]:
    return () if choices.gpu is not None else (f"taken to run on {gpu.name}: {gpu.how}",)


def _means(records: Sequence[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record.values)
    known = {n: [r.values[n] for r in records if n in r.values] for n in names}
    return {n: total(values) / len(values) for n, values in known.items()}


def mapped_to(
    workload: Workload, framework: Framework, names: Sequence[str], *, stale: bool
) -> dict[str, tuple[str, ...]]:
    """Metrics that become spans, and what each covers of the calls that this run has."""
    here = {call.name for call in dataflow(workload)} | {CONTROLLER, "actor.generate.wait"}
    mapped = {}
    for timer in timers(framework, stale):
        covered = tuple(name for name in timer.of(names) if call_of(name) in here)
        if timer.metric in names and covered:
            mapped[timer.metric] = covered
    return mapped


def timers(framework: Framework, stale: bool) -> Iterator[Timer]:
    """The timers of a run: where samples may be stale some time the trainer's wait."""
    waits = {t.metric: t for t in framework.waits} if stale else {}
    yield from waits.values()
    yield from (t for t in framework.timers if t.metric not in waits)


def call_of(name: str) -> str:
    """`actor.train.load` -> `actor.train`."""
    return name if name.endswith(f".{WAIT}") else name.removesuffix(".load").removesuffix(".unload")


def _unpriced(used: Mapping[str, tuple[str, ...]], specs: RunSpecs) -> Iterator[str]:
    """Calls of the run that no timer covers."""
    covered = {call_of(name) for names in used.values() for name in names}
    missing = [c.name for c in dataflow(specs.workload) if c.name not in covered]
    if specs.placement.schedule.staleness:
        missing = [name for name in missing if name != "actor.generate"]
    if missing:
        yield f"no timer covers {', '.join(missing)}"


# --- steps ----------------------------------------------------------------------------------------


def steps_of(
    path: Path, log: Log, framework: Framework, each: int
) -> tuple[tuple[LoggedStep, ...], list[str]]:
    """Steps of `each` logged ones whose times make sense, and a sentence for each other one."""
    notes: list[str] = []
    whole = [
        _joined(log.records[i : i + each], framework) for i in range(0, len(log.records) - each + 1, each)
    ]
    counted = [step for step in whole if _timed(step, framework, notes)]
    counted = _undisturbed(counted, framework, notes)
    if not counted:
        raise RlhfsimError(
            "no-step-counts",
            f"none of {len(whole)} steps has times that make sense" + (f": {notes[0]}" if notes else ""),
            place=Place(file=str(path)),
            help=f"a step needs {framework.step} and its timers",
        )
    return tuple(counted), notes


def _undisturbed(steps: list[LoggedStep], framework: Framework, notes: list[str]) -> list[LoggedStep]:
    """Steps without evaluation and checkpoints: their time is taken out, or the step where that cannot be."""
    extra = [total(step.values.get(n, 0.0) for n in framework.disturbing) for step in steps]
    inside = [_holds(step, seconds, framework) for step, seconds in zip(steps, extra, strict=True)]
    kept = [
        replace(step, values={**step.values, framework.step: step.values[framework.step] - seconds})
        if seconds and framework.step in step.values
        else step
        for step, seconds, held in zip(steps, extra, inside, strict=True)
        if held
    ]
    shortened = sum(seconds > 0 and held for seconds, held in zip(extra, inside, strict=True))
    if shortened:
        notes.append(f"{_steps_of(shortened)} an evaluation or a checkpoint: its time is not counted")
    if len(kept) == len(steps):
        return kept
    if len(kept) >= 2:
        notes.append(f"{_steps_of(len(steps) - len(kept))} an evaluation or a checkpoint: left out")
        return kept
    notes.append("nearly every step holds an evaluation or a checkpoint: the step times hold them too")
    return steps


def _holds(step: LoggedStep, extra_s: float, framework: Framework) -> bool:
    """Whether the step minus its evaluation and checkpoint still has room for its timers."""
    whole = step.values.get(framework.step)
    if not extra_s or whole is None:
        return True
    timed = total(step.values.get(timer.metric, 0.0) for timer in framework.timers)
    return whole - extra_s >= (1 - SLACK) * timed


def _steps_of(count: int) -> str:
    return f"{count} step{'s hold' if count > 1 else ' holds'}"


def _joined(records: Sequence[Record], framework: Framework) -> LoggedStep:
    """Logged steps of one generation as one: times add up, the rest is a mean."""
    names = dict.fromkeys(name for record in records for name in record.values)
    values = {}
    for name in names:
        known = [r.values[name] for r in records if name in r.values]
        values[name] = total(known) / (1 if framework_times([name], framework) else len(known))
    return LoggedStep(logged=records[-1].step, values=values)


def _timed(step: LoggedStep, framework: Framework, notes: list[str]) -> bool:
    """Whether every time of the step is one; the first that is not is noted."""
    times = framework_times(step.values, framework)
    for name in times:
        value = step.values[name]
        if name.startswith(framework.inside or ("\0",)):
            continue
        if value != 0 and not LEAST_S <= value <= MOST_S:
            notes.append(f"step {step.logged} was left out: {name} is {value:g} s")
            return False
    return bool(times)


def _prompt(
    framework: Framework, s: FrameworkSettings | None, records: Sequence[Record], choices: Choices
) -> float | None:
    """Mean tokens of a prompt; None: nothing says it."""
    prompt = choices.prompt_tokens or first(_means(records), framework.prompt)
    if prompt is None and framework.prompts_of is not None and s is not None:
        return framework.prompts_of(s, records)
    return prompt


def _lengths(
    path: Path, framework: Framework, records: Sequence[Record], prompt: float, run: RunDescription
) -> Lengths:
    """Mean and longest; prompts are as long as their limit where samples are padded to it."""
    response = first(_means(records), framework.response)
    if response is None:
        raise RlhfsimError(
            "lengths-unknown",
            "the log has no lengths of responses",
            place=Place(file=str(path)),
            help=f"{framework.title} logs {framework.response[0]}; without it no time can be predicted",
        )
    longest, of_prompts = (
        max((r.values[n] for r in records for n in names if n in r.values), default=None)
        for names in (framework.longest, framework.longest_prompt)
    )
    if not run.packing and framework.pads_to_limit:
        of_prompts = run.max_prompt or of_prompts
    most = max(x for x in (prompt, response, longest, of_prompts) if x is not None)
    if most > MAX_TOKENS:
        raise RlhfsimError(
            "absurd-length",
            f"the log has {most:.3g} tokens in a sequence, at most {MAX_TOKENS:,} are taken",
            place=Place(file=str(path)),
            help="leave out the line",
        )
    known = of_prompts if of_prompts is not None and of_prompts > prompt else None
    longest, reached = _tail(framework, records, longest, run)
    return Lengths(prompt=prompt, response=response, longest=longest, longest_prompt=known, reached=reached)


def _tail(
    framework: Framework, records: Sequence[Record], longest: float | None, run: RunDescription
) -> tuple[float | None, float | None]:
    """The longest response, and the share that is as long: what is cut, or one of all that were seen.

    A log that says how many are cut but not how long the longest was means the limit of the configuration.
    """
    shares = [r.values[name] for r in records for name in framework.clipped if name in r.values]
    cut = math.fsum(shares) / len(shares) if shares else None
    limit = run.max_response
    if cut is not None and 0 < cut < 1 and limit and (longest is None or longest >= AT_LIMIT * limit):
        return float(limit), cut
    if longest is None or (limit and longest >= AT_LIMIT * limit):
        return longest, None
    return longest, 1 / (1 + len(records) * run.prompts * run.samples)


def first(means: Mapping[str, float], names: Sequence[str]) -> float | None:
    """The value of the first metric that is logged and above zero."""
    return next((means[n] for n in names if n in means and math.isfinite(means[n]) and means[n] > 0), None)
