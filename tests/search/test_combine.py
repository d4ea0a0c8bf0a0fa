"""Combinations of seats against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlhfsim.search.combine import combine
from rlhfsim.search.options import KEPT, Option, undominated
from rlhfsim.specs.layout import Layout
from rlhfsim.specs.placement import Seat


def option(seconds: float, idle: float, busy: float) -> Option:
    return Option(seat=Seat(pool="p", layout=Layout()), seconds=seconds, idle=idle, busy=busy)


def random_options(rng: np.random.Generator, count: int) -> list[Option]:
    return [option(s, i, i + b) for s, i, b in rng.uniform(1, 10, (count, 3))]


def fits(chosen: tuple[Option, ...], usable: float) -> bool:
    """Whenever one seat works, the others are idle."""
    idle = sum(o.idle for o in chosen)
    return all(idle - o.idle + o.busy <= usable for o in chosen)


@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_combination_that_fits_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seats = [random_options(rng, rng.integers(1, 6)) for _ in range(rng.integers(1, 5))]
    usable = float(rng.uniform(10, 40))
    possible = [c for c in product(*seats) if fits(c, usable)]
    found = combine(seats, usable, 3)
    assert found.compared == int(np.prod([len(s) for s in seats]))
    assert found.unfit == found.compared - len(possible)
    if not possible:
        assert not found.best
        assert found.shortfall > 0
        return
    times = sorted(sum(o.seconds for o in c) for c in possible)
    assert [c.seconds for c in found.best] == pytest.approx(times[:3])
    assert all(fits(c.options, usable) for c in found.best)


def test_an_option_that_is_slower_and_larger_is_set_aside() -> None:
    fast, slow_large, slow_lean = option(1, 5, 9), option(2, 6, 11), option(2, 1, 3)
    assert undominated([slow_large, slow_lean, fast]) == (fast, slow_lean)


@pytest.mark.parametrize("seed", range(20))
def test_setting_options_aside_keeps_the_optimum_within_the_tolerance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seats = [random_options(rng, 10) for _ in range(3)]
    usable = 25.0
    everything = combine(seats, usable, 1)
    pruned = combine([undominated(s) for s in seats], usable, 1)
    assert bool(everything.best) == bool(pruned.best)
    if everything.best:
        assert pruned.best[0].seconds <= everything.best[0].seconds * 1.01


def test_at_most_a_fixed_number_of_options_goes_on() -> None:
    many = [option(1 + i, 100 - i, 200 - i) for i in range(100)]
    kept = undominated(many)
    assert len(kept) == KEPT
    assert kept[0] is many[0]
    assert many[-1] in kept
