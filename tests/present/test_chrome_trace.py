from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.present.chrome_trace import COUNTERS, chrome_path, chrome_trace, dumps, lanes, write_chrome
from rlhfsim.trace import COUNTERS as NAMES
from rlhfsim.trace import Counter, Span, Trace


def span(start: float, end: float, **changes: Any) -> Span:
    given_fields: dict[str, Any] = {
        "name": "actor.train",
        "role": "actor",
        "kind": "train",
        "pool": "train",
        "step": 0,
        "bound_by": "compute",
        **changes,
    }
    return Span(start_s=start, end_s=end, **given_fields)


def trace(*spans: Span, counters: tuple[Counter, ...] = ()) -> Trace:
    return Trace(
        source="predicted",
        rlhfsim_version="0.2.0",
        plan_hash="abc",
        seed=7,
        steps=1,
        spans=spans,
        counters=counters,
    )


def by_phase(t: Trace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in chrome_trace(t)["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def nested_or_disjoint(a: tuple[int, int], b: tuple[int, int]) -> bool:
    (_, end), (other, last) = sorted([a, b], key=lambda w: (w[0], -w[1]))
    return other >= end or last <= end


TIMES = st.floats(0, 1e6, allow_nan=False)
SPANS = st.lists(
    st.tuples(TIMES, TIMES, st.sampled_from(["a", "b"]), st.sampled_from(["all", "replica 0"])), max_size=25
)


@given(SPANS)
def test_on_each_track_slices_nest_or_are_disjoint(rows: list[tuple[float, float, str, str]]) -> None:
    slices = by_phase(trace(*(span(t, t + d, pool=p, group=g) for t, d, p, g in rows)))["X"]
    assert len(slices) == len(rows)
    tracks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in slices:
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for windows in tracks.values():
        assert windows == sorted(windows, key=lambda w: (w[0], -w[1]))
        assert all(nested_or_disjoint(a, b) for i, a in enumerate(windows) for b in windows[:i])


@given(st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=50))
def test_spans_that_follow_each_other_share_one_track(seconds: list[float]) -> None:
    at, spans = 0.0, []
    for duration in seconds:
        spans.append(span(at, at + duration))
        at += duration
    assert len(lanes(trace(*spans), "train", "all")) == 1


def test_work_that_overlaps_goes_to_a_second_thread_of_its_group() -> None:
    # 0-4 holds 1-2 (nested); 3-6 overlaps 0-4, so it moves; 6-7 fits on the first thread again
    found = lanes(trace(span(0, 4), span(1, 2), span(3, 6), span(6, 7)), "train", "all")
    assert [[(s.start / 1e6, s.end / 1e6) for s in lane] for lane in found] == [
        [(0, 4), (1, 2), (6, 7)],
        [(3, 6)],
    ]


def test_pools_are_processes_and_groups_threads_with_ids_of_their_own() -> None:
    groups = ["all", "replica 2", "replica 10"]
    t = trace(*(span(0, 1, pool=p, group=g) for p in ("rollout", "train") for g in reversed(groups)))
    meta = by_phase(t)["M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    threads = [(processes[e["pid"]], e["args"]["name"]) for e in meta if e["name"] == "thread_name"]
    assert threads == [(p, g) for p in ("rollout", "train") for g in groups]
    tids = [e["tid"] for e in meta if e["name"] == "thread_name"]
    assert len({*tids, *processes, 0}) == len(tids) + len(processes) + 1


def test_a_span_becomes_a_complete_event_in_microseconds() -> None:
    t = trace(span(1.5, 2.0, version=3, attributes={"tokens": 12.0}))
    (event,) = by_phase(t)["X"]
    assert (event["name"], event["cat"], event["ts"], event["dur"]) == (
        "actor.train",
        "train",
        1_500_000,
        500_000,
    )
    assert event["args"] == {
        "role": "actor",
        "step": 0,
        "bound by": "compute",
        "weight version": 3,
        "tokens": 12.0,
    }


def test_a_counter_names_its_group_and_unit() -> None:
    counters = (
        Counter(name="kv_bytes", pool="train", group="replica 1", time_s=0.25, value=3e9),
        Counter(name="queue_samples", pool="train", time_s=1, value=64),
    )
    kv, queue = by_phase(trace(span(0, 1), counters=counters))["C"]
    assert (kv["name"], kv["ts"], kv["args"]) == ("KV cache of replica 1", 250_000, {"GB": 3.0})
    assert queue["args"] == {"samples": 64}
    assert set(COUNTERS) == set(NAMES)


def test_the_file_is_one_json_object_with_provenance(tmp_path: Path) -> None:
    t = trace(span(0, 1), counters=(Counter(name="running", pool="train", time_s=0, value=1),))
    write_chrome(tmp_path / "t.json", t)
    data = json.loads((tmp_path / "t.json").read_text())
    assert data == chrome_trace(t)
    assert data["otherData"]["plan_hash"] == "abc"
    assert {e["ph"] for e in data["traceEvents"]} == {"M", "X", "C"}
    assert json.loads(dumps(trace()))["traceEvents"] == []


@pytest.mark.parametrize(
    ("given_name", "name"), [("out.json", "out.chrome.json"), ("a/b.trace", "a/b.trace.chrome.json")]
)
def test_the_chrome_trace_lies_beside_the_trace(given_name: str, name: str) -> None:
    assert chrome_path(Path(given_name)) == Path(name)
