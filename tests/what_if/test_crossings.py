"""Crossings of planted functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rlhfsim.what_if.scenarios.crossings import Curve, samples, state
from rlhfsim.what_if.scenarios.result import Tried

Function = Callable[[float], float | None]


def curve(a: Function, b: Function, xs: Sequence[float]) -> Curve:
    found = Curve(lambda x: Tried(x=x, a=a(x), b=b(x)))
    for x in xs:
        found.at(x)
    return found


def crossings(
    a: Function, b: Function, low: float, high: float, *, whole: bool = False, tolerance: float = 1e-4
) -> list[float]:
    made = curve(a, b, samples(low, high, whole=whole))
    return [c.x for c in made.crossings(tolerance, whole=whole)]


def test_a_planted_crossing_is_found() -> None:
    assert crossings(lambda x: 10 + x, lambda x: 3 * x, 1, 20) == [pytest.approx(5, rel=1e-3)]


def test_none_is_found_where_there_is_none() -> None:
    assert crossings(lambda x: 10 + x, lambda x: x, 1, 20) == []


def test_all_of_several_are_found_in_order() -> None:
    found = crossings(lambda x: (x - 2) * (x - 7) + 20, lambda _: 20.0, 0.5, 10)
    assert found == [pytest.approx(2, rel=1e-3), pytest.approx(7, rel=1e-3)]


def test_a_jump_is_narrowed_and_told() -> None:
    made = curve(lambda x: 1.0 if x < 4.2 else 3.0, lambda _: 2.0, samples(1, 10, whole=False))
    [found] = made.crossings(1e-3, whole=False)
    assert found.x == pytest.approx(4.2, rel=3e-3)
    assert found.jump


def test_a_smooth_crossing_is_no_jump() -> None:
    made = curve(lambda x: x, lambda _: 5.0, samples(1, 10, whole=False))
    [found] = made.crossings(1e-3, whole=False)
    assert not found.jump


def test_whole_things_cross_at_the_first_that_is_beyond() -> None:
    assert crossings(lambda x: 100 / x, lambda _: 12.0, 1, 64, whole=True) == [9.0]


def test_where_a_side_stops_fitting_is_a_crossing() -> None:
    found = crossings(lambda x: None if x > 6 else 1.0, lambda _: 2.0, 1, 10, tolerance=1e-3)
    assert found == [pytest.approx(6, rel=3e-3)]


def test_where_both_become_one_plan_is_a_crossing() -> None:
    found = crossings(lambda x: min(x, 5.0), lambda _: 5.0, 1, 10, tolerance=1e-3)
    assert found == [pytest.approx(5, rel=3e-3)]


def test_neither_side_fits_is_a_state_of_its_own() -> None:
    assert state(Tried(x=1, a=None, b=None)) == "nothing"
    assert state(Tried(x=1, a=None, b=1)) == "more"


def test_nothing_is_tried_twice() -> None:
    asked: list[float] = []

    def evaluate(x: float) -> Tried:
        asked.append(x)
        return Tried(x=x, a=x, b=5.5)

    made = Curve(evaluate)
    for x in samples(1, 10, whole=False):
        made.at(x)
    list(made.crossings(1e-3, whole=False))
    assert len(asked) == len(set(asked))


def test_a_wide_range_is_sampled_in_equal_factors() -> None:
    assert samples(1, 256, whole=False)[:3] == pytest.approx([1, 2, 4])
    assert samples(10, 18, whole=False)[:3] == pytest.approx([10, 11, 12])
