"""The simplest plan close to the best: within 3 % and safe where there is such a plan, simple where it costs little."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest

import rlhfsim
from rlhfsim.search.candidates import Candidate, judged, value
from rlhfsim.search.complexity import complexity
from rlhfsim.search.options import Wish
from rlhfsim.search.pareto import SAFE
from rlhfsim.search.request import Objective, Request
from rlhfsim.search.scope import Scope
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if import simplest as module
from rlhfsim.what_if.design import Design, design
from rlhfsim.what_if.engine import Prices, Question, answer
from rlhfsim.what_if.simplest import BF16_SUMS, CLOSE, bf16_sums, simplest

OBJECTIVES = get_args(Objective)
WORK = Workload(model="llama-2-7b", prompts=384)
REQUEST = Request(cluster=rlhfsim.parse_cluster(8, "h100"), workload=WORK)
PRECISE = replace(REQUEST, workload=replace(WORK, mini_batches=8))
"""Its updates have too few micro-batches for their sum to matter."""


def asked(request: Request) -> tuple[Candidate, Prices]:
    result = answer(Question(request=request))
    assert result.best is not None
    return result.best, Prices(request=request, pricer=result.pricer)


@cache
def shared(precise: bool) -> tuple[Candidate, Prices]:
    return asked(PRECISE if precise else REQUEST)


def answered(request: Request) -> tuple[Candidate, Prices]:
    """Searched once where several tests ask."""
    return shared(request is PRECISE) if request in (PRECISE, REQUEST) else asked(request)


def recommended(request: Request, at_most: float = float("inf")) -> Candidate:
    best, prices = answered(request)
    return simplest(best, prices, at_most=at_most)[0]


@cache
def designed() -> Design:
    return design(REQUEST)


def risk(candidate: Candidate) -> float:
    return candidate.ledger.probability_out_of_memory


def test_it_is_close_safe_and_simpler() -> None:
    best, _ = answered(REQUEST)
    plan = recommended(REQUEST)
    assert any(role.layout.pp > 1 for role in best.placement.roles.values())
    assert not any(role.layout.pp > 1 for role in plan.placement.roles.values())
    assert complexity(plan.placement) < complexity(best.placement)
    assert best.seconds < plan.seconds <= best.seconds * (1 + CLOSE)
    assert risk(plan) <= SAFE
    again = judged(REQUEST, models_of(WORK), plan.placement)
    assert again is not None
    assert again.seconds == pytest.approx(plan.seconds)


def test_no_plan_as_simple_is_faster() -> None:
    """The roles of the recommended plan with every other micro-batch and recomputation."""
    plan = recommended(REQUEST)
    for actor, critic, recompute in product((1, 2, 4), (1, 2, 4), ("none", "full")):
        roles = {
            name: replace(role, layout=replace(role.layout, micro_batch=micro, recompute=recompute))
            for name, micro in (("actor", actor), ("critic", critic))
            for role in [plan.placement.role(name)]
        }
        other = judged(REQUEST, models_of(WORK), replace(plan.placement, **roles))
        assert other is None or risk(other) > SAFE or other.seconds >= plan.seconds * (1 - 1e-9)


def test_what_the_question_fixes_stays_however_complex_it_is() -> None:
    piped = replace(REQUEST, fix={"critic": {"pp": 4}})
    plan = recommended(piped)
    assert plan.placement.role("critic") is not None
    assert plan.placement.role("critic").layout.pp == 4


def test_targets_leave_less_room() -> None:
    best, _ = answered(PRECISE)
    free = recommended(PRECISE)
    limit = (best.seconds + free.seconds) / 2
    assert recommended(PRECISE, limit).seconds <= limit
    assert recommended(PRECISE, best.seconds / 2).seconds <= best.seconds * (1 + 1e-9)


def test_where_no_close_plan_is_safe_one_of_less_risk_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    best, _ = answered(PRECISE)
    monkeypatch.setattr(module, "RISKS", (1e-300, 0.02, 0.05))
    monkeypatch.setattr(module, "CLOSE", 0.0)
    assert risk(recommended(PRECISE)) == risk(best) <= PRECISE.max_oom
    tight = replace(PRECISE, max_oom=0.005)
    assert risk(recommended(tight)) <= 0.005


def test_less_risk_is_asked_of_the_same_prices_with_the_same_answer() -> None:
    _, prices = answered(REQUEST)
    safe = replace(REQUEST, max_oom=SAFE)
    kept, fresh = answer(Question(request=safe), prices).best, answer(Question(request=safe)).best
    assert kept is not None
    assert fresh is not None
    assert kept.seconds == pytest.approx(fresh.seconds, rel=1e-9)


def test_options_that_may_not_compete_are_not_in_the_answer() -> None:
    best, prices = answered(REQUEST)
    stage = 1 if best.placement.actor.layout.zero == 3 else 3
    wish = Wish(roles=frozenset({"actor"}), holds=lambda role: role.layout.zero == stage)
    barred = Question(request=REQUEST, scope=Scope(wishes=(wish,)))
    found = answer(barred, prices)
    assert found.best is not None
    assert found.best.placement.actor.layout.zero == stage
    assert found.certificate.space == answer(Question(request=REQUEST), prices).certificate.space


# --- in the answer of design -------------------------------------------------------------------------


def test_the_certificate_and_comparisons_are_those_of_the_best_plan() -> None:
    plain = design(REQUEST, simplest_s=None)
    answer_ = designed()
    assert answer_.simpler
    assert not plain.simpler
    assert answer_.best == plain.best == plain.chosen
    for field in ("runners_up", "certificate", "confidence", "break_evens"):
        assert getattr(answer_, field) == getattr(plain, field)


def test_the_plan_that_is_written_says_what_the_best_one_saves() -> None:
    answer_ = designed()
    assert answer_.told is not None
    assert answer_.best is not None
    choice = answer_.told.choice
    assert choice is not None
    assert choice.best is not None
    assert choice.best.step_s == answer_.best.prediction.step_s < answer_.told.prediction.step_s
    [sentence] = [reason for reason in choice.reasons if reason.startswith("the fastest plan takes")]
    assert "for the critic" in sentence
    assert "risk of running out of memory" in sentence


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_recommends_the_simplest_plan_and_says_what_its_best_buys(objective: Any) -> None:
    small = Workload(
        model="qwen2.5-0.5b", algorithm="grpo", prompts=32, samples=4, reward=Reward(rules=Rules())
    )
    request = Request(cluster=rlhfsim.parse_cluster(4, "h100"), workload=small, objective=objective)
    best, prices = asked(request)
    plan, _ = simplest(best, prices)
    assert value(request, best) <= value(request, plan) <= value(request, best) * (1 + CLOSE)
    assert complexity(plan.placement) <= complexity(best.placement)
    if objective == "memory":
        assert complexity(plan.placement) < complexity(best.placement)
        answer_ = design(request)
        assert answer_.chosen is not None
        assert answer_.chosen.placement == plan.placement
        assert any(reason.startswith("the leanest plan holds") for reason in answer_.reasons)


def test_least_memory_is_proven_in_seconds() -> None:
    """Plans of equal bytes are many: one that only equals the best is not opened."""
    result = answer(Question(request=replace(REQUEST, objective="memory", time_limit=60)))
    assert result.certificate.proven


def test_a_search_that_a_time_limit_ended_recommends_its_best() -> None:
    stopped = design(replace(REQUEST, time_limit=1e-9), explain=False)
    assert not stopped.certificate.proven
    assert not stopped.simpler


# --- gradients that are summed in BF16 ----------------------------------------------------------------


def test_a_plan_that_sums_many_gradients_in_bf16_is_not_recommended() -> None:
    batch = Workload(model="llama-2-7b", prompts=2048)
    request = Request(cluster=rlhfsim.parse_cluster(8, "h100"), workload=batch)
    answer = rlhfsim.design(request)
    assert answer.chosen is not None
    assert answer.best is not None
    many, few = (
        max(
            bf16_sums(replace(request, workload=plan.workload), name, role)
            for name, role in plan.placement.roles.items()
        )
        for plan in (answer.best, answer.chosen)
    )
    assert many > BF16_SUMS[0] >= few
    assert answer.chosen.workload.gradients == "fp32"
    assert answer.chosen.prediction.step_s < 1.05 * answer.best.prediction.step_s
    assert answer.chosen.prediction.probability_out_of_memory <= SAFE
    assert any("in BF16" in reason for reason in answer.reasons)


def test_a_target_that_only_the_fastest_meets_is_met() -> None:
    best, prices = answered(REQUEST)
    assert simplest(best, prices, at_most=best.seconds)[0].seconds <= best.seconds


def test_fsdp2_sums_in_fp32_and_cpus_train_in_fp32() -> None:
    role = RolePlacement(pool="all", layout=Layout(dp=8, zero=3))
    asked = Request(cluster=rlhfsim.parse_cluster(8, "h100"), workload=Workload(model="llama-2-7b"))
    assert bf16_sums(asked, "actor", role) == 128
    assert bf16_sums(asked, "reference", role) == 1
    assert bf16_sums(replace(asked, backend="fsdp2"), "actor", role) == 1
    assert bf16_sums(replace(asked, cluster=rlhfsim.parse_cluster(8, "cpu-core")), "actor", role) == 1


def test_deepspeed_sums_in_the_precision_of_the_weights() -> None:
    source = inspect.getsource(pytest.importorskip("deepspeed.runtime.engine").DeepSpeedEngine.get_data_types)
    assert "grad_accum_dtype = model_dtype" in source
