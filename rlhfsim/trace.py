"""The trace: what ran where and when, predicted or measured; the contract of simulator and executor.

Both write schema `rlhfsim.trace/1` (docs/trace.md), so that a predicted and a measured step can be laid
side by side. A span is work on one GPU group of one pool; a counter is a value from an instant on.
Seconds count from the start of the first step of the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import write_atomically
from rlhfsim.specs.loading import Source as Document
from rlhfsim.specs.loading import checked, convert, parse_json, read_text

SCHEMA: Literal["rlhfsim.trace/1"] = "rlhfsim.trace/1"
COVERS, JOINT = "covers", "+"
"""Attribute of a span whose timer covers several phases of the plan, and what joins their names."""
ALLOCATED, RESERVED, ENGINE_INSIDE = "allocated_bytes", "reserved_bytes", "engine_inside"
"""Attributes of an imported training span: what torch counted on a GPU so far, and 1 where the pool of an
engine in the same process is in it, also while it sleeps."""
MAX_BYTES = 256 * 2**20
"""Larger traces are refused before they are parsed."""
ALL = "all"
"""The group of a span that occupies every GPU of its pool."""
CPU_POOL = "cpu"
"""The pool where rule rewards and the controller work; the plan does not list it."""
CONTROLLER = "controller"
"""Name, role and kind of the controller's span."""
WAIT = "wait"
"""Kind of a span in which nobody works."""
GENERATE = "generate"
"""Kind of the spans of the rollout engine."""
TRAIN = "train"
"""Kind of the passes with gradients and of the updates."""
MEASURED: Literal["measured"] = "measured"
"""`source` of a trace that ran, and `bound_by` of its spans."""
CounterName = Literal["kv_bytes", "memory_bytes", "host_bytes", "queue_samples", "weight_version", "running"]
Source = Literal["predicted", "measured"]
Clock = Annotated[float, Field(ge=0, le=1e9)]
"""Seconds from the start of the trace; the bound is 30 years."""
Window = tuple[float, float]
"""Seconds from and to."""


@checked
@frozen
class Span:
    """Work that occupies a GPU group from `start_s` to `end_s`."""

    name: str
    """The call or the move: `actor.generate`, `actor.train.load`, `actor.sync`, ..."""
    role: str
    """Whose model works: actor, critic, reference, reward, rules, ..."""
    kind: str
    """generate, logprob, score, value, train, sync; load and unload of a move; wait where it idles."""
    pool: str
    """One pool; work on two pools is one span in each."""
    group: str = ALL
    """Which GPUs of the pool: `all`, `replica 3`, `rank 0`."""
    step: Annotated[int, Field(ge=0)]
    """Counted from 0, warm-up steps included."""
    start_s: Clock
    end_s: Clock
    bound_by: str
    """The resource with most of the time; a shared link that slowed it where contention did."""
    version: Annotated[int, Field(ge=0)] | None = None
    """Weight version it worked with; None where that has no meaning."""
    attributes: Mapping[str, float | str] = field(default_factory=dict)
    """What else is known, by name: tokens, contention_s (seconds that it waited on shared links), ..."""

    def __post_init__(self) -> None:
        """Time runs forward."""
        if not self.end_s >= self.start_s:
            raise RlhfsimError(
                "span-ends-before-start",
                f"span {self.name!r} ends at {self.end_s!r} s, before its start at {self.start_s!r} s",
                help="start_s <= end_s, in seconds from the start of the trace",
            )

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


@checked
@frozen
class Counter:
    """A value that holds from `time_s` until the next one of the same name, pool and group."""

    name: CounterName
    pool: str
    group: str = ALL
    time_s: Clock
    value: float
    """Bytes on the fullest GPU (kv_bytes, memory_bytes) or node (host_bytes), samples, version, requests."""


@checked
@frozen
class Trace:
    """One run of a plan, simulated or measured."""

    schema: Literal["rlhfsim.trace/1"] = SCHEMA
    source: Source
    rlhfsim_version: str
    plan_hash: str
    """`input_hash` of the plan that ran."""
    seed: int | None = None
    """Seed of what is random; None: nothing was."""
    steps: Annotated[int, Field(ge=1)]
    """Steps in the trace, warm-up included."""
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...] = ()

    @property
    def end_s(self) -> float:
        """When the last span ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools in the order of their first span, then those that only counters know."""
        names = (item.pool for items in (self.spans, self.counters) for item in items)
        return tuple(dict.fromkeys(names))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    """Spans and counters as dicts; written out because traces are long and pydantic slow at unions."""
    if not isinstance(value, tuple):
        return value
    names = [f.name for f in fields(value[0])] if value else []
    rows = [{name: getattr(item, name) for name in names} for item in value]
    for row in rows:
        if "attributes" in row:
            row["attributes"] = dict(row["attributes"])
    return rows


