"""Layouts that a user types in part: what is left open is derived before anything is checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.fixed_layouts import check_layout
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.request import Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

WORK = Workload(algorithm="grpo", model="qwen3-30b-a3b", kl=False, reward=Reward(rules=Rules()))
MODELS = models_of(WORK)
DEGREES = ("tp", "pp", "dp", "cp", "ep", "vp", "zero", "shards")
POOL = 16


def request(backend: Backend = "megatron", **fix: dict[str, Any]) -> Request:
    cluster = parse_cluster(POOL, "h100")
    return Request(cluster=cluster, workload=WORK, backend=backend, framework=ANY, fix=fix)


def typed(layout: Layout) -> dict[str, Any]:
    """A layout as a user types it in full."""
    return {name: value for name in DEGREES if (value := getattr(layout, name)) is not None}


def parts(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields with one left open."""
    for left_open in fields:
        yield {name: value for name, value in fields.items() if name != left_open}


def offered(asked: Request, gpus: int) -> list[Layout]:
    """One layout of every shape of the actor on so many GPUs."""
    shapes = role_layouts(asked, "actor", MODELS.actor, gpus, 8).shapes
    return list({tuple(typed(s.layouts[0]).values()): s.layouts[0] for s in shapes}.values())


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_what_the_search_offers_is_accepted_when_it_is_typed_in_part(backend: Backend) -> None:
    space = offered(request(backend), POOL)
    for layout in space[:: len(space) // 4]:
        for fields in parts(typed(layout)):
            asked = request(backend, actor=fields)
            check_layout(asked, MODELS, "actor", fields)
            assert typed(layout) in map(typed, offered(asked, POOL)), fields


@pytest.mark.parametrize(
    "fields", [{"ep": 16}, {"ep": 8}, {"tp": 4, "pp": 4, "ep": 4}, {"vp": 2}, {"vp": 3}, {"vp": 2, "tp": 8}]
)
def test_a_degree_that_some_pools_cannot_hold_leaves_the_pools_that_can(fields: dict[str, Any]) -> None:
    asked = request(actor=fields)
    check_layout(asked, MODELS, "actor", fields)
    for gpus in (1, 2, 4, 8, POOL):
        for layout in offered(asked, gpus):
            assert all(getattr(layout, name) == value for name, value in fields.items())
            assert layout.tp * layout.cp * layout.dp % layout.ep == 0
    assert offered(asked, POOL)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 2, "dp": 1, "cp": 1, "ep": 8}, "expert parallelism 8"),
        ({"tp": 8, "pp": 2, "ep": 16}, "expert parallelism 16"),
        ({"pp": 1, "vp": 2}, "virtual stages"),
        ({"dp": 3}, "dp=3"),
        ({"tp": 8, "dp": 4}, "32 GPUs"),
    ],
)
def test_a_layout_that_no_pool_can_hold_is_refused_by_its_rule(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RlhfsimError, match=words):
        check_layout(request(actor=fields), MODELS, "actor", fields)


def test_data_parallelism_alone_is_filled_up_with_the_other_degrees() -> None:
    asked = replace(request(actor={"dp": 2}), architecture="hybrid")
    check_layout(asked, MODELS, "actor", {"dp": 2})
    assert {x.dp for x in offered(asked, POOL)} == {2}


def test_shards_of_a_small_pool_need_not_divide_the_whole_cluster() -> None:
    asked = replace(request("fsdp2", actor={"shards": 16}), cluster=parse_cluster(24, "h100"))
    check_layout(asked, MODELS, "actor", {"shards": 16})
    with pytest.raises(RlhfsimError, match="groups of 7 shards"):
        check_layout(asked, MODELS, "actor", {"shards": 7})


def test_packs_of_scoring_passes_alone_leave_those_of_training_open() -> None:
    asked = request(actor={"score_pack_tokens": 8192})
    check_layout(asked, MODELS, "actor", asked.fix["actor"])
    layouts = list(role_layouts(asked, "actor", MODELS.actor, POOL, 8).layouts)
    assert {x.score_pack_tokens for x in layouts} == {8192}
    assert len({x.pack_tokens for x in layouts}) > 1


@pytest.mark.parametrize("fields", [{"ep": 8}, {"ep": 2}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 1}, {"tp": 16}])
def test_experts_of_a_rollout_lie_on_the_gpus_of_a_replica(fields: dict[str, Any]) -> None:
    asked = request(rollout=fields)
    check_layout(asked, MODELS, "rollout", fields)
    layouts = rollout_layouts(asked, MODELS.actor, POOL, asked.cluster.node_group)
    assert layouts
    assert all(x.tp * x.attention_dp % x.ep == 0 for x in layouts)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"tp": 3}, "use tp of 1, 2, 4, 8"),
        ({"tp": 16}, "use tp of 1, 2, 4, 8"),
        ({"tp": 8, "pp": 5}, "use pp of 1, 2"),
        ({"tp": 4, "dp": 1, "cp": 1, "ep": 8}, "use ep of 1, 2, 4"),
        ({"ep": 3}, "use ep of 1, 2, 4, 8, 16"),
        ({"tp": 8, "dp": 4}, "leave out tp or dp"),
        ({"tp": 2, "zero": 3}, "use zero of 0, 1"),
        ({"dp": 3}, "leave out dp"),
    ],
)
def test_the_remedy_of_a_refused_layout_passes_every_check(fields: dict[str, Any], remedy: str) -> None:
    asked = replace(request(), architecture="hybrid")
    with pytest.raises(RlhfsimError) as caught:
        check_layout(asked, MODELS, "actor", fields)
    assert caught.value.help == remedy
    if remedy.startswith("use"):
        name, values = remedy.removeprefix("use ").split(" of ")
        for value in values.split(", "):
            check_layout(asked, MODELS, "actor", fields | {name: int(value)})
