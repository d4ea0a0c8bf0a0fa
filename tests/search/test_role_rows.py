"""Options as columns answer as the placements that they stand for."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, get_args

import numpy as np
import pytest

from rlhfsim import parse_cluster
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.complexity import cut, moves, piped, uneven
from rlhfsim.search.options import frees, sync_classes
from rlhfsim.search.request import Request
from rlhfsim.search.role_rows import ALONE, Condition, RoleRows, joined
from rlhfsim.specs.frameworks.says import READS, Aspect, value_of
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import FIELDS, columns_of
from rlhfsim.specs.placement.placement import Rest, RolePlacement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.simplest import bf16_sums

RESTS = (Rest("resident", False), Rest("resident", True), Rest("offloaded", False))
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "vp", "micro_batch"), (1, 2, 3, 4)),
    **dict.fromkeys(("ep", "etp"), (1, 2)),
    "dispatcher": (None, "deepep"),
    "ep_overlap": (None, True, False),
    "zero": (0, 1, 2, 3),
    "shards": (None, 2),
    "sequence_parallel": (True, False),
    "pack_tokens": (None, 4096),
    "score_micro_batch": (None, 2),
    "score_pack_tokens": (None, 8192),
    "recompute": ("none", "full"),
    "offload_optimizer": ("none", "cpu"),
    "offload_fraction": (1.0, 0.5),
    "offload_params": ("none", "cpu"),
}
WORK = Workload(algorithm="ppo", model="llama3-8b", prompts=64)
REQUEST = Request(cluster=parse_cluster(8, "h100"), workload=WORK)


def drawn(random: Random) -> Layout:
    """A layout with any value of each field that goes with the others."""
    while True:
        try:
            return Layout(**{name: random.choice(values) for name, values in VALUES.items()})
        except RlhfsimError:
            continue


@pytest.fixture(scope="module")
def roles() -> RoleRows:
    random = Random(5)
    layouts = [drawn(random) for _ in range(60)]
    return RoleRows(
        layouts=columns_of(layouts),
        rests=RESTS,
        layout=np.array([random.randrange(60) for _ in range(200)]),
        rest=np.array([random.randrange(3) for _ in range(200)]),
    )


def test_every_field_of_a_layout_is_drawn_and_comes_back() -> None:
    assert set(VALUES) == set(FIELDS)
    random = Random(7)
    layouts = [drawn(random) for _ in range(50)]
    columns = columns_of(layouts)
    made = [columns.at(row) for row in range(50)]
    assert made == layouts
    assert [repr(x) for x in made] == [repr(x) for x in layouts]


@pytest.mark.parametrize(
    "holds",
    [
        piped,
        moves,
        uneven,
        lambda role: role.layout.zero == 3,
        lambda role: cut(role)[1] == 2,
        lambda role: bf16_sums(REQUEST, "actor", role) <= 16,
        lambda role: role.residency == "offloaded",
    ],
)
def test_a_condition_holds_of_columns_as_of_each_placement(roles: RoleRows, holds: Condition) -> None:
    expected = [bool(holds(role)) for role in roles]
    assert roles.that(holds).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_rows_are_found_taken_and_joined_as_placements(roles: RoleRows) -> None:
    every = list(roles)
    assert roles.frees.tolist() == [frees(role) for role in every]
    for row in (0, 17, 199):
        assert roles.like(every[row]).tolist() == [i for i, x in enumerate(every) if x == every[row]]
    assert not len(roles.like(replace(every[0], residency="recreated")))
    some = roles.only(np.array([3, 1, 2]))
    assert list(some) == [every[row] for row in (3, 1, 2)]
    assert list(some.alone) == list(some)
    assert len(some.alone.layouts) <= 3
    none = roles.only(np.zeros(0, dtype=np.int64)).alone
    assert list(joined([some.alone, none, roles])) == [*some, *every]
    assert list(joined([none])) == []


def test_classes_of_the_weight_sync_are_those_of_the_placements(roles: RoleRows) -> None:
    found, expected = sync_classes(roles), sync_classes(list(roles))
    assert found.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 10


@pytest.mark.parametrize("aspect", get_args(Aspect))
@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_an_aspect_depends_on_the_fields_that_it_reads_and_on_no_other(aspect: Aspect, backend: Any) -> None:
    random, changed = Random(3), set()
    for _ in range(60):
        layout = drawn(random)
        role = RolePlacement(pool=ALONE, layout=layout)
        said = value_of(aspect, role, backend)
        for name, values in VALUES.items():
            for value in values:
                try:
                    other = replace(role, layout=replace(layout, **{name: value}))
                except RlhfsimError:
                    continue
                if value_of(aspect, other, backend) != said:
                    changed.add(name)
    assert changed == set(READS[aspect])