def busy_share(trace: Trace, pool: str, window: Window | None = None) -> float:
    """Share of the window in which a GPU group of the pool works, the mean over its groups.

    Overlapping spans count once; a span of group `all` occupies every group; `wait` is not work.
    """
    start, end = window or (0.0, trace.end_s)
    if end <= start:
        return 0.0
    spans = [s for s in trace.spans if s.pool == pool and s.kind != WAIT]
    groups = dict.fromkeys(s.group for s in spans if s.group != ALL) or {ALL: None}
    times = (covered((s.start_s, s.end_s) for s in spans if s.group in (group, ALL)) for group in groups)
    total = sum(max(0.0, min(b, end) - max(a, start)) for time in times for a, b in time)
    return total / len(groups) / (end - start)


def covered(windows: Iterable[Window]) -> Iterator[Window]:
    """The union of windows as disjoint ones in order."""
    current: Window | None = None
    for start, end in sorted(windows):
        if current is None or start > current[1]:
            if current is not None:
                yield current
            current = (start, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def peak(trace: Trace, name: CounterName, pool: str) -> Counter | None:
    """The largest value of a counter in a pool, the first one where it occurs; None: not recorded."""
    counters = (c for c in trace.counters if c.name == name and c.pool == pool)
    return max(counters, key=lambda c: (c.value, -c.time_s), default=None)


# --- files ------------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> Trace:
    """A trace from a file.

    Raises:
        RlhfsimError: unreadable, malformed, steps without work, a clock that goes back (with line), another
            schema version.
    """
    source = parse_json(read_text(Path(path), MAX_BYTES), str(path))
    if not isinstance(source.data, dict) or source.data.get("schema") != SCHEMA:
        raise RlhfsimError(
            "not-a-trace",
            f"this is not a trace of schema {SCHEMA}",
            place=path,
            help="write one with: rlhfsim simulate plan.json --trace out.json",
        )
    trace = convert(Trace, source)
    if trace.spans and trace.steps > len(trace.spans):
        raise RlhfsimError(
            "steps-without-work",
            f"the trace says {trace.steps:,} steps, but has {len(trace.spans):,} spans",
            place=source.place(("steps",)),
            help="steps is how many steps the spans are of; each has one or more",
        )
    _check_clock(trace, source)
    return trace


def _check_clock(trace: Trace, source: Document) -> None:
    """That one model's updates follow each other."""
    updates: dict[tuple[str, ...], dict[int, tuple[float, float, int]]] = {}
    for i, span in enumerate(trace.spans):
        if span.kind == TRAIN:
            of_steps = updates.setdefault((span.name, span.pool, span.group), {})
            start, end, first = of_steps.get(span.step, (span.start_s, span.end_s, i))
            of_steps[span.step] = min(start, span.start_s), max(end, span.end_s), first
    for (name, *_), of_steps in updates.items():
        for (before, early), (after, late) in pairwise(sorted(of_steps.items())):
            shared = min(early[1], late[1]) - max(early[0], late[0])
            if late[0] < early[0] or shared > 0.5 * min(early[1] - early[0], late[1] - late[0]):
                raise RlhfsimError(
                    "clock-goes-back",
                    f"{name!r} of step {after} runs from {late[0]:g} to {late[1]:g} s, of step {before} from "
                    f"{early[0]:g} to {early[1]:g} s",
                    place=source.place(("spans", late[2], "start_s")),
                    help="updates of a model follow each other: is this one trace, of one clock",
                )


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write the trace atomically, one span or counter a line."""
    write_atomically(Path(path), dumps(trace))


def dumps(trace: Trace) -> str:
    """JSON text with one span or counter a line: errors name a line, and lines can be searched."""
    entries = (f" {json.dumps(key)}: {_block(value)}" for key, value in trace.to_dict().items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _block(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value) + "\n ]"


COUNTERS: tuple[CounterName, ...] = get_args(CounterName)
"""Every name a counter can have."""
