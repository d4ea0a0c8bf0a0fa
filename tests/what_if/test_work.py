"""Points that do other work never compete: they are compared by the sample or by the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_scenarios import small

from rlhfsim.plan import Plan
from rlhfsim.present.figures.whatif import finding
from rlhfsim.present.words import signed
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.what_if.differences import Side, diff, predicted
from rlhfsim.what_if.scenarios.against_base import comes_out
from rlhfsim.what_if.scenarios.answer import whatif
from rlhfsim.what_if.scenarios.designs import Designs, Runner
from rlhfsim.what_if.work import work_of


def test_work_is_what_is_learnt_and_not_how_it_is_computed(plan: Plan) -> None:
    work, w = work_of(plan), plan.workload
    alike = replace(
        w, seed=7, rollout_precision="fp8", kv_precision="fp8", optimizer="adam8bit", old_logprobs="rollout"
    )
    assert work.same(work_of(replace(plan, workload=alike)))
    for field, value in {"samples": 4, "epochs": 2, "response_len": Fixed(value=9)}.items():
        assert work.unlike(work_of(replace(plan, workload=replace(w, **{field: value})))) == (field,)
    assert work.unlike(work_of(replace(plan, workload=replace(w, lora=Lora())))) == ("adapters",)
    named = replace(plan, models=tuple(replace(m, name="m", shape_hash="h") for m in plan.models))
    assert work.unlike(work_of(named)) == ("model", "reference")
    shaped = replace(plan, models=tuple(replace(m, shape_hash="h") for m in plan.models))
    assert work.unlike(work_of(shaped)) == ("shapes",)


def test_runs_compete_when_they_are_as_long_or_end_at_one_target(plan: Plan) -> None:
    fewer = replace(plan, workload=replace(plan.workload, prompts=8))
    assert work_of(plan, steps=100).same(work_of(plan, steps=100))
    assert work_of(plan, steps=100).unlike(work_of(plan, steps=50)) == ("steps",)
    assert work_of(plan, steps=100, target=0.7).same(work_of(fewer, steps=300, target=0.7))
    assert work_of(plan, steps=100, target=0.7).unlike(work_of(plan, steps=100, target=0.8)) == ("target",)


def test_other_work_is_compared_by_the_sample_and_by_the_token_where_lengths_differ(plan: Plan) -> None:
    """Half the samples in 63 % of the time: each takes 26 % more. Twice the tokens: half a sample's each."""
    work, w = work_of(plan), plan.workload
    half = work_of(replace(plan, workload=replace(w, prompts=w.prompts // 2)))
    assert half.by(work) == "sample"
    assert half.change(63, work, 100) == pytest.approx(0.26)
    assert work.change(63, work, 100) == pytest.approx(-0.37)
    assert work_of(plan, steps=50).change(63, work_of(plan, steps=100), 100) == pytest.approx(0.26)
    longer = work_of(replace(plan, workload=replace(w, response_len=Fixed(value=1024 + 2048))))
    assert longer.by(work) == "token"
    assert longer.change(200, work, 100) == pytest.approx(0.0)


def test_a_point_with_half_the_data_is_no_rival_of_the_base(
    planted: Callable[[Callable[[Request], float | None]], Runner],
) -> None:
    """A quarter of the prompts in half the time and for half the money is twice as slow per sample."""
    points = [{"name": "less", "set": {"workload.prompts": 2}}]
    tornado = {"vary": {"workload.samples": [1, 4]}}
    even = {
        "vary": "cluster.node_groups.0.price",
        "between": ["1 USD/h", "8 USD/h"],
        "of": "cost_of_run",
        "point": "less",
        "against": "base",
    }
    scenario = small(points=points, tornado=tornado, break_even=[even])
    base = scenario["base"]["workload"]["prompts"]
    found = whatif(scenario, Designs(planted(lambda r: 1.0 + (r.workload.prompts == base))))
    less, bar = found.points[0], found.tornado[0]
    assert less.other_work == ("prompts",)
    assert [p.on_front for p in found.everything] == [False, False]
    assert bar.other_work == ("samples",)
    assert found.break_evens[0].outcome.endswith("not the same work")
    told = finding(found)
    assert told == (
        f"Other work than base, so no rival of it: less {signed(0.5 / (2 / base) - 1)} time, "
        f"{signed(0.5 / (2 / base) - 1)} cost per sample"
    )
    moved = {m.name: m.relative for m in comes_out(found.base, less)}
    assert moved["time of the run, per sample"] == pytest.approx(0.5 / (2 / base) - 1)


def test_a_diff_of_other_work_compares_samples(plan: Plan) -> None:
    w = replace(plan.workload, prompts=plan.workload.prompts // 2)
    half = replace(
        plan, workload=w, prediction=replace(plan.prediction, step_s=0.63 * plan.prediction.step_s)
    )
    sides = [Side(title="t", plan=p, outcome=predicted(p), measured=False) for p in (plan, half)]
    changed = diff(*sides)
    assert changed.other_work == ("prompts",)
    each = next(m for m in changed.outcome if m.name == "step, per sample")
    assert each.relative == pytest.approx(0.26)
    assert not diff(sides[0], sides[0]).other_work
