"""A trace for eyes: the Chrome JSON trace event format, which Perfetto (ui.perfetto.dev) opens.

A pool is a process, a GPU group of it a thread, a span a complete event (`X`), a counter a `C` event.
Perfetto wants the slices of one thread to nest or to be disjoint; work of one group that overlaps
otherwise goes to a further thread of that group. Timestamps are whole microseconds, so that a span that
starts where another ends still does after rounding (Perfetto rounds start and duration apart). Thread
ids are unique in the file, because some versions look names up by thread id alone.

Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU;
perfetto.dev/docs/getting-started/other-formats and its importer, src/trace_processor/importers/json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhfsim.outputs import write_atomically
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present.tables import fields
from rlhfsim.trace import ALL, Counter, CounterName, Span, Trace
from rlhfsim.units import GB, MICROSECOND

Event = dict[str, Any]
COUNTERS: dict[CounterName, tuple[str, str, float]] = {
    "memory_bytes": ("memory of the fullest GPU", "GB", GB),
    "kv_bytes": ("KV cache", "GB", GB),
    "host_bytes": ("host memory", "GB", GB),
    "queue_samples": ("queue", "samples", 1.0),
    "running": ("running", "requests", 1.0),
    "weight_version": ("weights", "version", 1.0),
}
"""Counter -> words, unit, and what one unit is in base units."""


class Slice(NamedTuple):
    """A span on the clock of the file."""

    span: Span
    start: int
    """Microseconds."""
    end: int
    """Microseconds."""


def chrome_trace(trace: Trace) -> Event:
    """The trace as one JSON object: events, and where they come from."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {**fields(trace, "schema", "source", "rlhfsim_version", "plan_hash", "seed", "steps")},
        "traceEvents": list(events(trace)),
    }


def dumps(trace: Trace) -> str:
    """JSON text with one event a line."""
    whole = chrome_trace(trace)
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in whole.pop("traceEvents"))
    head = json.dumps(whole)[1:-1]
    return f'{{{head}, "traceEvents": [\n{lines}\n]}}\n'


def write_chrome(path: Path, trace: Trace) -> None:
    """Write the Chrome trace atomically."""
    write_atomically(path, dumps(trace))


def side_by_side(plan: Plan, measured: Trace) -> Trace:
    """The predicted steps and the measured ones in one trace, each pool twice.

    As many predicted steps as measured ones follow each other from the start of the first measured one.
    """
    begin = min((s.start_s for s in measured.spans), default=0.0)
    p = plan.prediction
    predicted = (
        _predicted(phase, pool, step, begin + step * p.step_s)
        for step in range(measured.steps)
        for phase in p.phases
        for pool in phase.pool.split("+")
    )
    spans = (replace(s, pool=f"{MEASURED} {s.pool}") for s in measured.spans)
    counters = tuple(replace(c, pool=f"{MEASURED} {c.pool}") for c in measured.counters)
    return replace(measured, spans=(*predicted, *spans), counters=counters)


MEASURED, PREDICTED = "measured:", "predicted:"
"""What is written before the names of pools of either side."""


def _predicted(phase: PredictedPhase, pool: str, step: int, start: float) -> Span:
    """One phase of the plan as a span."""
    role, _, kind = phase.name.partition(".")
    at = start + phase.start_s
    attributes: dict[str, float | str] = {"P10 s": phase.low_s, "P90 s": phase.high_s}
    return Span(
        name=phase.name,
        role=role,
        kind=kind or role,
        pool=f"{PREDICTED} {pool}",
        step=step,
        start_s=at,
        end_s=at + phase.seconds,
        bound_by=phase.bound_by,
        attributes=attributes,
    )


def chrome_path(path: Path) -> Path:
    """Where the Chrome trace lies next to a trace: `out.json` -> `out.chrome.json`."""
    return (
        path.with_suffix(".chrome.json")
        if path.suffix == ".json"
        else path.with_name(f"{path.name}.chrome.json")
    )


def events(trace: Trace) -> Iterator[Event]:
    """Names first, then slices in the order of their start, then counters."""
    pids = {pool: i for i, pool in enumerate(trace.pools, start=1)}
    for pool, pid in pids.items():
        yield _meta("process_name", pid, name=pool)
        yield _meta("process_sort_index", pid, sort_index=pid)
    tid = len(pids)
    for pool, group in _tracks(trace):
        for lane, slices in enumerate(lanes(trace, pool, group), start=1):
            tid += 1
            name = group if lane == 1 else f"{group} ({lane})"
            yield _meta("thread_name", pids[pool], tid, name=name)
            yield _meta("thread_sort_index", pids[pool], tid, sort_index=tid)
            for piece in slices:
                yield _complete(piece, pids[pool], tid)
    for counter in trace.counters:
        yield _counter(counter, pids[counter.pool])


def _tracks(trace: Trace) -> list[tuple[str, str]]:
    """Pools with their groups: `all` first, then replica 2 before replica 10."""
    order = {pool: i for i, pool in enumerate(trace.pools)}
    tracks = {(span.pool, span.group) for span in trace.spans}
    return sorted(tracks, key=lambda t: (order[t[0]], t[1] != ALL, _natural(t[1])))


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text)]


def lanes(trace: Trace, pool: str, group: str) -> list[list[Slice]]:
    """Spans of one GPU group on as few threads as nesting allows, first fit in the order of start."""
    spans = [s for s in trace.spans if s.pool == pool and s.group == group]
    placed_lanes: list[tuple[list[Slice], list[int]]] = []
    slices = (Slice(s, round(s.start_s / MICROSECOND), round(s.end_s / MICROSECOND)) for s in spans)
    for piece in sorted(slices, key=lambda p: (p.start, -p.end)):
        lane = next((lane for lane in placed_lanes if _takes(lane[1], piece)), None)
        if lane is None:
            lane = ([], [])
            placed_lanes.append(lane)
        lane[0].append(piece)
        lane[1].append(piece.end)
    return [slices for slices, _ in placed_lanes]


def _takes(open_ends: list[int], piece: Slice) -> bool:
    """Whether the piece nests in what is still open on a thread; closes what has ended before it."""
    while open_ends and open_ends[-1] <= piece.start:
        open_ends.pop()
    return not open_ends or piece.end <= open_ends[-1]


def _meta(event: str, pid: int, tid: int | None = None, /, **args: str | int) -> Event:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": event, "pid": pid, **thread, "args": args}


def _complete(piece: Slice, pid: int, tid: int) -> Event:
    span = piece.span
    version = {} if span.version is None else {"weight version": span.version}
    args = {"role": span.role, "step": span.step, "bound by": span.bound_by, **version, **span.attributes}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": piece.start,
        "dur": piece.end - piece.start,
        "args": args,
    }


def _counter(counter: Counter, pid: int) -> Event:
    words, unit, scale = COUNTERS[counter.name]
    group = "" if counter.group == ALL else f" of {counter.group}"
    return {
        "ph": "C",
        "name": words + group,
        "pid": pid,
        "ts": round(counter.time_s / MICROSECOND),
        "args": {unit: counter.value / scale},
    }
