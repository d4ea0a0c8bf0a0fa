"""Ends of intervals, worked by hand on a model of one coefficient and one phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.interval import objective, profile, stretched
from rlhfsim.calibration.posterior import Posterior
from rlhfsim.calibration.priors import Prior
from rlhfsim.kernels.cost import Z90

SIGMA = 0.05


class Curve:
    """ln seconds of the only phase as a function of ln coefficient, and the datum of it."""

    def __init__(self, shape: Callable[[float], float], data: Sequence[Datum]) -> None:
        self._shape, self.data = shape, data

    def log(self, values: Mapping[str, float]) -> Any:
        return np.array([self._shape(math.log(values.get("k", 1.0)))])


def ends(shape: Callable[[float], float], theta: float, slope: float, prior: Prior) -> tuple[float, float]:
    """Standard deviations below and above of a fit at rest at `theta`, where the phase has this slope."""
    own = np.array([[1 / (slope**2 / SIGMA**2 + 1 / prior.deviation(theta) ** 2)]])
    none = np.zeros(1)
    found = Posterior(
        priors=(prior,),
        theta=np.array([theta]),
        own=own,
        residuals=none,
        sigma=np.array([SIGMA]),
        slopes=np.array([[slope]]),
    )
    datum = Datum(run=0, phase="p", seconds=math.exp(shape(theta)), scatter=SIGMA, steps=3)
    below, above = stretched(Curve(shape, [datum]), found, Z90)  # type: ignore[arg-type]  # a stub
    return float(below[0]), float(above[0])


def believed(below: float = 0.5, above: float = 0.5, mean: float = 0.0) -> Prior:
    return Prior(name="k", mean=mean, below=below, above=above, least=-9.0, most=9.0)


def test_a_straight_phase_keeps_the_curvature() -> None:
    below, above = ends(lambda x: x, 0.0, 1.0, believed())
    assert below == above == pytest.approx(1 / math.sqrt(1 / SIGMA**2 + 4), rel=1e-9)


def test_where_the_phase_stops_to_depend_only_the_prior_ends_it() -> None:
    below, above = ends(lambda x: max(x, 0.0), 0.0, 1.0, believed())
    assert below == pytest.approx(0.5)
    assert above == pytest.approx(0.05, rel=0.01)


def test_a_hidden_part_that_begins_a_little_lower_widens_a_little() -> None:
    below, _ = ends(lambda x: max(x, -0.2), 0.0, 1.0, believed())
    assert below == pytest.approx(0.05, rel=0.01)  # the data still hold there: four sigma


def test_the_narrow_side_of_a_prior_ends_what_its_wide_side_began() -> None:
    """theta lies on the wide side (sd 3) and the phase says nothing: up, the prior ends at mean + 0.5 z."""
    below, above = ends(lambda x: 0.0, -2.0, 0.0, believed(below=3.0, above=0.5))
    assert above == pytest.approx((2.0 + 0.5 * Z90) / Z90)
    assert below == pytest.approx(3.0)


def test_a_bound_is_not_passed() -> None:
    prior = Prior(name="k", mean=0.0, below=0.5, above=0.5, least=-9.0, most=0.01)
    _, above = ends(lambda x: min(x, 0.0), 0.0, 1.0, prior)
    assert above == pytest.approx(0.05, rel=0.01)


def test_what_another_coefficient_can_make_up_for_widens_the_interval() -> None:
    """Two coefficients that one phase sums up: alone each would be known to 0.05, together to the prior's
    0.5."""

    class Sum:
        data = (Datum(run=0, phase="p", seconds=1.0, scatter=SIGMA, steps=3),)

        def log(self, values: Mapping[str, float]) -> Any:
            return np.array([sum(math.log(values.get(name, 1.0)) for name in "ab")])

    known = tuple(replace(believed(), name=name) for name in "ab")
    slopes = np.ones((1, 2))
    own = np.linalg.inv(slopes.T @ slopes / SIGMA**2 + np.eye(2) / 0.25)
    found = Posterior(
        priors=known,
        theta=np.zeros(2),
        own=own,
        residuals=np.zeros(1),
        sigma=np.array([SIGMA]),
        slopes=slopes,
    )
    end = Z90 * math.sqrt(own[0, 0])
    risen = profile(Sum(), found, 0, end)  # type: ignore[arg-type]  # a stub
    assert risen == pytest.approx(Z90**2, rel=0.01)
    below, above = stretched(Sum(), found, Z90)  # type: ignore[arg-type]  # a stub
    assert (below[0], above[0]) == pytest.approx((math.sqrt(own[0, 0]),) * 2)


def test_the_objective_is_soft_in_data_and_square_in_priors() -> None:
    prior, none = believed(), np.zeros((1, 1))
    found = Posterior(
        priors=(prior,),
        theta=np.zeros(1),
        own=none,
        residuals=np.zeros(1),
        sigma=np.array([SIGMA]),
        slopes=np.ones((1, 1)),
    )
    told = objective(replace(found, theta=np.array([0.1])), np.array([-0.1]))
    assert told == pytest.approx(2 * (math.sqrt(1 + 2.0**2) - 1) + 0.2**2)
