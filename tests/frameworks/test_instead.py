"""Rows that say what a framework runs in place of a field that it has no key for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.areal.unsaid import rows as areal
from rlhfsim.interchange.fields import PlanFields
from rlhfsim.interchange.instead import Instead, instead
from rlhfsim.interchange.nearest import with_placement, with_workload
from rlhfsim.interchange.nemo_rl.unsaid import rows as nemo_rl
from rlhfsim.interchange.openrlhf.export import rows as openrlhf
from rlhfsim.interchange.skyrl.unsaid import rows as skyrl
from rlhfsim.interchange.slime.export import rows as slime
from rlhfsim.interchange.trl.export import rows as trl
from rlhfsim.interchange.verl.export import rows as verl
from rlhfsim.plan import Plan
from tests.frameworks.drawn import drawn_plans

FRAMEWORKS = {
    "areal": areal,
    "nemo-rl": nemo_rl,
    "openrlhf": openrlhf,
    "skyrl": skyrl,
    "slime": slime,
    "trl": trl,
    "verl": verl,
}
DRAWS = 12


def spoiled(plan: Plan) -> Plan:
    """A plan whose rollout, actor and workload ask for what few frameworks say."""
    placement, rollout = plan.placement, plan.placement.rollout
    assert rollout is not None
    with suppress(RlhfsimError):
        plan = with_workload(plan, packing=not plan.workload.packing, gradients="fp32")
    layout = replace(rollout.layout, max_num_seqs=777, max_batched_tokens=9999)
    schedule = replace(placement.schedule, partial_rollout=False)
    plan = with_placement(plan, rollout=replace(rollout, sleep=1, layout=layout), schedule=schedule)
    with suppress(RlhfsimError):
        plan = with_placement(plan, actor=replace(placement.actor, offload_between=True))
    return plan


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_row_is_silent_of_the_plan_that_it_names_as_the_nearest(name: str) -> None:
    said = 0
    for plan in drawn_plans(name, DRAWS):
        for row in FRAMEWORKS[name]():
            for unsaid in instead(spoiled(plan), row):
                said += 1
                assert unsaid.of or row.carried
                assert (unsaid.nearest is None) == (not row.priced)
                assert unsaid.nearest is None or list(instead(unsaid.nearest, row)) == []
    assert said


def test_a_row_names_both_values_the_path_and_the_plan_that_is_run() -> None:
    plan = spoiled(next(drawn_plans("slime", 1)))
    (unsaid,) = instead(plan, Instead("rollout.max_num_seqs", 256, "{} sequences", "{} of them"))
    assert (unsaid.what, unsaid.instead) == ("777 sequences", "256 of them")
    assert unsaid.of == ("rollout.layout.max_num_seqs",)
    assert unsaid.nearest is not None
    assert PlanFields(unsaid.nearest, {})["rollout.max_num_seqs"] == 256
    assert list(instead(plan, Instead("rollout.max_num_seqs", 777, "", ""))) == []
    assert list(instead(plan, Instead("rollout.max_num_seqs", 256, "", "", "!rollout"))) == []


def test_a_value_of_several_roles_is_changed_in_all_that_are_placed() -> None:
    plan = next(p for p in drawn_plans("skyrl", 40) if differs(p))
    row = Instead("actor.recompute", "full", "", "", roles=("reference", "critic"))
    (unsaid,) = instead(plan, row)
    assert unsaid.nearest is not None
    roles = unsaid.nearest.placement
    assert roles.role("reference") is not None
    assert (roles.actor.layout.recompute, roles.role("reference").layout.recompute) == ("full", "full")


def differs(plan: Plan) -> bool:
    """Whether a plan has a reference, and does not recompute everything in training."""
    return plan.placement.role("reference") is not None and plan.placement.actor.layout.recompute != "full"
