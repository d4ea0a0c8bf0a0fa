"""Points that do other work never compete: they are compared by the sample or by the token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.plan import Plan
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora
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
