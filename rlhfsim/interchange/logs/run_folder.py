"""An imported run as a trace, and the other files of its folder.

Timers say how long, not when: the spans of a step are laid end to end in the order in which the framework
works, from the start of the step; what the step takes beyond them is nobody's. A timer that covers several
of our phases becomes one span under the name of the one that takes longest, and says which in its attribute
`covers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhfsim.interchange.logs.framework import Timer
from rlhfsim.interchange.logs.imported import Imported, LoggedStep, call_of, first, timers
from rlhfsim.interchange.logs.records import total
from rlhfsim.provenance import installed_version
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.trace import (
    ALLOCATED,
    CONTROLLER,
    COVERS,
    CPU_POOL,
    ENGINE_INSIDE,
    JOINT,
    MEASURED,
    RESERVED,
    WAIT,
    Span,
    Trace,
)
from rlhfsim.units import GIB


def trace_of(run: Imported, plan_hash: str) -> Trace:
    """The measured trace: spans of every step end to end."""
    spans: list[Span] = []
    at = 0.0
    for i, step in enumerate(run.steps):
        mine = tuple(_spans(run, step, i, at))
        spans += mine
        at += max(step_seconds(run, step) or 0.0, max((s.end_s for s in mine), default=at) - at)
    return Trace(
        source=MEASURED,
        rlhfsim_version=installed_version("rlhfsim"),
        plan_hash=plan_hash,
        steps=len(run.steps),
        spans=tuple(spans),
    )


def step_seconds(run: Imported, step: LoggedStep) -> float | None:
    """What the framework calls the time of the step, else the sum of its timers; None: it has none."""
    whole = step.values.get(run.framework.step)
    if whole is not None or run.stale:
        return whole
    return total(step.values.get(metric, 0.0) for metric in run.mapped) or None


def _spans(run: Imported, step: LoggedStep, index: int, start: float) -> Iterator[Span]:
    at = start
    for timer in timers(run.framework, run.stale):
        seconds = step.values.get(timer.metric)
        if timer.metric not in run.mapped or not seconds:
            continue
        yield _span(run, timer, run.mapped[timer.metric], index, at, seconds)
        if not _beside(run, timer):
            at += seconds
    rest, whole = run.framework.rest, step_seconds(run, step)
    generated = any(t.phase == "actor.generate" and t.metric in step.values for t in run.framework.timers)
    if rest is not None and whole and generated and start + whole > at:
        yield _span(run, rest, _here(run, rest), index, at, start + whole - at)


def _beside(run: Imported, timer: Timer) -> bool:
    """Whether the work runs at the same time as the trainer's: generation of another batch."""
    return timer.phase == "actor.generate" and run.stale


def _here(run: Imported, timer: Timer) -> tuple[str, ...]:
    calls = {call.name for call in dataflow(run.setup.workload)}
    return tuple(name for name in timer.of(()) if call_of(name) in calls)


def _span(
    run: Imported, timer: Timer, covers: tuple[str, ...], step: int, start: float, seconds: float
) -> Span:
    """One timer as a span; it bears the name of the call that it covers where its own is not there."""
    name = timer.phase if timer.phase in covers else covers[0]
    role, _, kind = name.partition(".")
    pool = _pool(run, name)
    attributes: dict[str, float | str] = {"metric": timer.metric}
    if name == "actor.train":
        attributes |= _memory(run, run.steps[step])
    if covers != (name,):
        attributes[COVERS] = JOINT.join(covers)
    kinds = {"": CONTROLLER, "generate.wait": WAIT, "train.load": "load"}
    return Span(
        name=name,
        role=role,
        kind=kinds.get(kind, kind),
        pool=pool,
        step=step,
        start_s=start,
        end_s=start + seconds,
        bound_by=MEASURED,
        attributes=attributes,
    )


def _memory(run: Imported, step: LoggedStep) -> dict[str, float | str]:
    """What torch counted by then on the fullest GPU, and whether the engine's pool is in it."""
    counts = {ALLOCATED: run.framework.allocated_gib, RESERVED: run.framework.reserved_gib}
    held = {key: most * GIB for key, names in counts.items() if (most := first(step.values, names))}
    inside = run.framework.engine_inside(run.settings)
    return {**held, ENGINE_INSIDE: float(inside)} if held else {}


def _pool(run: Imported, name: str) -> str:
    placement = run.setup.placement
    if name == CONTROLLER or name.startswith("rules."):
        return CPU_POOL
    if name.startswith("actor.generate") and placement.rollout is not None:
        return placement.rollout.pool
    return placement.actor.pool


# --- what else a run folder holds -------------------------------------------------------------------


def metrics_of(run: Imported) -> list[dict[str, float]]:
    """Rows of metrics.jsonl under the executor's names, then those of the framework."""
    rows = []
    for i, step in enumerate(run.steps):
        row: dict[str, float] = {"step": i, "logged_step": step.logged}
        seconds, response = step_seconds(run, step), first(step.values, run.framework.response)
        prompt = first(step.values, run.framework.prompt) or run.lengths.prompt
        if seconds:
            row["time/step"] = seconds
        if response:
            samples = run.setup.workload.num_sequences / (seconds or 1.0)
            row |= {
                "response/length_mean": response,
                "throughput/samples_per_sec": samples,
                "throughput/tokens_per_sec": samples * (prompt + response),
            }
        if longest := first(step.values, run.framework.longest):
            row["response/length_max"] = longest
        rows.append(row | {k: v for k, v in step.values.items() if math.isfinite(v)})
    return rows


def provenance(run: Imported, path: Path) -> dict[str, Any]:
    """Where a run folder comes from: import.json."""
    return {
        "schema": "rlhfsim.import/1",
        "framework": run.framework.name,
        "from": path.name,
        "configuration": Path(run.settings.name).name,
        "date": run.date,
        "steps": len(run.steps),
        "mapped": {k: list(v) for k, v in run.mapped.items()},
        "unmapped_times": list(run.unmapped_times),
        "unmapped": list(run.unmapped),
        "assumed": {k: str(v) for k, v in run.settings.assumed.items()},
        "notes": list(run.notes),
        "settings": {key: _plain(value) for key, value in run.configuration.items()},
        "prompt_tokens": run.lengths.prompt,
        "response_tokens": run.lengths.response,
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return value if isinstance(value, str | int | float | bool | list | None) else str(value)


def environment(run: Imported) -> dict[str, Any]:
    """What we know about the machine: environment.json."""
    hardware = [p.profile.title for p in run.setup.cluster.node_groups for _ in range(p.gpus)]
    return {
        "date": run.date,
        "libraries": {run.framework.name: "unknown", "rlhfsim": installed_version("rlhfsim")},
        "devices": hardware,
    }
