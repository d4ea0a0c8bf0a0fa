"""A run whose lengths change: its stretches, the plans that run them, and when it is done."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfsim.cli.long_run import _plans
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.present.answers.long_run import long_run_page
from rlhfsim.present.answers.tree import Listing
from rlhfsim.search.candidates import judged
from rlhfsim.search.parallel import serial
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import requirement
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.long_run.document import (
    EvaluationText,
    LengthPoint,
    LengthStage,
    LongRun,
    RunStretch,
    curve_of,
    read_run,
    stretches,
    workload_at,
)
from rlhfsim.what_if.long_run.outlook import run_odds
from rlhfsim.what_if.long_run.replanning import PlannedStretch, RunPlan, planned_run, shortest
from tests.search.conftest import Case, drawn

SMALL = Workload(algorithm="grpo", model="0.5b", prompts=16, samples=4, reward=Reward(rules=Rules()))
FREE = Coefficient(value=0, low=0, high=0, dimension="s", source="nothing in this test")
QUICK = {"checkpoint": FREE, "restart": FREE, "warm_up": FREE}


def run_of(*points: tuple[int, float], steps: int = 1000, stages: Any = ((0, 8192),), **more: Any) -> LongRun:
    return LongRun(
        steps=steps,
        lengths=tuple(LengthPoint(step=s, mean=m) for s, m in points),
        stages=tuple(LengthStage(start=s, max=m) for s, m in stages),
        **more,
    )


def answered(request: Request, run: LongRun) -> RunPlan:
    with serial():
        return planned_run(request, run, curve_of(run, Source("a test", "", {})))


def question(gpus: int = 2, gpu: str = "h100", **more: Any) -> Request:
    return Request(cluster=parse_cluster(gpus, gpu), workload=replace(SMALL, **more))


# --- the path -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_shortest_path_is_that_of_every_path_written_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.uniform(1, 10, (3, 5))
    costs[rng.random((3, 5)) < 0.15] = np.inf
    change = rng.choice([0.0, 0.5, 3.0])
    every = itertools.product(range(3), repeat=5)
    sums = {
        path: sum(costs[row, k] for k, row in enumerate(path))
        + change * sum(a != b for a, b in itertools.pairwise(path))
        for path in every
    }
    path, total = shortest(costs, change)
    assert total == pytest.approx(min(sums.values()))
    assert sums[tuple(path)] == pytest.approx(total)


def test_a_tie_keeps_the_plan() -> None:
    assert shortest(np.array([[1.0, 2.0, 1.0], [2.0, 2.0, 2.0]]), 0.0)[0] == [0, 0, 0]


def drawn_run(seed: int) -> LongRun:
    rng = random.Random(seed)
    low, high = sorted(rng.sample((512, 1024, 2048, 4096), 2))
    first = rng.uniform(50, 400)
    return run_of(
        (0, first),
        (600, first * rng.choice((1.2, 2.0, 6.0))),
        stages=[(0, low), (rng.randint(100, 500), high)],
        steps=600,
        **(QUICK if rng.random() < 0.5 else {}),
    )


def check_against_single_plans(seed: int) -> bool:
    """Every plan of the small spaces of all stretches runs the whole run; none is faster than the answer."""
    case: Case | None = drawn(seed, least=10, most=60)
    if case is None or case.request.objective != "time" or not case.request.workload.generates:
        return False
    run, request = drawn_run(seed), case.request
    answer = answered(request, run)
    parts = stretches(run, answer.curve)
    asked = [replace(request, workload=workload_at(request.workload, run, s.stage, s.mean)) for s in parts]
    spaces = (replace(case, request=one, models=models_of(one.workload)) for one in asked)
    singles = [
        sum(s.steps * c.seconds for s, c in zip(parts, found, strict=True))
        for placement in {p for space in spaces for _, p in space.written_out() if p is not None}
        if placement.architecture not in request.forbid
        and request.architecture in (None, placement.architecture)
        and all(found := [judged(one, models_of(one.workload), placement) for one in asked])
    ]
    if not answer.stretches:
        assert not singles
        return False
    assert answer.bound_s <= answer.work_s * (1 + 1e-9)
    assert answer.work_s <= min(singles, default=np.inf) * (1 + 1e-9)
    return True


QUESTIONS = [2, 6, 62]


@pytest.mark.parametrize("seed", QUESTIONS)
def test_no_single_plan_of_a_small_space_is_faster_than_the_answer(seed: int) -> None:
    assert check_against_single_plans(seed)


@pytest.mark.long
def test_no_single_plan_is_faster_on_twenty_drawn_runs() -> None:
    seeds = itertools.count(100)
    compared = 0
    while compared < 20:
        compared += check_against_single_plans(next(seeds))


# --- stretches ----------------------------------------------------------------------------------------


def test_a_stage_begins_a_stretch_and_lengths_within_one_differ_by_a_quarter_at_most() -> None:
    run = run_of((0, 1000), (1000, 3000), stages=[(0, 2048), (500, 8192)])
    parts = stretches(run, curve_of(run, Source("a test", "", {})))
    assert 500 in [p.start for p in parts]
    assert [p.end for p in parts[:-1]] == [p.start for p in parts[1:]]
    assert (parts[0].start, parts[-1].end) == (0, 1000)
    for part in parts:
        first, last = (1000 + 2 * step for step in (part.start, part.end))
        assert last / first <= 1.25 * 1.02


def test_a_stretch_has_the_mean_of_its_steps_cut_at_the_limit() -> None:
    run = run_of((0, 1000), (100, 1200), stages=[(0, 1100)], steps=100)
    [part] = stretches(run, curve_of(run, Source("a test", "", {})))
    assert part.mean == pytest.approx(1075, rel=1e-3)  # 50 steps of mean 1,050, 50 at 1,100


def test_a_jump_between_two_stages_is_cut_there_and_nowhere_else() -> None:
    run = run_of((0, 300), (799, 300), (800, 3000), stages=[(0, 1024), (800, 8192)])
    parts = stretches(run, curve_of(run, Source("a test", "", {})))
    assert [(p.start, p.end, round(p.mean)) for p in parts] == [(0, 800, 300), (800, 1000, 3000)]


def test_the_lengths_of_a_stage_have_the_mean_of_the_curve_after_the_cut() -> None:
    run = run_of((0, 1000), stages=[(0, 2048)])
    lengths = workload_at(SMALL, run, run.stages[0], 1000).response_len
    assert stats(lengths).mean == pytest.approx(1000, rel=0.01)
    assert lengths.maximum == 2048


def test_a_stage_may_change_the_batch() -> None:
    stage = LengthStage(start=0, max=1024, prompts=8, samples=16)
    assert workload_at(SMALL, run_of((0, 500)), stage, 500).num_sequences == 128


# --- the answer ---------------------------------------------------------------------------------------


def test_a_run_of_equal_steps_is_one_plan_that_takes_the_steps_and_the_evaluations() -> None:
    run = run_of((0, 500), stages=[(0, 2048)], evaluation=EvaluationText(every=100, takes=60))
    answer = answered(question(), run)
    [part] = answer.stretches
    assert answer.changes == ()
    assert answer.work_s == pytest.approx(
        1000 * part.plan.prediction.step_s + 10 * 60
    )  # 1,000 / 100 evaluations
    assert answer.fixed_s == pytest.approx(answer.work_s)
    assert answer.bound_s == pytest.approx(answer.work_s)


def test_an_evaluation_of_prompts_takes_their_generation() -> None:
    def each(**more: Any) -> float:
        run = run_of((0, 500), stages=[(0, 2048)], evaluation=EvaluationText(every=100, **more))
        return answered(question(), run).stretches[0].evaluation_s

    few, many = each(prompts=16), each(prompts=4096)
    assert 0 < few < many


def test_the_plan_of_the_start_runs_out_of_memory_where_a_later_limit_begins() -> None:
    request = question(gpu="l4")
    run = run_of((0, 300), steps=100, stages=[(0, 1024), (60, 8192)])
    answer = answered(request, run)
    [short] = answered(request, run_of((0, 300), steps=60, stages=[(0, 1024)])).stretches
    first, (early, late) = short.plan.placement, run.stages
    early, late = (workload_at(request.workload, run, stage, 300) for stage in (early, late))
    assert judged(replace(request, workload=early), models_of(early), first) is not None
    assert judged(replace(request, workload=late), models_of(late), first) is None
    assert answer.out_of_memory == 60
    assert first not in [p.plan.placement for p in answer.stretches]  # the last stage decides what fits


def test_what_fits_at_no_stage_is_said_with_its_stage() -> None:
    answer = answered(question(gpus=1, gpu="l4", model="7b"), run_of((0, 500), stages=[(0, 2048)]))
    assert answer.stretches == ()
    assert answer.unfit is not None
    assert answer.unfit.start == 0


def test_a_wider_range_of_lengths_makes_the_end_less_sure() -> None:
    def width(low: float | None, high: float | None) -> float:
        point = LengthPoint(step=0, mean=500, low=low, high=high)
        run = replace(run_of((0, 500), stages=[(0, 4096)]), lengths=(point,))
        chosen, _ = run_odds(answered(question(), run), (), 0.8)
        assert chosen.run_s is not None
        return chosen.run_s[2] / chosen.run_s[0]

    assert width(250, 1000) > 1.1 * width(None, None)


def test_targets_of_the_run_have_probabilities_that_fall_with_less_time() -> None:
    answer = answered(question(), run_of((0, 500), stages=[(0, 2048)]))
    days = answer.work_s / 86400

    def kept(share: float) -> float:
        chosen, _ = run_odds(answer, [requirement(f"time_of_run<{days * share}d")], 0.8)
        assert chosen.verdicts[0].probability is not None
        return chosen.verdicts[0].probability

    assert kept(0.5) < kept(1.1) < kept(2.0)


# --- files --------------------------------------------------------------------------------------------

TEXT = "steps: 100\nstages: [{max: 4k}]\n"


def test_a_curve_is_read_from_the_log_next_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{TEXT}curve: log.csv\n")
    (tmp_path / "log.csv").write_text("step,tokens\n0,500\n50,700\n100,900\n")
    _, curve = read_run(tmp_path / "run.yaml")
    assert curve.at(np.array([25.0, 200.0])).tolist() == [600.0, 900.0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (TEXT, "lengths-or-curve"),
        (f"{TEXT}curve: none.csv\n", "unreadable-file"),
        (f"{TEXT}lengths: [{{step: 5, mean: 1k}}, {{step: 5, mean: 2k}}]\n", "steps-not-ascending"),
        (f"{TEXT}lengths: [{{step: 0, mean: 1k, low: 2k}}]\n", "interval-without-value"),
        ("steps: 100\nstages: [{start: 5, max: 4k}]\n", "no-first-stage"),
        ("steps: 100\nstages: [{max: 4k}, {start: 100, max: 8k}]\n", "stage-after-end"),
        (f"{TEXT}lengths: [{{step: 0, mean: 1k}}]\nevaluation: {{every: 5}}\n", "takes-or-prompts"),
        (f"{TEXT}lenghts: []\n", "unknown-key"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(text: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(RlhfsimError) as error:
        read_run(path)
    assert error.value.code == code
    assert error.value.place is not None


def test_switches_that_change_what_is_learnt_cannot_come_and_go() -> None:
    with pytest.raises(RlhfsimError, match="lora"):
        answered(replace(question(), allow=frozenset({"lora"})), run_of((0, 500)))


# --- two plans, planted ---------------------------------------------------------------------------------


@pytest.fixture
def two_plans(plan: Plan) -> RunPlan:
    """One plan for 500 steps of 10 s, another one for 500 of 20 s; alone the second takes 12 and 20 s."""
    run = run_of((0, 300), stages=[(0, 1024), (500, 4096)])
    parts = [
        RunStretch(start=s.start, end=s.start + 500, stage=s, mean=300, low=300, high=300) for s in run.stages
    ]
    moved = replace(plan.placement, actor=replace(plan.placement.actor, residency="offloaded"))

    def at(i: int, step_s: float, placement: Placement) -> PlannedStretch:
        prediction = replace(plan.prediction, step_s=step_s, low_s=0.9 * step_s, high_s=1.2 * step_s)
        planned = replace(plan, prediction=prediction, placement=placement)
        return PlannedStretch(
            stretch=parts[i], plan=planned, low_s=step_s, high_s=step_s, evaluations=0, evaluation_s=0
        )

    return RunPlan(
        request=question(),
        run=run,
        curve=curve_of(run, Source("a test", "", {})),
        stretches=(at(0, 10, plan.placement), at(1, 20, moved)),
        fixed=(at(0, 12, moved), at(1, 20, moved)),
        bound_s=15_000,
        out_of_memory=500,
    )


def test_a_change_of_plan_costs_checkpoint_restart_and_warm_up(two_plans: RunPlan) -> None:
    assert two_plans.changes == (500,)
    assert two_plans.run.replan_s == 60 + 600 + 180
    assert two_plans.work_s == 500 * 10 + 500 * 20 + 840
    assert two_plans.fixed_s == 500 * 12 + 500 * 20
    assert two_plans.gap == pytest.approx(840 / 15_840)


def test_the_page_names_both_plans_the_change_and_what_a_single_one_takes(two_plans: RunPlan) -> None:
    chosen, fixed = run_odds(two_plans, [requirement("time_of_run<1d")], 0.8)
    page = long_run_page(two_plans, chosen, fixed)
    assert page.verdict.startswith("2 plans run one after the other")
    said = " ".join(
        item for s in page.sections for b in s.blocks if isinstance(b, Listing) for item in b.items
    )
    assert "steps 0 to 500" in said
    assert "steps 500 to 1,000" in said
    assert "2 min 40 s longer" in said  # 16,000 - 15,840 s
    assert "runs out of memory from step 500 on" in said
    assert [plan_at for plan_at, _ in _plans(two_plans, Path("plan.json"))] == [
        Path("plan.json"),
        Path("plan-500.json"),
    ]


def test_a_run_that_fits_nowhere_has_a_page_that_says_where(two_plans: RunPlan) -> None:
    answer = replace(
        two_plans, stretches=(), fixed=(), unfit=two_plans.stretches[1].stretch, shortage="too much"
    )
    page = long_run_page(answer, None, None)
    assert page.mark == "bad"
    assert "from step 500 on" in page.verdict
    assert "too much" in page.verdict
