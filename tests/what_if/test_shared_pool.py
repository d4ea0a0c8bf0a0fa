"""A pool of jobs: the schedule against brute force, two jobs in turn by hand, and the replay."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import milp

from rlhfsim.plan import Plan
from rlhfsim.present.answers.pool import schedule_figure
from rlhfsim.search.parallel import serial
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import DAY
from rlhfsim.what_if.risk.step import DRAWS
from rlhfsim.what_if.scenarios.designs import DesignResult
from rlhfsim.what_if.shared_pool.answer import PoolAnswer, PoolJobText, priced_options
from rlhfsim.what_if.shared_pool.pairs import JobStep, _covered, job_step, sharing
from rlhfsim.what_if.shared_pool.schedule import (
    JobTerms,
    PoolMode,
    PoolOption,
    horizon_of,
    length_of,
    modes,
    scheduled,
    worth,
)

HOUR = 3600.0
ALONE = JobStep(
    step_s=100,
    pools=((0, 8),),
    busy_s=(100,),
    any_s=100,
    out_s=2,
    in_s=3,
    host_bytes=1e11,
    capacity_bytes=2e12,
)
WAITS = replace(ALONE, busy_s=(40,), any_s=40)


def option(
    job: str, gpus: int, hours: float, spread: float = 0.0, shape: JobStep | None = None
) -> PoolOption:
    drawn = hours * HOUR * np.exp(spread * np.linspace(-2, 2, DRAWS))
    return PoolOption(job=job, gpus=gpus, step_s=100, fits=1.0, drawn_s=drawn, shape=shape)


# --- the schedule against brute force -----------------------------------------------------------------


def drawn_case(seed: int) -> tuple[list[PoolOption], list[JobTerms]]:
    rng = np.random.default_rng(seed)
    shapes = [ALONE, WAITS]
    options = []
    for name in "abc":
        hours, shape = rng.uniform(2, 20), shapes[int(rng.integers(2))]
        for gpus in (2, 4):
            options.append(option(name, gpus, hours / gpus**0.8, rng.uniform(0, 0.2), shape))
    jobs = [
        JobTerms(name=n, deadline_s=rng.uniform(2, 12) * HOUR, weight=float(rng.integers(1, 4)))
        for n in "abc"
    ]
    return options, jobs


def best_by_brute_force(options: list[PoolOption], jobs: list[JobTerms], gpus: int, slots: int) -> float:
    """Every way to run three jobs, alone or in pairs, at every start."""
    known, terms = modes(options), {j.name: j for j in jobs}
    horizon = horizon_of(known, jobs)
    slot = horizon / slots
    best = -np.inf
    for count in (2, 3):  # a pair and a single one, or three single ones
        for some in itertools.combinations(known, count):
            names = sorted(name for mode in some for name in mode.jobs)
            if names == ["a", "b", "c"]:
                best = max(best, _best_starts(some, terms, horizon, slot, gpus, slots))
    return best


def _best_starts(
    some: tuple[PoolMode, ...], terms: dict[str, JobTerms], horizon: float, slot: float, gpus: int, slots: int
) -> float:
    lengths = [length_of(m, slot) for m in some]
    worths = [
        [worth(m, s * slot, terms, horizon, gpus) for s in range(slots - length + 1)]
        for m, length in zip(some, lengths, strict=True)
    ]
    best = -np.inf
    for starts in itertools.product(*(range(len(w)) for w in worths)):
        value = sum(w[s] for w, s in zip(worths, starts, strict=True))
        if value > best and all(
            sum(m.gpus for m, s, n in zip(some, starts, lengths, strict=True) if s <= at < s + n) <= gpus
            for at in starts
        ):
            best = value
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_of_three_jobs_is_the_best_of_all_written_out(seed: int) -> None:
    options, jobs = drawn_case(seed)
    found = scheduled(options, jobs, 4, slots=10)
    assert found is not None
    assert found.value == pytest.approx(best_by_brute_force(options, jobs, 4, 10), abs=1e-5)
    assert sorted(found.in_time) == ["a", "b", "c"]


# --- by hand ------------------------------------------------------------------------------------------


def test_jobs_that_fit_next_to_each_other_all_start_at_once() -> None:
    jobs = [JobTerms(name=n, deadline_s=6 * HOUR) for n in "ab"]
    found = scheduled([option("a", 4, 5), option("b", 4, 5)], jobs, 8)
    assert found is not None
    assert [m.start_s for m in found.modes] == [0, 0]
    assert found.makespan_s == pytest.approx(5 * HOUR)
    assert found.in_time == {"a": 1.0, "b": 1.0}


def test_the_urgent_job_goes_first_where_only_one_fits() -> None:
    jobs = [JobTerms(name="a", deadline_s=11 * HOUR), JobTerms(name="b", deadline_s=6 * HOUR)]
    found = scheduled([option("a", 8, 5), option("b", 8, 5)], jobs, 8)
    assert found is not None
    assert [m.mode.jobs for m in found.modes] == [("b",), ("a",)]
    assert found.ends_s["a"][1] == pytest.approx(10 * HOUR)


def test_a_job_begins_when_its_gpus_are_free_and_not_when_its_slot_does() -> None:
    jobs = [JobTerms(name="a", deadline_s=900 * HOUR), JobTerms(name="b", deadline_s=800 * HOUR)]
    found = scheduled([option("a", 8, 5), option("b", 8, 7)], jobs, 8)
    assert found is not None
    first, second = found.modes
    assert second.start_s > found.ends_s[second.mode.jobs[0]][1]  # a slot is longer than both jobs
    answer = PoolAnswer(
        jobs=tuple(
            PoolJobText(name=j.name, workload=Workload(model="0.5b"), steps=1, deadline=j.deadline_s)
            for j in jobs
        ),
        profile=load_profile("h100"),
        gpus=8,
        options=tuple(o for m in found.modes for o in m.mode.options),
        plan=found,
        confidence=0.8,
        pairs=(),
    )
    plot = schedule_figure(answer, found).plot
    assert plot is not None
    runs = plot["data"][0]
    assert runs["base"] == pytest.approx([0, found.ends_s[first.mode.jobs[0]][1] / DAY], abs=1e-3)
    assert sorted(runs["x"]) == pytest.approx([5 / 24, 7 / 24], abs=1e-3)


def test_the_heavier_job_is_in_time_where_one_must_be_late() -> None:
    jobs = [JobTerms(name="a", deadline_s=6 * HOUR), JobTerms(name="b", deadline_s=6 * HOUR, weight=3)]
    found = scheduled([option("a", 8, 5), option("b", 8, 5)], jobs, 8)
    assert found is not None
    assert found.in_time == {"a": 0.0, "b": 1.0}


def test_a_job_that_fits_on_no_part_of_the_pool_leaves_no_schedule() -> None:
    assert scheduled([option("a", 16, 5)], [JobTerms(name="a", deadline_s=6 * HOUR)], 8) is None


# --- two jobs in turn ---------------------------------------------------------------------------------


def test_two_jobs_that_wait_for_their_rewards_fill_each_others_gaps() -> None:
    # each works 40 of 100 s; a handover there and back costs 2 + 3 + 2 + 3 = 10 s
    shared = sharing(WAITS, WAITS)
    assert (shared.cycle_s, shared.swap_s) == (110, 10)
    assert shared.gain == pytest.approx(200 / 110)


def test_two_jobs_that_always_work_only_pay_for_the_handover() -> None:
    shared = sharing(ALONE, ALONE)
    assert shared.cycle_s == 210
    assert shared.gain < 1


def test_one_generates_while_the_other_trains_where_pools_are_the_same() -> None:
    split = replace(ALONE, pools=((0, 4), (4, 4)), busy_s=(60, 40), any_s=100)
    assert sharing(split, split).cycle_s == 130  # 60 + 60 on the first pool, and 10 s of handovers
    other = replace(split, pools=((0, 2), (2, 6)))
    assert sharing(split, other).cycle_s == 210


def test_jobs_whose_states_do_not_fit_into_host_memory_must_not_share() -> None:
    assert sharing(ALONE, replace(ALONE, host_bytes=1.95e12)).refusal is not None


@pytest.mark.parametrize(("factor", "busy"), [(1.38, 0.714), (1.6, 0.615), (1.84, 0.533), (1.23, 0.803)])
def test_two_jobs_reach_published_factors_where_their_gpus_idle_enough(factor: float, busy: float) -> None:
    """docs/published_behaviour.md: handovers of 2 % of a step; llm-d, PlexRL, RollMux, RLix."""
    job = replace(ALONE, busy_s=(100 * busy,), any_s=100 * busy, out_s=0.5, in_s=0.5)
    assert sharing(job, job).gain == pytest.approx(factor, rel=0.01)


def test_llm_ds_three_jobs_come_out_within_a_fifth() -> None:
    """Their GPUs work at most 70 % of the time alone; 18 min each alone, 39 min published for all three."""
    minute = 60.0
    job = replace(ALONE, step_s=18 * minute, busy_s=(0.7 * 18 * minute,), any_s=0.7 * 18 * minute)
    job = replace(job, out_s=0.005 * 18 * minute, in_s=0.005 * 18 * minute)
    pair = sharing(job, job)
    in_turn = pair.cycle_s + job.step_s
    assert in_turn == pytest.approx(43.6 * minute, rel=0.01)
    assert 3 * job.step_s / in_turn == pytest.approx(54 / 39, rel=0.2)


def test_no_two_jobs_do_the_work_of_three() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        one, other = (
            replace(ALONE, step_s=t, busy_s=(t * share,), any_s=t * share, out_s=0.1, in_s=0.1)
            for t, share in zip(rng.uniform(10, 500, 2), rng.uniform(0, 1, 2), strict=True)
        )
        assert sharing(one, other).gain < 2


def test_a_pair_is_done_when_the_slower_one_is_which_then_runs_alone() -> None:
    # in turn each runs at 100 / 110 of its speed: 5 h take 5.5 h; of the other's 8 h 3 h are left then
    [pair] = [m for m in modes([option("a", 8, 5, shape=WAITS), option("b", 8, 8, shape=WAITS)]) if m.sharing]
    assert [float(e[0]) / HOUR for e in pair.ends_s] == pytest.approx([5.5, 8.5])


def test_a_pair_is_scheduled_where_it_ends_sooner_than_one_after_the_other() -> None:
    jobs = [JobTerms(name=n, deadline_s=6 * HOUR) for n in "ab"]
    found = scheduled([option("a", 8, 5, shape=WAITS), option("b", 8, 5, shape=WAITS)], jobs, 8)
    assert found is not None
    assert [m.mode.jobs for m in found.modes] == [("a", "b")]
    assert found.in_time == {"a": 1.0, "b": 1.0}


def test_intervals_that_overlap_count_once() -> None:
    assert _covered([(0, 2), (1, 4), (6, 7)]) == 5


def test_a_plan_leaves_the_gaps_in_which_no_pool_works(plan: Plan) -> None:
    shape = job_step(plan, parse_cluster(2, "h100"))
    assert 0 < shape.any_s <= shape.step_s
    assert shape.out_s > 0
    assert shape.in_s > 0
    assert 0 < shape.host_bytes < shape.capacity_bytes


# --- which parts of the pool are looked at ------------------------------------------------------------


class Designed:
    """Designs whose steps are given by the number of GPUs, and which were asked for."""

    def __init__(self, plan: Plan, steps_s: dict[int, float]) -> None:
        self.plan, self.steps_s = plan, steps_s
        self.asked: list[int] = []

    def of(self, request: Request) -> DesignResult:
        gpus = request.cluster.gpus
        self.asked.append(gpus)
        step = replace(self.plan.prediction, step_s=self.steps_s[gpus])
        return DesignResult(plan=replace(self.plan, prediction=step))


def tried(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, steps_s: dict[int, float], deadline_h: float
) -> list[int]:
    """Parts of a pool of 64 GPUs on which a job of 100 steps is designed."""

    def option_of(job: PoolJobText, request: Request, plan: Plan, gap: float) -> PoolOption:
        return option(job.name, request.cluster.gpus, plan.prediction.step_s * job.steps / HOUR)

    monkeypatch.setattr("rlhfsim.what_if.shared_pool.answer._option", option_of)
    job = PoolJobText(name="a", workload=plan.workload, steps=100, deadline=deadline_h * HOUR)
    designs = Designed(plan, steps_s)
    with serial():
        priced_options([job, replace(job, name="b")], load_profile("h100-sxm"), 64, designs, 0.8)  # type: ignore[arg-type]
    return sorted(set(designs.asked))


def test_twice_the_gpus_are_not_tried_where_the_last_doubling_saved_little(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_s = {8: 1000.0, 16: 600.0, 32: 580.0, 64: 570.0}
    assert tried(plan, monkeypatch, steps_s, deadline_h=20) == [8, 16, 32]
    assert tried(plan, monkeypatch, steps_s, deadline_h=16) == [8, 16, 32, 64]  # late on 32: 16.1 h


def test_gpus_on_which_arithmetic_alone_misses_the_deadline_are_not_tried(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlhfsim.what_if.shared_pool.answer.floor_seconds",
        lambda request, models: 4000 / request.cluster.gpus,
    )
    steps_s = {8: 900.0, 16: 450.0, 32: 230.0, 64: 120.0}
    assert tried(plan, monkeypatch, steps_s, deadline_h=10) == [16, 32, 64]  # 500 s x 100 is more than 10 h
    assert tried(plan, monkeypatch, steps_s, deadline_h=1) == [8, 16, 32, 64]  # it is late on all of them


def test_a_solver_that_time_ends_says_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    options, jobs = drawn_case(0)
    full = scheduled(options, jobs, 4, slots=10)
    assert full is not None
    assert full.gap < 1e-5

    def ended(*asked: object, options: dict[str, float], **rest: object) -> object:
        found = milp(*asked, options=options, **rest)
        found.mip_gap = 0.25 if options["time_limit"] == 3 else 0.0
        return found

    monkeypatch.setattr("rlhfsim.what_if.shared_pool.schedule.milp", ended)
    short = scheduled(options, jobs, 4, slots=10, limit_s=3)
    assert short is not None
    assert short.gap == 0.25
