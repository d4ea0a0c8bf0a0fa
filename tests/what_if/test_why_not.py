"""Another choice: its best plan is the one that a search with that choice finds, and the terms add up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import rlhfsim
from rlhfsim.plan import Plan
from rlhfsim.search.explain import shares, terms
from rlhfsim.search.request import Limit, Request
from rlhfsim.specs.placement.placement import Placement, RolloutPlacement
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import Design, design
from rlhfsim.what_if.engine import Question
from rlhfsim.what_if.why_not import Alternative, WhyNot, alternative, named_plan

GRPO = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=64, samples=4, reward=Reward(rules=Rules()))
SMALL = Request(cluster=rlhfsim.parse_cluster(4, "h100"), workload=GRPO)
PAIR = replace(SMALL, cluster=rlhfsim.parse_cluster(2, "h100"))
FULL = Request(
    cluster=rlhfsim.parse_cluster(2, "h100"), workload=replace(GRPO, model="llama-3.1-8b", prompts=16)
)


def limit(role: str, field: str, value: int | str, relation: str = "=") -> Limit:
    return Limit(role=role, field=field, relation=relation, value=value)  # type: ignore[arg-type]


@cache
def asked(*names: str) -> Design:
    return design(PAIR, explain=False, instead=[alternative(PAIR, n, n) for n in names])


def only(request: Request, instead: Alternative) -> WhyNot:
    return design(request, explain=False, instead=[instead]).whynots[0]


def best(answer: Design) -> Plan:
    assert answer.best is not None
    return answer.best


@pytest.mark.parametrize("name", ["naive", "disaggregated", "async", "disk", "fsdp2", "lora"])
def test_its_best_plan_is_what_a_search_with_the_choice_finds(name: str) -> None:
    question = alternative(PAIR, name, name)
    found = only(PAIR, question)
    alone = best(design(question.question.request, explain=False, rivals=False, simplest_s=None))
    assert found.plan is not None
    assert found.plan.prediction.step_s == pytest.approx(alone.prediction.step_s, rel=1e-6)
    assert found.certificate.proven


def test_a_choice_that_the_request_forbids_is_compared_all_the_same() -> None:
    request = replace(SMALL, forbid=frozenset({"disaggregated"}))
    found = only(request, alternative(request, "disaggregated", "disaggregated"))
    assert found.plan is not None
    assert found.plan.architecture == "disaggregated"


def test_the_chosen_plan_is_recognised_and_no_alternative_is_faster() -> None:
    answer = asked("hybrid", "naive", "disaggregated", "disk", "no-offload")
    fastest = best(answer).prediction.step_s
    same = [w for w in answer.whynots if w.same]
    assert len(same) >= 1
    for other in answer.whynots:
        assert other.plan is not None
        assert other.plan.prediction.step_s >= fastest * (1 - 1e-9)


def test_the_terms_add_up_to_the_difference_and_shares_to_the_step() -> None:
    answer = asked("naive", "disaggregated", "async", "streaming")
    for other in answer.whynots:
        assert other.plan is not None
        gap = other.plan.prediction.step_s - best(answer).prediction.step_s
        assert sum(t.more for t in other.terms) == pytest.approx(gap, abs=1e-6)
        assert sum(shares(other.plan).values()) == pytest.approx(other.plan.prediction.step_s)
    assert terms(best(answer), best(answer))[0].more == 0


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        ("actor", "tp", 2),
        ("rollout", "tp", 4),
        ("actor", "zero", 2),
        ("rollout", "sleep", 2),
        ("actor", "micro_batch", 4),
    ],
)
def test_a_field_of_a_role_is_kept(role: str, field: str, value: int) -> None:
    found = only(SMALL, alternative(SMALL, f"{role}.{field}={value}", limit(role, field, value)))
    assert found.plan is not None
    where = found.plan.placement.roles[role]
    holder = where if hasattr(where, field) else where.layout
    assert getattr(holder, field) == value


def test_a_field_that_is_fixed_is_freed_where_another_value_is_asked_about() -> None:
    request = replace(SMALL, fix={"rollout": {"tp": 2}})
    found = only(request, alternative(request, "rollout.tp=4", limit("rollout", "tp", 4)))
    assert found.plan is not None
    assert isinstance(found.plan.placement.rollout, RolloutPlacement)
    assert found.plan.placement.rollout.layout.tp == 4


def test_where_nothing_fits_the_byte_that_is_in_the_way_is_named() -> None:
    found = only(FULL, alternative(FULL, "no-offload", "no-offload"))
    assert found.plan is None
    assert found.missing is not None
    peak, entry = found.missing.peak, found.missing.peak_entry
    assert peak.bytes > peak.capacity
    assert entry.bytes <= peak.bytes
    assert entry.role in ("actor", "rollout", "reference")
    assert found.reason is not None
    assert peak.name in found.reason


def test_a_choice_that_no_plan_has_says_which_rule_it_breaks() -> None:
    wide = only(SMALL, alternative(SMALL, "actor.tp>=8", limit("actor", "tp", 8, ">=")))
    assert wide.plan is None
    assert "no layout of the actor" in str(wide.reason)
    odd = only(SMALL, alternative(SMALL, "actor.tp=4", limit("actor", "tp", 4)))
    assert odd.plan is None
    assert "heads" in str(odd.reason)


def test_a_plan_named_in_part_is_completed_and_its_exclusion_told() -> None:
    limits = [limit("actor", "zero", 2), limit("rollout", "tp", 2)]
    found = only(SMALL, named_plan(SMALL, "it", ["hybrid"], limits))
    assert found.plan is not None
    assert found.plan.architecture == "hybrid"
    assert found.plan.placement.actor.layout.zero == 2
    assert found.plan.placement.rollout is not None
    assert found.plan.placement.rollout.layout.tp == 2
    assert found.exclusion is not None
    assert found.exclusion.kind in ("dominated", "bounded", "slower")


def test_of_several_roles_the_one_that_has_no_layout_is_named() -> None:
    limits = [limit("rollout", "tp", 2), limit("actor", "tp", 4)]
    found = only(SMALL, named_plan(SMALL, "it", [], limits))
    assert found.plan is None
    assert found.exclusion is not None
    assert found.exclusion.kind == "refused"
    assert "heads" in found.exclusion.text
    assert found.exclusion.text in str(found.reason)


def test_a_complete_plan_is_judged_as_it_is() -> None:
    fastest = best(design(SMALL, explain=False, rivals=False, simplest_s=None)).placement
    actor = replace(fastest.actor, layout=replace(fastest.actor.layout, recompute="full"))
    slow = replace(fastest, actor=actor)
    same, other = design(SMALL, explain=False, instead=[given(fastest), given(slow)]).whynots
    assert same.same
    assert same.exclusion is not None
    assert same.exclusion.kind == "chosen"
    assert other.plan is not None
    assert other.plan.placement == slow
    assert other.exclusion is not None
    assert other.exclusion.kind in ("dominated", "bounded", "slower")
    assert (same.certificate.space, other.certificate.space) == (1, 1)


def test_a_complete_plan_that_does_not_fit_names_the_byte() -> None:
    roomy = replace(FULL, cluster=rlhfsim.parse_cluster(2, "b200"), forbid=frozenset({"offload"}))
    found = only(
        FULL, given(best(design(roomy, explain=False, rivals=False, simplest_s=None)).placement, FULL)
    )
    assert found.plan is None
    assert found.exclusion is not None
    assert found.exclusion.kind == "does_not_fit"
    assert found.missing is not None
    assert found.missing.peak.bytes > found.missing.peak.capacity


def given(placement: Placement, request: Request = SMALL) -> Alternative:
    """A complete plan as what is asked about."""
    return Alternative(text="it", question=Question(request=request, placement=placement), exact=True)
