"""Roles are one table, and a placement maps them to where they are: in files each is a key."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhfsim.errors import RlhfsimError
from rlhfsim.provenance import content_hash
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.roles import (
    BY_NAME,
    ENDS,
    FROZEN,
    GENERATING,
    MODELS,
    PLACED,
    ROLES,
    TRAINED,
    ByRole,
)
from rlhfsim.specs.workload.workload import Algorithm, Workload

POOLS = (ResourcePool(name="all", gpus=2),)
ROLE = RolePlacement(pool="all", layout=Layout(dp=2))
ENGINE = RolloutPlacement(pool="all", layout=RolloutLayout(dp=2))
PLACEMENT = Placement(pools=POOLS, actor=ROLE, rollout=ENGINE, reference=ROLE, weight_path="ipc")
FILE = """
pools: [{name: all, gpus: 2}]
actor: {pool: all, layout: {dp: 2}}
rollout: {pool: all, layout: {dp: 2}}
reference: {pool: all, layout: {dp: 2}}
weight_path: ipc
"""
KEYS = (
    *("pools", "actor", "rollout", "critic", "reference", "reward"),
    *("weight_path", "schedule", "backend", "software"),
)
"""Of every plan.json since schema 1, in order."""


def read(text: str) -> Placement:
    return convert(Placement, parse_yaml(text, "plan.yaml"))


def test_every_list_of_roles_has_all_of_its_kind_once() -> None:
    assert sorted(ROLES) == sorted(PLACED) == sorted(BY_NAME)
    assert sorted((*TRAINED, *FROZEN)) == sorted(MODELS)
    assert set(MODELS).isdisjoint(GENERATING)
    assert ENDS == ("actor", "rollout"), "weights go from where the policy is trained to where it generates"


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dpo", "sft", "reward_model", "distillation"])
def test_a_step_calls_the_roles_that_have_a_model_and_no_others(algorithm: Algorithm) -> None:
    work = Workload(algorithm=algorithm)
    called = {call.role for call in dataflow(work)} - {"rules"}
    assert called == set(models_of(work).roles)
    assert {call.role for call in dataflow(work) if call.kind == "train"} <= set(TRAINED)


def test_files_with_a_key_for_each_role_are_read_into_the_mapping() -> None:
    assert read(FILE) == PLACEMENT
    assert list(PLACEMENT.roles) == ["rollout", "actor", "reference"]


def test_a_placement_is_written_with_the_keys_that_it_is_read_from() -> None:
    written: dict[str, Any] = TypeAdapter(Placement).dump_python(PLACEMENT, mode="json")
    assert tuple(written) == KEYS
    assert written["critic"] is None
    assert read(json.dumps(written)) == PLACEMENT
    assert content_hash(PLACEMENT) == content_hash(written)


def test_the_order_in_which_roles_are_given_does_not_matter() -> None:
    other = Placement(
        roles={"reference": ROLE, "rollout": ENGINE, "actor": ROLE}, pools=POOLS, weight_path="ipc"
    )
    assert (other, hash(other)) == (PLACEMENT, hash(PLACEMENT))
    assert list(other.roles) == list(PLACEMENT.roles)


def test_a_placement_survives_another_process() -> None:
    again = pickle.loads(pickle.dumps(PLACEMENT))
    assert (again, hash(again)) == (PLACEMENT, hash(PLACEMENT))


def test_roles_are_replaced_added_and_left_out_by_name() -> None:
    wide = replace(ROLE, layout=Layout(dp=1, tp=2))
    assert PLACEMENT.having(actor=wide).actor == wide
    assert set(PLACEMENT.having(critic=ROLE, reference=None).roles) == {"actor", "rollout", "critic"}
    assert PLACEMENT.role("critic") is None
    assert replace(PLACEMENT, backend="fsdp2").roles == PLACEMENT.roles


def test_roles_are_together_where_all_of_them_share_a_pool() -> None:
    pools = (*POOLS, ResourcePool(name="own", start=2, gpus=2))
    apart = replace(PLACEMENT.having(critic=ROLE), pools=pools).having(reference=replace(ROLE, pool="own"))
    assert apart.together("actor", "rollout", "critic")
    assert not apart.together("actor", "reference")
    assert not apart.together("actor", "reward"), "it is not there"


def test_a_role_that_the_table_lacks_is_no_role() -> None:
    with pytest.raises(KeyError, match="crtic"):
        ByRole({"crtic": ROLE})


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("crtic: {pool: all}", "unknown-key", "critic"),
        ("critic: {pool: all, layout: {dp: true}}", "bad-value", "truth value"),
        ("critic: {pool: all, layout: {dp: 0}}", "bad-value", "critic.layout.dp"),
        ("critic: {pool: other, layout: {dp: 1}}", "unknown-pool", "critic sits in pool 'other'"),
    ],
)
def test_what_is_wrong_with_a_role_is_named_with_its_place(line: str, code: str, says: str) -> None:
    with pytest.raises(RlhfsimError) as raised:
        read(FILE + line)
    assert raised.value.code == code
    assert says in str(raised.value)
    assert raised.value.place is not None


def test_a_placement_without_an_actor_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="'actor' is missing"):
        read("pools: [{name: all, gpus: 2}]")
