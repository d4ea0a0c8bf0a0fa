"""How far a plan lies from the runs of its profile, and what that does to its intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_plans import GPU, plan
from scipy.optimize import minimize

from rlhfsim.api import estimate
from rlhfsim.kernels.cost import Z90
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.calibrated import Point, Provenance, distance
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.measured import nearest, spread
from rlhfsim.step.region import conditions, outside, point, warnings, widened

coordinate = st.floats(-5, 5)
points = st.tuples(*[coordinate] * 5)


def brute(vertices: list[Point], x: Point) -> float:
    """The nearest point of the hull as a quadratic program over the weights of its vertices."""
    table, target = np.array(vertices), np.array(x)
    n = len(vertices)
    best = math.inf
    for start in (np.full(n, 1 / n), *np.eye(n)):
        solved = minimize(
            lambda w: float(((w @ table - target) ** 2).sum()),
            start,
            bounds=[(0, 1)] * n,
            method="SLSQP",
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        best = min(best, math.sqrt(max(0.0, float(solved.fun))))
    return best


@given(st.lists(points, min_size=1, max_size=5), points)
def test_the_distance_is_that_of_the_quadratic_program(vertices: list[Point], x: Point) -> None:
    assert distance(vertices, x) == pytest.approx(brute(vertices, x), abs=2e-3)


@given(st.lists(points, min_size=1, max_size=6), st.lists(st.floats(0.01, 1), min_size=6, max_size=6))
def test_a_mean_of_points_is_inside(vertices: list[Point], weights: list[float]) -> None:
    share = np.array(weights[: len(vertices)])
    mean = share / share.sum() @ np.array(vertices)
    assert distance(vertices, tuple(mean)) < 2e-3


@given(st.lists(points, min_size=1, max_size=5), points, points)
def test_another_run_never_makes_it_farther(vertices: list[Point], more: Point, x: Point) -> None:
    assert distance([*vertices, more], x) <= distance(vertices, x) + 2e-3


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ((0.0, 0.0, 0, 0, 0), 0.0),  # a vertex
        ((0.5, 0.2, 0, 0, 0), 0.0),  # inside the triangle
        ((1.0, 1.0, 0, 0, 0), math.sqrt(0.5)),  # off the middle of its long side
        ((-3.0, -4.0, 0, 0, 0), 5.0),  # a corner is nearest
        ((0.5, -2.0, 0, 0, 0), 2.0),  # an edge is nearest
        ((0.2, 0.2, 0, 0, 7.0), 7.0),  # another coordinate
    ],
)
def test_distances_of_a_triangle_by_hand(x: Point, expected: float) -> None:
    triangle = [(0.0, 0, 0, 0, 0), (1.0, 0, 0, 0, 0), (0.0, 1, 0, 0, 0)]
    assert distance(triangle, x) == pytest.approx(expected, abs=1e-3)


# --- plans ----------------------------------------------------------------------------------------

DRIFT = Coefficient(value=0.2, low=0.1, high=0.4, source="test")


def calibrated(*seen: Plan, drop: tuple[str, ...] = ()) -> Profile:
    """The profile as if these plans had been run."""
    region: dict[str, list[Point]] = {}
    for made in seen:
        for phase in made.prediction.phases:
            if phase.name not in drop:
                region.setdefault(phase.name, []).append(
                    point(phase.name, made.models, made.workload, made.placement)
                )
    told = Provenance(
        base=GPU,
        date="2026-11-21",
        device="8 x H100",
        interconnect="nvlink",
        runs=("a",),
        data=9,
        drift=DRIFT,
        region={phase: tuple(found) for phase, found in region.items()},
    )
    return replace(load_profile(GPU), calibration=told)


def cluster(profile: Profile, gpus: int = 8) -> Cluster:
    return Cluster(node_groups=(replace(node_group(GPU, gpus), profile=profile),))


@pytest.fixture(scope="module")
def seen() -> Plan:
    """A plan whose intervals hold what its coefficients say, and no discrepancy of the model."""
    made, profile = plan(), load_profile(GPU)
    exact = Coefficient(value=0.0, low=0.0, high=0.0, source="test")
    own = {**profile.coefficients, "rl_step_discrepancy": exact}
    return estimate(made.placement, made.workload, cluster(replace(profile, coefficients=own)))


def on(profile: Profile, made: Plan) -> Plan:
    return estimate(made.placement, made.workload, cluster(profile))


def test_a_plan_that_was_run_keeps_its_intervals(seen: Plan) -> None:
    again = on(calibrated(seen), seen)
    assert [(p.low_s, p.high_s) for p in again.prediction.phases] == [
        (p.low_s, p.high_s) for p in seen.prediction.phases
    ]
    assert (again.prediction.low_s, again.prediction.high_s) == (
        seen.prediction.low_s,
        seen.prediction.high_s,
    )
    assert warnings(again, [calibrated(seen)]) == ()


def test_a_plan_between_two_runs_is_inside(seen: Plan) -> None:
    profile = calibrated(plan(prompts=32), plan(prompts=128))
    assert all(item.distance == pytest.approx(0.0, abs=1e-3) for item in outside(seen, [profile]))


def test_far_intervals_grow_by_the_drift_until_they_are_those_without_a_run(seen: Plan) -> None:
    profile = calibrated(plan(prompts=16))  # a factor of 4 in the batch
    away, told = math.log(4), on(profile, seen)
    question = conditions(seen, profile)
    near = nearest(question)
    assert near is not None
    without = Z90 * spread(profile["rl_step_discrepancy"], near.distance)
    for before, after in zip(seen.prediction.phases, told.prediction.phases, strict=True):
        if before.seconds == 0:
            continue
        own, room = math.log(before.high_s / before.seconds), without**2
        up = math.sqrt(own**2 + room * (1 - math.exp(-((0.2 * away) ** 2) / room)))
        assert after.high_s == pytest.approx(before.seconds * math.exp(up), rel=1e-4)
        assert after.seconds == before.seconds
    assert told.prediction.high_s > seen.prediction.high_s
    assert told.prediction.low_s < seen.prediction.low_s
    assert told.prediction.step_s == seen.prediction.step_s
    known = calibrated(plan(prompts=64 * 4**5))
    assert known.calibration is not None
    fast = replace(known, calibration=replace(known.calibration, drift=replace(DRIFT, value=1.0, high=1.0)))
    very_far, alone = on(fast, seen), on(load_profile(GPU), seen)
    assert very_far.prediction.high_s == pytest.approx(alone.prediction.high_s, rel=1e-3)
    assert very_far.prediction.low_s == pytest.approx(alone.prediction.low_s, rel=1e-3)


def test_far_phases_are_told_and_near_ones_are_not(seen: Plan) -> None:
    near, far = calibrated(plan(prompts=48)), calibrated(plan(prompts=16))
    assert warnings(on(near, seen), [near]) == ()
    [told] = warnings(on(far, seen), [far])
    assert "a factor of 4 away" in told
    assert "actor.train" in told
    assert "actor.generate" in told


def test_a_phase_that_no_run_had_is_named(seen: Plan) -> None:
    profile = calibrated(seen, drop=("actor.train",))
    [told] = warnings(on(profile, seen), [profile])
    assert told.startswith("actor.train: no run behind profile")


def test_a_profile_that_was_not_calibrated_has_no_region_and_widens_once(seen: Plan) -> None:
    profile = load_profile(GPU)
    assert widened(seen, [profile]) is seen
    assert outside(seen, [profile]) == ()


@given(st.integers(1, 6))
def test_farther_is_never_narrower(steps: int) -> None:
    seen = plan()
    nearer, farther = (calibrated(plan(prompts=64 * 2 ** (steps - k))) for k in (1, 0))
    a, b = (widened(seen, [p]).prediction for p in (nearer, farther))
    assert b.high_s >= a.high_s - 1e-9
    assert b.low_s <= a.low_s + 1e-9
