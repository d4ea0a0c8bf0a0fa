from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.errors import RlhfsimError
from rlhfsim.trace import (
    COUNTERS,
    SCHEMA,
    Counter,
    Span,
    Trace,
    busy_share,
    dumps,
    peak,
    read_trace,
    write_trace,
)

DOC = (Path(__file__).parents[1] / "docs" / "trace.md").read_text(encoding="utf-8")


def span(start: float, end: float, **changes: Any) -> Span:
    given_fields: dict[str, Any] = {
        "name": "actor.train",
        "role": "actor",
        "kind": "train",
        "pool": "a",
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


FULL = trace(
    span(0, 1.5, version=0, attributes={"tokens": 12.0, "link": "nic:a"}),
    span(1.5, 1.5, pool="b", group="replica 3"),
    counters=(Counter(name="kv_bytes", pool="b", group="replica 3", time_s=0.5, value=1e12),),
)


# --- files ------------------------------------------------------------------------------------------


def test_a_trace_that_is_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", FULL)
    assert read_trace(tmp_path / "t.json") == FULL


_SHOWN = st.characters(exclude_categories=("Cc", "Cf", "Cs"))
"""Control characters are refused in names."""


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e8), st.floats(0, 1e8), st.text(_SHOWN, max_size=5), st.none() | st.integers(0, 9)
        ),
        max_size=5,
    )
)
def test_any_trace_survives_json(
    tmp_path_factory: Any, rows: list[tuple[float, float, str, int | None]]
) -> None:
    spans = [
        span(a, a + b, name=name or "x", version=v, attributes={"note": name, "n": b})
        for a, b, name, v in rows
    ]
    path = tmp_path_factory.mktemp("t") / "t.json"
    write_trace(path, trace(*spans))
    assert read_trace(path).spans == tuple(spans)


def test_a_file_has_one_span_or_counter_a_line() -> None:
    lines = dumps(FULL).splitlines()
    assert sum('"start_s"' in line for line in lines) == 2
    assert sum('"time_s"' in line for line in lines) == 1
    assert json.loads(dumps(FULL))["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ('"end_s": 1.5, "bound_by"', '"end_s": -1, "bound_by"', "bad-value", 9),
        ('"start_s": 0, "end_s": 1.5', '"start_s": 1.5, "end_s": 0.5', "span-ends-before-start", 9),
        ('"start_s": 1.5, "end_s": 1.5', '"start_s": 1.5, "end_s": 1e30', "bad-value", 10),
        ('"time_s": 0.5', '"time_s": -0.5', "bad-value", 13),
        ('"bound_by": "compute", "version": 0', '"bound": "compute", "version": 0', "unknown-key", 9),
        ('"start_s": 0', '"start_s": NaN', "bad-value", 9),
        ('"kv_bytes"', '"kv_byte"', "bad-value", 13),
        ('"source": "predicted"', '"source": "guessed"', "bad-value", 3),
        ('"steps": 1,', '"steps": 1', "malformed-json", 8),
        ('"steps": 1,', '"steps": 10000000,', "steps-without-work", 7),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path: Path, old: str, new: str, code: str, line: int) -> None:
    text = dumps(FULL)
    assert old in text
    path = tmp_path / "t.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RlhfsimError) as caught:
        read_trace(path)
    assert caught.value.code == code
    assert caught.value.place is not None
    assert caught.value.place.line == line
    assert caught.value.help


@pytest.mark.parametrize("second", [(0.5, 1.9), (0, 0.5)])
def test_updates_of_steps_that_overlap_or_go_back_are_refused(
    second: tuple[float, float], tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    spans = span(0.2, 1.5), span(1.5, 2, step=1), span(0, 0.5, step=1, kind="generate", name="actor.generate")
    write_trace(path, replace(trace(*spans), steps=2))
    assert len(read_trace(path).spans) == 3
    write_trace(path, replace(trace(spans[0], span(*second, step=1)), steps=2))
    with pytest.raises(RlhfsimError, match=r"'actor.train' of step 1 runs from") as caught:
        read_trace(path)
    assert caught.value.code == "clock-goes-back"
    assert caught.value.place is not None
    assert caught.value.place.line == 10


def test_a_plan_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"schema": "rlhfsim.plan/2"}')
    with pytest.raises(RlhfsimError, match="not a trace of schema"):
        read_trace(path)


def test_a_number_that_json_cannot_hold_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps(trace(span(0, float("inf"))))


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(RlhfsimError, match="before its start"):
        span(2.0, 1.0)


@pytest.mark.parametrize("kind", [Trace, Span, Counter], ids=lambda k: str(k.__name__))
def test_every_field_is_documented(kind: type) -> None:
    assert [f.name for f in fields(kind) if f"`{f.name}`" not in DOC] == []


def test_every_counter_is_documented() -> None:
    assert [name for name in COUNTERS if f"`{name}`" not in DOC] == []


# --- what a trace tells -----------------------------------------------------------------------------


def test_overlapping_spans_of_a_group_count_once() -> None:
    t = trace(span(0, 4), span(2, 6), span(8, 10))
    assert busy_share(t, "a") == pytest.approx(8 / 10)


def test_busy_share_is_the_mean_over_groups_and_spans_of_all_occupy_each() -> None:
    # replica 0 works 0-4 and 8-10, replica 1 works 0-2 and 8-10: 6 s and 4 s of 10
    t = trace(span(0, 4, group="replica 0"), span(0, 2, group="replica 1"), span(8, 10))
    assert busy_share(t, "a") == pytest.approx(0.5)


def test_waiting_is_not_work_and_a_window_cuts_spans() -> None:
    t = trace(span(0, 4), span(4, 10, kind="wait"))
    assert busy_share(t, "a") == pytest.approx(0.4)
    assert busy_share(t, "a", (2.0, 6.0)) == pytest.approx(0.5)
    assert busy_share(t, "a", (5.0, 5.0)) == 0.0
    assert busy_share(t, "b") == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 100), st.sampled_from(["all", "r0", "r1"])),
        min_size=1,
        max_size=8,
    )
)
def test_busy_share_lies_between_0_and_1(rows: list[tuple[float, float, str]]) -> None:
    t = trace(*(span(a, a + b, group=g) for a, b, g in rows))
    assert 0 <= busy_share(t, "a") <= 1 + 1e-12


def test_the_peak_is_the_first_largest_value_of_its_pool() -> None:
    rows = [(0.0, 5.0), (1.0, 9.0), (2.0, 9.0), (3.0, 1.0)]
    counters = tuple(Counter(name="memory_bytes", pool="a", time_s=t, value=v) for t, v in rows)
    found = peak(trace(counters=counters), "memory_bytes", "a")
    assert found is not None
    assert (found.time_s, found.value) == (1.0, 9.0)
    assert peak(trace(counters=counters), "memory_bytes", "b") is None


def test_pools_stand_in_the_order_of_their_spans() -> None:
    t = trace(
        span(0, 1, pool="b"),
        span(0, 1),
        counters=(Counter(name="host_bytes", pool="node", time_s=0, value=1),),
    )
    assert t.pools == ("b", "a", "node")
    assert t.end_s == 1
