from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.coordination.tracing import (
    SAME_CLOCK,
    ClockOffset,
    Recorded,
    Tracer,
    assemble,
    coordination_overhead,
    offset,
)
from rlhfsim.present.chrome_trace import events
from rlhfsim.trace import Span, Trace, peak, read_trace, write_trace


class Ticks:
    """A clock that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def span(kind: str, start: float, end: float, step: int = 0, group: str = "all") -> Span:
    return Span(
        name=f"actor.{kind}",
        role="actor",
        kind=kind,
        pool="main",
        group=group,
        step=step,
        start_s=start,
        end_s=end,
        bound_by="measured",
    )


def trace(*spans: Span) -> Trace:
    return assemble([(Recorded(spans=spans), SAME_CLOCK)], start_s=0.0, plan_hash="h", steps=9)


def test_a_span_has_the_times_and_notes_of_its_block() -> None:
    clock = Ticks()
    tracer = Tracer(clock)
    with tracer.span("actor.train", "actor", "train", "main", "rank 0", 3, 7, tokens=5) as notes:
        clock.now += 2
        notes["loss"] = 0.5
    (found,) = tracer.take().spans
    assert (found.start_s, found.end_s, found.step, found.version) == (1000, 1002, 3, 7)
    assert dict(found.attributes) == {"tokens": 5, "loss": 0.5}
    assert found.bound_by == "measured"


def test_a_block_that_raises_is_recorded_and_the_error_goes_on() -> None:
    tracer = Tracer(Ticks())
    with pytest.raises(ZeroDivisionError), tracer.span("x", "actor", "train", "main"):
        _ = 1 / 0
    assert tracer.take().spans[0].attributes["failed"] == "ZeroDivisionError"


def test_a_clock_that_is_set_back_gives_an_empty_span_and_no_error() -> None:
    clock = Ticks()
    tracer = Tracer(clock)
    with tracer.span("x", "actor", "train", "main"):
        clock.now -= 60
    assert tracer.take().spans[0].seconds == 0


def test_drain_hands_out_everything_once_and_pickles() -> None:
    tracer = Tracer(Ticks())
    with tracer.span("x", "actor", "train", "main"):
        tracer.counter("memory_bytes", "main", 5.0, "rank 0")
    recorded = pickle.loads(pickle.dumps(tracer.take()))
    assert len(recorded.spans) == len(recorded.counters) == 1
    assert tracer.take() == Recorded()


def test_threads_lose_no_span_while_another_drains() -> None:
    tracer = Tracer()
    drained: list[Recorded] = []

    def work() -> None:
        for _ in range(200):
            with tracer.span("x", "actor", "train", "main"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.append(tracer.take())
    drained.append(tracer.take())
    assert sum(len(part.spans) for part in drained) == 800


def test_the_offset_comes_from_the_quickest_answer() -> None:
    local = Ticks(100.0)
    ways = iter([(3.0, 1.0), (0.1, 0.1), (0.0, 2.0)])

    def ask() -> float:
        there, back = next(ways)
        local.now += there
        remote = local.now + 50.0
        local.now += back
        return remote

    found = offset(ask, tries=3, clock=local)
    assert found.value_s == pytest.approx(50.0)
    assert found.uncertainty_s == pytest.approx(0.1)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8))
def test_the_true_offset_lies_inside_the_uncertainty(true: float, ways: list[tuple[float, float]]) -> None:
    local = Ticks(0.0)
    left = iter(ways)

    def ask() -> float:
        there, back = next(left)
        local.now += there
        remote = local.now + true
        local.now += back
        return remote

    found = offset(ask, tries=len(ways), clock=local)
    assert abs(found.value_s - true) <= found.uncertainty_s + 1e-9


def test_assemble_puts_nodes_on_one_clock_and_counts_from_the_first_step() -> None:
    ahead = Recorded(spans=(span("generate", 1110.0, 1112.0, step=12),))
    here = Recorded(spans=(span("train", 1012.0, 1013.0, step=12), span("load", 900.0, 1005.0, step=12)))
    found = assemble(
        [(here, SAME_CLOCK), (ahead, ClockOffset(value_s=100.0, uncertainty_s=0.1))],
        start_s=1010.0,
        plan_hash="abc",
        steps=1,
        seed=4,
        first_step=12,
    )
    assert [(s.kind, s.start_s, s.end_s, s.step) for s in found.spans] == [
        ("generate", 0, 2, 0),
        ("train", 2, 3, 0),
    ]
    assert (found.source, found.plan_hash, found.seed, found.steps) == ("measured", "abc", 4, 1)


def test_a_span_that_reaches_over_the_start_begins_at_zero() -> None:
    found = assemble(
        [(Recorded(spans=(span("load", 8.0, 12.0),)), SAME_CLOCK)], start_s=10.0, plan_hash="", steps=1
    )
    assert [(s.start_s, s.end_s) for s in found.spans] == [(0.0, 2.0)]


def test_an_evaluation_after_the_last_step_is_of_no_step() -> None:
    spans = tuple(replace(span("actor.generate", float(step), step + 1.0), step=step) for step in (4, 5, 6))
    found = assemble([(Recorded(spans=spans), SAME_CLOCK)], start_s=0.0, plan_hash="", steps=2, first_step=4)
    assert [s.step for s in found.spans] == [0, 1]


def test_responses_generated_ahead_count_to_the_last_step() -> None:
    ahead = replace(span("actor.generate", 0.0, 1.5), step=2)
    trained = tuple(replace(span("actor.train", float(step), step + 1.0), step=step) for step in (0, 1))
    found = assemble([(Recorded(spans=(ahead, *trained)), SAME_CLOCK)], start_s=0.0, plan_hash="", steps=2)
    assert [s.step for s in found.spans if "generate" in s.name] == [1]


def test_the_trace_survives_its_file(tmp_path: Path) -> None:
    clock = Ticks()
    tracer = Tracer(clock)
    with tracer.span("actor.generate", "actor", "generate", "rollout", "replica 1", 0, 2, tokens=7):
        clock.now += 1
        tracer.counter("running", "rollout", 3, "replica 1")
    found = assemble([(tracer.take(), SAME_CLOCK)], start_s=1000.0, plan_hash="p", steps=1)
    write_trace(tmp_path / "trace.json", found)
    assert read_trace(tmp_path / "trace.json") == found
    counter = peak(found, "running", "rollout")
    assert counter is not None
    assert (counter.time_s, counter.value) == (1.0, 3)


def test_overhead_is_the_time_in_which_no_engine_works() -> None:
    found = trace(
        span("controller", 0, 10),
        span("generate", 1, 4, group="replica 0"),
        span("generate", 2, 5, group="replica 1"),
        span("wait", 5, 8),
        span("train", 8, 10),
    )
    assert coordination_overhead(found) == {0: pytest.approx(0.4)}


def test_time_between_two_steps_counts_as_overhead_of_the_first() -> None:
    found = trace(span("train", 0, 6, step=0), span("train", 8, 10, step=1))
    assert coordination_overhead(found) == {0: pytest.approx(0.25), 1: pytest.approx(0.0)}


def test_engines_that_work_all_the_time_leave_no_overhead() -> None:
    found = trace(span("generate", 0, 5), span("train", 5, 9), span("generate", 3, 9, step=1))
    assert coordination_overhead(found) == {0: pytest.approx(0.0), 1: pytest.approx(0.0)}


def test_a_measured_trace_opens_in_perfetto_with_a_process_a_pool_and_a_thread_a_group() -> None:
    clock = Ticks()
    tracer = Tracer(clock)
    for group in ("replica 0", "replica 1"):
        with tracer.span("actor.generate", "actor", "generate", "rollout", group, 0, 4, tokens=9):
            clock.now += 1
    with tracer.span("actor.train", "actor", "train", "training", step=0):
        tracer.counter("memory_bytes", "training", 5e9)
        clock.now += 2
    found = list(events(assemble([(tracer.take(), SAME_CLOCK)], start_s=1000.0, plan_hash="p", steps=1)))
    names = [e["args"]["name"] for e in found if e["name"] in ("process_name", "thread_name")]
    assert names == ["rollout", "training", "replica 0", "replica 1", "all"]
    slices = {e["name"]: e for e in found if e["ph"] == "X"}
    assert (slices["actor.train"]["ts"], slices["actor.train"]["dur"]) == (2e6, 2e6)
    assert slices["actor.generate"]["args"] == {
        "role": "actor",
        "step": 0,
        "bound by": "measured",
        "weight version": 4,
        "tokens": 9,
    }
    assert [e["args"] for e in found if e["ph"] == "C"] == [{"GB": 5.0}]
