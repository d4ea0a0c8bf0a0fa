"""A trace in figures: how busy pools are, where memory peaks, how long the queue is.

Only steps after the warm-up count. A step ends with its last training or weight sync; the window of
the figures goes from the end of the warm-up to the end of the last step.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frozen import frozen
from rlhfsim.trace import CounterName, Trace, Window, busy_share, peak

LEARNING = ("train", "sync")
"""Kinds of work that end a step."""


@frozen
class PoolFigures:
    """One pool over the measured steps."""

    name: str
    busy: float
    """Share of time in which its GPUs work, the mean over its groups."""
    peak_bytes: float | None
    """On the fullest GPU, warm-up included; None: not recorded."""
    peak_s: float | None
    """When that is first, seconds from the start of the trace."""
    peak_in: str | None
    """What the pool does then: the span that started last."""


@frozen
class Level:
    """A counter over the measured steps."""

    mean: float
    """Over time."""
    maximum: float


def window(trace: Trace, warmup: int = 0) -> Window:
    """From the end of the warm-up to the end of the last step."""
    ends = _step_ends(trace)
    start = max((end for step, end in ends.items() if step < warmup), default=0.0)
    return start, max(ends.values(), default=trace.end_s)


def _step_ends(trace: Trace) -> dict[int, float]:
    ends: dict[int, float] = {}
    learning = [s for s in trace.spans if s.kind in LEARNING] or trace.spans
    for span in learning:
        ends[span.step] = max(ends.get(span.step, 0.0), span.end_s)
    return ends


def pool_figures(trace: Trace, warmup: int = 0) -> tuple[PoolFigures, ...]:
    """Every pool that works, in the order of the trace."""
    when, figures = window(trace, warmup), []
    for name in dict.fromkeys(span.pool for span in trace.spans):
        highest = peak(trace, "memory_bytes", name)
        figures.append(
            PoolFigures(
                name=name,
                busy=busy_share(trace, name, when),
                peak_bytes=highest.value if highest else None,
                peak_s=highest.time_s if highest else None,
                peak_in=_running(trace, name, highest.time_s) if highest else None,
            )
        )
    return tuple(figures)


def _running(trace: Trace, pool: str, time: float) -> str | None:
    """The span of a pool that started last before or at an instant and has not ended."""
    spans = [s for s in trace.spans if s.pool == pool and s.start_s <= time < s.end_s]
    return max(spans, key=lambda s: s.start_s).name if spans else None


def level(trace: Trace, name: CounterName, warmup: int = 0) -> Level | None:
    """A counter of the whole run over time (summed over pools and groups); None: not recorded."""
    start, end = window(trace, warmup)
    pieces = [(max(a, start), min(b, end), v) for a, b, v in _levels(trace, name)]
    pieces = [(a, b, v) for a, b, v in pieces if b > a]
    if not pieces:
        return None
    area = sum((b - a) * v for a, b, v in pieces)
    return Level(mean=area / (end - start), maximum=max(v for *_, v in pieces))


def _levels(trace: Trace, name: CounterName) -> Iterator[tuple[float, float, float]]:
    """From, to and value of the sum over pools and groups."""
    rows = sorted((c for c in trace.counters if c.name == name), key=lambda c: c.time_s)
    untils = [*(row.time_s for row in rows[1:]), trace.end_s]
    now: dict[tuple[str, str], float] = {}
    for counter, until in zip(rows, untils, strict=False):  # without rows there is one end
        now[counter.pool, counter.group] = counter.value
        if until > counter.time_s:
            yield counter.time_s, until, sum(now.values())
