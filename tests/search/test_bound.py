"""The lower bound of a plan against its closed form and its simulation, on random plans of random
skeletons."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from rlhfsim.memory.ledger import ledger
from rlhfsim.search.bound import objective_bound, ruled, step_bound
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import simulated
from rlhfsim.search.columns import Numbers
from rlhfsim.search.scope import Scope
from rlhfsim.search.space import Partition, Skeleton
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.placement.placement import Placement, Schedule
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Reward, Rules
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import closed_form, program

REL = 1e-9
SKELETONS, PLANS = 6, 2
"""Of a question that are looked at, and plans of each."""


def bounded_plans(case: Any, seed: int, *, only: Any = None) -> Iterator[tuple[Skeleton, Placement, float]]:
    """Random plans that fit, with their bounds."""
    rng = random.Random(seed)
    search = Search(replace(case.request, objective="time"), case.models, scope=Scope(only=only))
    branches = search._branches()
    skeletons = [(b, i) for b in branches for i in np.flatnonzero(np.isfinite(b.bound)).tolist()]
    for branch, row in rng.sample(skeletons, min(SKELETONS, len(skeletons))):
        skeleton = branch.skeleton(row)
        pools = [search.subproblems.pool(skeleton, i, inf) for i in range(len(skeleton.sizes))]
        if not all(map(len, pools)):
            continue
        choices, bounds, _ = search.subproblems.combined(skeleton, pools, inf)
        for k in rng.sample(range(len(choices)), min(PLANS, len(choices))):
            bound = float(bounds[k])
            assert branch.bound[row] <= bound * (1 + REL)
            assert search.subproblems.bound(skeleton) <= bound * (1 + REL)
            yield skeleton, search.subproblems.placement(skeleton, pools, choices[k]), bound


def times(case: Any, placement: Placement) -> tuple[float, float]:
    """Closed form and simulation of a plan."""
    request = case.request
    memory = ledger(case.models, placement, request.workload, request.cluster)
    setting = CallSetting(
        models=case.models, placement=placement, workload=request.workload, cluster=request.cluster
    )
    form = closed_form(program(setting, memory.kv_tokens), placement.schedule).seconds
    return form, simulated(request, case.models, placement, memory).seconds


@pytest.mark.parametrize("block", range(6))
def test_the_bound_of_a_synchronous_plan_is_its_closed_form_and_no_simulation_is_shorter(
    questions: Any, block: int
) -> None:
    seen = 0
    for seed in range(1000 + block * 5, 1005 + block * 5):
        case = questions.drawn(seed, most=4000)
        if case is None:
            continue
        for skeleton, placement, bound in bounded_plans(case, seed):
            form, simulation = times(case, placement)
            assert bound <= form * (1 + REL), (seed, placement)
            assert form <= simulation * (1 + REL), (seed, placement)
            if not skeleton.partition.schedule.streaming:
                assert bound == pytest.approx(form, rel=REL), (seed, placement)
            seen += 1
    assert seen > 0


def test_the_bound_of_a_streaming_plan_is_below_its_simulation(questions: Any) -> None:
    seen = close = 0
    for seed in range(1100, 1170):
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
    assert close > seen / 3  # a bound of nothing would pass the rest


def test_the_bound_of_an_asynchronous_plan_is_below_its_simulation(questions: Any) -> None:
    seen = 0
    for seed in range(2010, 2026):
        case = questions.drawn(seed, stale="async", most=4000)
        if case is None or not case.request.workload.generates:
            continue
        for skeleton, placement, bound in bounded_plans(case, seed, only=lambda f: f.schedule.staleness > 0):
            _, simulation = times(case, placement)
            assert bound <= simulation * (1 + REL), (seed, placement)
            if skeleton.partition.pace == "batches":
                assert simulation <= 1.5 * bound, (seed, placement)
            seen += 1
    assert seen > 20


# --- by hand ----------------------------------------------------------------------------------------


def numbers(a: float = 0, r: float = 0, f: float = 0, x: float = 0, peak: float = 0) -> Numbers:
    return Numbers.of(until_generated_s=a, until_scored_s=r, until_free_s=f, training_s=x, peak=peak)


def partition(*groups: tuple[str, ...], **schedule: Any) -> Partition:
    return Partition(
        groups=groups, hardware=(0,) * len(groups), path="broadcast", schedule=Schedule(**schedule)
    )


def step(of: Partition, request: Any, *pools: Numbers, sync: float = 0.0) -> float:
    return float(step_bound(of, request, pools, np.array(sync)))


@pytest.fixture
def plain(questions: Any) -> Any:
    """A question without controller or rules: only the pools count."""
    case = questions.drawn(1001, most=10**9)
    cluster = case.request.cluster
    pools = tuple(replace(p, profile=_idle_controller(p.profile)) for p in cluster.node_groups)
    work = replace(
        case.request.workload,
        reward=replace(case.request.workload.reward, rules=None, model="same"),
        algorithm="grpo",
        environment=None,
        epochs=1,
        mini_batches=1,
    )
    return replace(case.request, cluster=replace(cluster, node_groups=pools), workload=work, objective="time")


def _idle_controller(profile: Profile) -> Profile:
    none = Coefficient(value=0.0, low=0.0, high=0.0, source="test")
    return replace(profile, coefficients={**profile.coefficients, "controller_time": none})


def test_one_pool_takes_the_sum_of_its_work(plain: Any) -> None:
    one = partition(("actor", "reference", "rollout"))
    # generate 10, sleep and score 3, until free 4, train 5
    assert step(one, plain, numbers(a=10, r=3, f=4, x=5)) == 19


def test_a_pool_that_trains_waits_for_the_scores_of_the_others(plain: Any) -> None:
    apart = partition(("actor",), ("reward",), ("rollout",))
    pools = numbers(r=1, f=1, x=5), numbers(r=7, f=8), numbers(a=10, f=0)
    # 10 until generated, 7 until scored, 5 of training, 2 of sync
    assert step(apart, plain, *pools, sync=2) == 24


def test_the_sync_waits_for_both_ends_and_the_step_for_the_slowest_pool(plain: Any) -> None:
    apart = partition(("actor",), ("critic",), ("rollout",))
    pools = numbers(x=5), numbers(x=30), numbers(a=10, f=20)
    assert step(apart, plain, *pools, sync=2) == 40  # the critic: 10 + 30
    assert step(apart, plain, numbers(x=5), numbers(x=1), pools[2], sync=2) == 32  # 10 + 20 + 2


def test_streamed_samples_are_scored_while_others_generate(plain: Any) -> None:
    streams = partition(("actor", "reference"), ("rollout",), streaming=True)
    pieces = np.arange(1.0, 9.0)  # a piece a second
    made = Numbers.of(pieces=pieces, until_generated_s=8.0)
    # DeepSpeed: 0.25 s to score the last piece, then training
    waits = replace(plain, backend="deepspeed")
    assert step(streams, waits, numbers(r=2, f=2, x=4), made) == pytest.approx(8 + 0.25 + 4)
    plain = replace(plain, backend="megatron")
    # scoring and training of a piece take 0.25 + 0.5 s: the last piece decides
    assert step(streams, plain, numbers(r=2, f=2, x=4), made) == pytest.approx(8 + 0.75)
    # 1 + 2 s a piece: from the first piece on there is work without a gap
    assert step(streams, plain, numbers(r=8, f=8, x=16), made) == pytest.approx(1 + 24)


def test_rules_wait_for_their_last_piece_and_at_least_a_response(plain: Any) -> None:
    pieces = np.array([[7.5 * k for k in range(1, 9)], [60.0] * 8])
    work = replace(
        plain.workload, prompts=2, samples=8, reward=Reward(rules=Rules(seconds_per_sample=4, workers=4))
    )
    assert ruled(work, pieces, streamed=True).tolist() == [64, 76]  # 16 s of work, 4 s of a response
    assert ruled(work, pieces, streamed=False).tolist() == [76, 76]
    one = partition(("actor", "reference", "rollout"))
    made = Numbers.of(until_generated_s=60, until_scored_s=1, until_free_s=1, training_s=5, until_ruled_s=64)
    assert step(one, replace(plain, workload=work), made) == 64 + 5


def test_one_step_off_is_the_slower_side_and_the_sync(plain: Any) -> None:
    stale = partition(("actor",), ("rollout",), staleness=1)
    pools = numbers(r=1, f=1, x=5), numbers(a=10, f=1)
    assert step(stale, plain, *pools, sync=2) == 13
    hidden = partition(("actor",), ("rollout",), staleness=1, overlapped_sync=True)
    assert step(hidden, plain, *pools, sync=2) == 11
    assert step(hidden, plain, *pools, sync=20) == 20
    assert step(hidden, plain, *pools, sync=10) == 13.5  # (11 + 6 + 10) / 2


def test_the_bound_on_memory_is_the_most_bytes_of_any_pool(plain: Any) -> None:
    apart = partition(("actor",), ("rollout",))
    request = replace(plain, objective="memory")
    found = objective_bound(apart, request, [numbers(peak=3), numbers(peak=7)], np.zeros(1))
    assert float(found[0] if found.shape else found) == 7


@pytest.mark.parametrize(
    "schedule", [{}, {"streaming": True}, {"staleness": 1}, {"staleness": 2, "partial_rollout": True}]
)
def test_no_number_of_a_pool_lowers_the_bound_when_it_grows(plain: Any, schedule: Any) -> None:
    # dominance within a pool rests on this
    rng = np.random.default_rng(0)
    apart = partition(("actor", "reference"), ("reward",), ("rollout",), **schedule)
    for _ in range(200):
        rows = rng.uniform(0, 10, size=(3, 14))
        rows[:, 6:] = np.sort(rows[:, 6:], axis=1)
        rows[2, 0] = rows[2, -1]
        more = rows.copy()
        more[rng.integers(3), rng.choice([0, 1, 2, 3])] += 1.0
        one, two = (step(apart, plain, *map(Numbers, r), sync=1.0) for r in (rows, more))
        assert two >= one
