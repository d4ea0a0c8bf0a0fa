"""Dotted paths: which exist, and documents with a value replaced."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.what_if.dotted_paths import check_known, factor, keys, known, put, value_at
from rlhfsim.what_if.scenarios.document import Base


@pytest.mark.parametrize(
    "path",
    [
        "cluster.node_groups.0.price",
        "cluster.node_groups.1",
        "workload.response_len.mean",
        "workload.lora.rank",
        "run.faults.mtbf",
        "request.fix.actor.tp",
        "request.max_staleness",
    ],
)
def test_paths_through_lists_unions_and_optional_parts_exist(path: str) -> None:
    check_known(path, Base, None)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("workload.respons_len.mean", "workload.response_len.mean"),
        ("cluster.node_groups.3.prize", "cluster.node_groups.0.price"),
        ("run.step", "run.steps"),
    ],
)
def test_an_unknown_path_names_the_nearest(path: str, near: str) -> None:
    with pytest.raises(RlhfsimError, match="unknown path") as caught:
        check_known(path, Base, None)
    assert near in str(caught.value)


def test_nothing_below_a_plain_value_is_known() -> None:
    assert "workload.prompts.0" not in known(Base)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("a.b", 2, {"a": {"b": 2}, "l": [1, 2]}),
        ("a.c.d", 2, {"a": {"b": 1, "c": {"d": 2}}, "l": [1, 2]}),
        ("l.0", 5, {"a": {"b": 1}, "l": [5, 2]}),
        ("l.2", 5, {"a": {"b": 1}, "l": [1, 2, 5]}),
        ("l.1", None, {"a": {"b": 1}, "l": [1]}),
        ("a", None, {"l": [1, 2]}),
    ],
)
def test_a_value_is_replaced_added_or_removed(path: str, value: Any, expected: Any) -> None:
    data = {"a": {"b": 1}, "l": [1, 2]}
    assert put(data, keys(path), value) == expected
    assert data == {"a": {"b": 1}, "l": [1, 2]}


def test_a_list_has_no_item_beyond_the_next() -> None:
    with pytest.raises(RlhfsimError, match="no item 3"):
        put({"l": [1, 2]}, keys("l.3"), 1)


def test_what_is_absent_has_no_value() -> None:
    assert value_at({"a": [{"b": 1}]}, keys("a.0.b")) == 1
    assert value_at({"a": [{"b": 1}]}, keys("a.1.b")) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4x", 4.0), (" .5x ", 0.5), ("4", None), ("x", None), (4, None), ("mixtral-8x7b", None)],
)
def test_so_many_times_is_a_number_and_an_x(text: Any, expected: float | None) -> None:
    assert factor(text) == expected
