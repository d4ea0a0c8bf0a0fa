"""With LoRA the reference is the actor's frozen base: it lies as the actor does, where they share GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.request import Request
from rlhfsim.search.scope import ALONE
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement, model_cut
from rlhfsim.specs.scenario import check_placement
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.what_if.design import design

WORK = Workload(algorithm="dpo", model="32b", prompts=256, lora=Lora())
ASKED = Request(cluster=rlhfsim.parse_cluster(8, "h100"), workload=WORK)


def cuts(placement: Placement) -> list[object]:
    """How actor and reference are cut."""
    both = (placement.actor, placement.role("reference"))
    return [model_cut(role.layout, placement.backend) for role in both if role is not None]


def found(request: Request) -> Placement:
    best = Search(request, models_of(request.workload), scope=ALONE).run().best
    assert best is not None
    return best.placement


def test_a_reference_that_shares_the_actors_gpus_is_cut_as_the_actor_is() -> None:
    placement = found(ASKED)
    assert placement.role("reference") is not None
    assert placement.role("reference").pool == placement.actor.pool
    one, other = cuts(placement)
    assert one == other


def test_a_reference_of_full_training_is_cut_as_suits_it() -> None:
    without = replace(ASKED, workload=replace(WORK, model="8b", lora=None))
    one, other = cuts(found(without))
    assert one != other


def test_where_lora_is_a_choice_prices_of_roles_it_leaves_alone_know_the_rule() -> None:
    asked = replace(ASKED, workload=replace(WORK, lora=None), allow=frozenset({"lora"}))
    chosen = design(asked, explain=False, rivals=False).chosen
    assert chosen is not None
    assert chosen.workload.lora is not None
    one, other = cuts(chosen.placement)
    assert one == other


def test_a_written_plan_that_cuts_the_base_twice_is_refused() -> None:
    placement, models = found(ASKED), models_of(WORK)
    reference = placement.role("reference")
    assert reference is not None
    check_placement(placement, WORK, models, ASKED.cluster)
    other = replace(reference, layout=replace(reference.layout, tp=4, dp=2, zero=0))
    with pytest.raises(RlhfsimError, match="the reference is the actor's frozen base") as error:
        check_placement(replace(placement, reference=other), WORK, models, ASKED.cluster)
    assert error.value.code == "reference-is-the-base"
