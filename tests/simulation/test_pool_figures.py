from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.simulation.pool_figures import Level, level, pool_figures, window
from rlhfsim.trace import Counter, CounterName, Span, Trace


def span(kind: str, step: int, start: float, end: float, **changes: Any) -> Span:
    given: dict[str, Any] = {
        "name": f"actor.{kind}",
        "role": "actor",
        "pool": "train",
        "bound_by": "compute",
        **changes,
    }
    return Span(kind=kind, step=step, start_s=start, end_s=end, **given)


def counter(name: CounterName, time: float, value: float, pool: str = "train") -> Counter:
    return Counter(name=name, pool=pool, time_s=time, value=value)


def trace(*spans: Span, steps: int = 2, counters: tuple[Counter, ...] = ()) -> Trace:
    return Trace(
        source="predicted", rlhfsim_version="0", plan_hash="x", steps=steps, spans=spans, counters=counters
    )


# step 0 trains until 10 s, step 1 until 20 s; the rollout pool runs ahead until 24 s
AHEAD = trace(
    span("generate", 0, 0, 6, pool="rollout"),
    span("train", 0, 6, 10),
    span("generate", 1, 6, 14, pool="rollout"),
    span("train", 1, 15, 20),
    span("generate", 2, 14, 24, pool="rollout"),
    counters=(
        counter("memory_bytes", 6, 5e9),
        counter("memory_bytes", 15, 7e9),
        counter("queue_samples", 0, 0),
        counter("queue_samples", 14, 64),
        counter("queue_samples", 16, 8),
    ),
)


def test_the_window_goes_from_the_end_of_the_warm_up_to_the_end_of_the_last_step() -> None:
    assert window(AHEAD) == (0, 20)
    assert window(AHEAD, 1) == (10, 20)


def test_pools_are_busy_for_the_share_of_the_window_that_they_work() -> None:
    rollout, train = pool_figures(AHEAD, 1)
    assert (rollout.name, rollout.busy, rollout.peak_bytes) == ("rollout", pytest.approx(1.0), None)
    assert (train.name, train.busy) == ("train", pytest.approx(0.5))
    assert (train.peak_bytes, train.peak_s, train.peak_in) == (7e9, 15, "actor.train")


def test_a_level_is_a_mean_over_time_and_a_maximum() -> None:
    # 10-14: 0, 14-16: 64, 16-20: 8 samples: (2 x 64 + 4 x 8) / 10
    assert level(AHEAD, "queue_samples", 1) == Level(mean=pytest.approx(16.0), maximum=64)
    assert level(AHEAD, "running") is None


def test_a_level_sums_over_pools() -> None:
    t = trace(
        span("train", 0, 0, 4),
        steps=1,
        counters=(
            counter("running", 0, 2, "a"),
            counter("running", 0, 3, "b"),
            counter("running", 2, 0, "b"),
        ),
    )
    assert level(t, "running") == Level(mean=pytest.approx(3.5), maximum=5)
