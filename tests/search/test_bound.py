"""The lower bound of a plan against its closed form and its simulation, on random plans of random frames."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from rlhfsim.phases.iteration import Setting, closed_form, program
from rlhfsim.phases.ledger import ledger
from rlhfsim.search.bound import Numbers
from rlhfsim.search.candidates import simulated
from rlhfsim.search.exact import Search
from rlhfsim.search.space import Family, Frame
from rlhfsim.specs.placement import Placement, Schedule

REL = 1e-9
FRAMES, PLANS = 6, 2
"""Of a question that are looked at, and plans of each."""


def bounded_plans(case: Any, seed: int, *, only: Any = None) -> Iterator[tuple[Frame, Placement, float]]:  # fmt: skip
    """Random plans that fit, with their bounds."""
    rng = random.Random(seed)
    search = Search(replace(case.request, objective="time"), case.models, only=only)
    branches = search._branches()
    frames = [(b, i) for b in branches for i in np.flatnonzero(np.isfinite(b.bound)).tolist()]
    for branch, row in rng.sample(frames, min(FRAMES, len(frames))):
        frame = branch.frame(row)
        pools = [search.corners.pool(frame, i, inf, thin=False) for i in range(len(frame.sizes))]
        if not all(map(len, pools)):
            continue
        choices, bounds, _ = search.corners.combined(frame, pools, inf)
        for k in rng.sample(range(len(choices)), min(PLANS, len(choices))):
            bound = float(bounds[k])
            assert branch.bound[row] <= bound * (1 + REL)
            assert search._bound(frame) <= bound * (1 + REL)
            yield frame, search.corners.placement(frame, pools, choices[k]), bound


def times(case: Any, placement: Placement) -> tuple[float, float]:
    """Closed form and simulation of a plan."""
    request = case.request
    memory = ledger(case.models, placement, request.workload, request.cluster)
    setting = Setting(models=case.models, placement=placement, workload=request.workload, cluster=request.cluster)  # fmt: skip
    form = closed_form(program(setting, memory.kv_tokens), placement.schedule).seconds
    return form, simulated(request, case.models, placement, memory).seconds


@pytest.mark.parametrize("block", range(8))
def test_the_bound_of_a_synchronous_plan_is_its_closed_form_and_no_simulation_is_shorter(
    questions: Any, block: int
) -> None:
    seen = 0
    for seed in range(1000 + block * 5, 1005 + block * 5):
        case = questions.drawn(seed, most=4000)
        if case is None:
            continue
        for frame, placement, bound in bounded_plans(case, seed):
            form, simulation = times(case, placement)
            assert bound <= form * (1 + REL), (seed, placement)
            assert form <= simulation * (1 + REL), (seed, placement)
            if not frame.family.schedule.streaming:
                assert bound == pytest.approx(form, rel=REL), (seed, placement)
            seen += 1
    assert seen > 0


def test_the_bound_of_a_streaming_plan_is_below_its_simulation(questions: Any) -> None:
    seen = close = 0
    for seed in range(1100, 1140):
        case = questions.drawn(seed, most=4000)
        if case is None:
            continue
        for _, placement, bound in bounded_plans(case, seed, only=lambda f: f.schedule.streaming):
            form, simulation = times(case, placement)
            assert bound <= form * (1 + REL), (seed, placement)
            assert bound <= simulation * (1 + REL), (seed, placement)
            seen += 1
            close += bound > 0.9 * form
    assert seen > 20
    assert close > seen / 2  # a bound of nothing would pass the rest


# --- by hand ----------------------------------------------------------------------------------------


def numbers(a: float = 0, r: float = 0, f: float = 0, x: float = 0, peak: float = 0) -> Numbers:
    return Numbers.of(np.array([a, r, f, x, 0.0, peak]))


def family(*groups: tuple[str, ...], **schedule: Any) -> Family:
    return Family(groups=groups, hardware=(0,) * len(groups), path="broadcast", schedule=Schedule(**schedule))  # fmt: skip
