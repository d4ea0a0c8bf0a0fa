"""What one run says about another: worked by hand where there is one coefficient."""

from __future__ import annotations

import math

import pytest

from lab.scoreboard.one_run import Timed, seconds, settled
from rlhfsim.kernels.cost import Z90, Cost, part

WIDE = (math.exp(-Z90 * 0.3), math.exp(Z90 * 0.3))
"""A doubt of 30 % (one standard deviation of ln seconds)."""


def cost(**parts: float) -> Cost:
    return Cost(parts=tuple(part("compute", s, name, spread=WIDE) for name, s in parts.items()))


def test_one_coefficient_takes_the_share_that_its_doubt_deserves() -> None:
    tau = 0.15
    z = settled([Timed(cost=cost(a=10.0), measured_s=20.0)], tau)
    share = 0.3**2 / (0.3**2 + tau**2)
    assert seconds(cost(a=10.0), z) == pytest.approx(10.0 * 2.0**share, rel=1e-4)


def test_a_run_on_time_changes_nothing() -> None:
    z = settled([Timed(cost=cost(a=3.0, b=2.0), measured_s=5.0)])
    assert z == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-6)


def test_what_the_calibrator_does_not_use_stays_as_predicted() -> None:
    z = settled([Timed(cost=cost(a=10.0), measured_s=30.0)])
    assert seconds(cost(b=7.0), z) == pytest.approx(7.0)


def test_phases_tell_coefficients_apart_and_the_step_alone_does_not() -> None:
    alone = settled([Timed(cost=cost(a=10.0, b=10.0), measured_s=30.0)])
    assert alone["a"] == pytest.approx(alone["b"])
    apart = settled([Timed(cost=cost(a=10.0), measured_s=20.0), Timed(cost=cost(b=10.0), measured_s=10.0)])
    assert apart["a"] > 1
    assert apart["b"] == pytest.approx(0.0, abs=1e-6)


def test_parts_without_doubt_are_not_moved() -> None:
    sure = Cost(parts=(part("host", 5.0, "sure"),))
    assert settled([Timed(cost=sure, measured_s=50.0)]) == {}
    z = settled([Timed(cost=sure + cost(a=5.0), measured_s=20.0)])
    assert seconds(sure, z) == 5.0


def test_a_lopsided_doubt_moves_further_on_its_wide_side() -> None:
    lopsided = Cost(parts=(part("compute", 10.0, "a", spread=(0.95, 2.0)),))
    slow = seconds(lopsided, settled([Timed(cost=lopsided, measured_s=20.0)]))
    fast = seconds(lopsided, settled([Timed(cost=lopsided, measured_s=5.0)]))
    assert math.log(slow / 10) > 3 * abs(math.log(fast / 10))
