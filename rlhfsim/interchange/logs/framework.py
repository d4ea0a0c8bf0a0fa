"""What an importer knows about a framework: its timers under our names, its lengths, its console lines.

A framework is a folder of `rlhfsim.interchange` whose module `logs` has a `FRAMEWORK`; nothing lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from importlib import resources as import_resources
from itertools import chain
from typing import Any

from rlhfsim import resources
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.records import LineReader, Record, total
from rlhfsim.specs.frameworks.files import read_shipped

AROUND = "around "
"""Begins a call in `logs.yaml` that means itself and the moves of its role."""


def framework_names() -> tuple[str, ...]:
    """Names of the frameworks whose logs can be read: their folders, `-` for `_`."""
    return resources.frameworks_with("logs")


def framework_named(name: str) -> Framework:
    """How to read the logs of one of `framework_names`."""
    known: Framework = resources.of_framework(name, "logs").FRAMEWORK
    return known


def metrics_of(name: str) -> dict[str, Any]:
    """What `logs.yaml` of a framework says of its metrics: fields of `Framework` that are no functions."""
    file = import_resources.files("rlhfsim.interchange") / name.replace("-", "_") / "logs.yaml"
    given = read_shipped(file)
    said = {field: tuple(value) if isinstance(value, list) else value for field, value in given.items()}
    said |= {kind: tuple(map(_timer, given.get(kind, ()))) for kind in ("timers", "waits")}
    return said | ({"rest": _timer(given["rest"])} if "rest" in given else {})


def _timer(row: Mapping[str, Any]) -> Timer:
    apart = {metric: _phases(phases) for metric, phases in row.get("apart", {}).items()}
    return Timer(**{**row, "covers": _phases(row.get("covers", ())), "apart": apart})


def _phases(names: Iterable[str]) -> tuple[str, ...]:
    """Phases as a file names them, `around actor.train` among them."""
    each = (around(name.removeprefix(AROUND)) if name.startswith(AROUND) else (name,) for name in names)
    return tuple(chain.from_iterable(each))


def around(*calls: str) -> tuple[str, ...]:
    """The calls, each between the moves of its role: load, the call, unload."""
    return tuple(f"{call}{move}" for call in calls for move in (".load", "", ".unload"))


@frozen
class Timer:
    """One metric that is a time, under our names."""

    metric: str
    phase: str
    """Our name of the work that gives it most of its length."""
    covers: tuple[str, ...] = ()
    """All phases that it times; empty: only `phase`."""
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other metric -> phases that it times instead where it is logged."""
    derived: bool = False
    """No log has it: `as_today` makes it of others."""

    def of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Phases that it covers in a log with these metrics."""
        elsewhere = {phase for name, phases in self.apart.items() if name in names for phase in phases}
        return tuple(phase for phase in self.covers or (self.phase,) if phase not in elsewhere)


@frozen
class Framework:
    """How to read the logs of one framework."""

    configuration: Configuration
    """Its name, and how its configuration is read."""
    timers: tuple[Timer, ...]
    """In the order in which a step runs them."""
    waits: tuple[Timer, ...] = ()
    """Timers that, where samples may be stale, time the trainer's wait and not work."""
    rest: Timer | None = None
    """What the step does outside its other timers, where generation has one."""
    step: str
    """The time of a whole step."""
    times: tuple[str, ...]
    """Beginnings of names of metrics that are times: those that no timer maps are named."""
    inside: tuple[str, ...] = ()
    """Metrics that time parts of a timer that is mapped: not mapped, and nothing is missing."""
    disturbing: tuple[str, ...] = ()
    """Evaluation and checkpoints: their time is taken out of the step where the step holds it."""
    prompt: tuple[str, ...] = ()
    """Mean tokens of a prompt, the first that is logged."""
    response: tuple[str, ...] = ()
    """Mean tokens of a response."""
    longest: tuple[str, ...] = ()
    """Longest response of a step."""
    clipped: tuple[str, ...] = ()
    """Share of the responses that were cut at their limit."""
    longest_prompt: tuple[str, ...] = ()
    """Longest prompt of a step."""
    pads_to_limit: bool = False
    """Whether samples that are not packed are as long as the limits of prompt and response."""
    strip: str = ""
    """Prefix that some loggers put before every metric."""
    as_today: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda values: values
    """Metrics of one step under the names of today, times split where parts of them are logged."""
    peak: Callable[[RunDescription, Sequence[Mapping[str, float]]], float | None] = lambda run, steps: None
    """FLOP/s of a GPU that the framework took for 100 % MFU; None: it does not say."""
    version_of: Callable[[Sequence[str]], str | None] = lambda metrics: None
    """The version that names of metrics give away, as far as its defaults differ; None: they do not."""
    reserved_gib: tuple[str, ...] = ()
    """Most GiB of a GPU that were reserved, the pool of a sleeping engine among them."""
    allocated_gib: tuple[str, ...] = ()
    """Most GiB of a GPU that tensors took so far, counted with `reserved_gib`."""
    device_gib: tuple[str, ...] = ()
    """Most GiB in use on a GPU, by all processes."""
    engine_inside: Callable[[FrameworkSettings], bool] = lambda settings: False
    """Whether the rollout engine runs in the trainer's process, so that its pool counts there even asleep."""
    tokens: tuple[str, ...] = ()
    """Tokens of all samples of a step, without padding."""
    gpus_of: Callable[[Mapping[str, float]], float | None] = lambda values: None
    """GPUs, from metrics that are a GPU's and a run's; None: not logged."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """What a message names -> the key that sets it: samples, prompts, model, reference, ..."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Profile -> FLOP/s in the framework's own table, the commonest of equal ones first."""
    console: Callable[[], LineReader]
    """A new reader of clean console lines; parts of one step are one record."""
    console_without_step: Callable[[], LineReader] | None = None
    """The same, of logs in which `console` finds no time of a step."""
    prompts_of: Callable[[FrameworkSettings, Sequence[Record]], float | None] | None = None
    """Mean prompt tokens where no metric says them directly."""
    folds: bool = False
    """Whether records without the time of a step belong to the next one that has it."""
    group: Callable[[FrameworkSettings], int] = lambda settings: 1
    """Logged steps that make up one of ours (generation to weight sync)."""

    def records(self, lines: Iterable[str]) -> list[Record]:
        """What a whole console log holds, several parts of a step among it."""
        for console in (self.console, self.console_without_step):
            if console is None:
                continue
            read = console()
            parts = [part for line in lines if (part := read(line)) is not None]
            if any(self.has_step(part.values) for part in parts):
                break
        return parts

    def has_step(self, values: Mapping[str, float]) -> bool:
        """Whether metrics have the time of a step, or of its training where none times the whole."""
        named = self.as_today(values)
        return self.step in named or any(
            timer.metric in named for timer in self.timers if timer.phase == "actor.train"
        )

    def seconds_of(self, values: Mapping[str, float]) -> float | None:
        """The time of a step, else the sum of its timers; None: it has none."""
        whole = values.get(self.step)
        return whole if whole is not None else total(values.get(t.metric, 0.0) for t in self.timers) or None

    @property
    def name(self) -> str:
        """As in `framework_names`."""
        return self.configuration.name

    @property
    def title(self) -> str:
        """Its name as its makers write it."""
        return self.configuration.title
