"""The space: partitions, splits, paths, schedules, and how many plans they make."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest

from rlhfsim.search.request import Limit, Request
from rlhfsim.search.space import (
    MAX_UNITS,
    ROLES,
    Partition,
    Skeleton,
    compositions,
    freeing,
    groupings,
    partitions,
    splits,
    unit,
)
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.workload.workload import Environment, Lora, Workload

H100, H20 = load_profile("h100"), load_profile("h20")
PPO = Workload(model="qwen2.5-0.5b", critic="same", prompts=32)
BELL = (1, 1, 2, 5, 15, 52)


def cluster(*pools: tuple[Any, int, int]) -> Cluster:
    return Cluster(node_groups=tuple(NodeGroup(profile=p, gpus=g, gpus_per_node=n) for p, g, n in pools))


def request(gpus: int = 8, each: int = 8, **changes: Any) -> Request:
    given: dict[str, Any] = {"cluster": cluster((H100, gpus, each)), "workload": PPO}
    return Request(**(given | changes))


def found(asked: Request) -> list[Partition]:
    return list(partitions(asked, models_of(asked.workload)))


def partition(*groups: tuple[str, ...], hardware: tuple[int, ...] = (), **schedule: Any) -> Partition:
    return Partition(
        groups=groups, hardware=hardware or (0,) * len(groups), path="host", schedule=Schedule(**schedule)
    )


# --- partitions and splits ----------------------------------------------------------------------------


@pytest.mark.parametrize("roles", range(6))
def test_partitions_are_as_many_as_bell_numbers_and_all_different(roles: int) -> None:
    every = list(groupings(ROLES[:roles]))
    assert len(every) == BELL[roles]
    assert len({frozenset(map(frozenset, groups)) for groups in every}) == BELL[roles]
    for groups in every:
        assert sorted(s for g in groups for s in g) == sorted(ROLES[:roles])


@pytest.mark.parametrize(("total", "parts"), [(1, 1), (5, 1), (5, 2), (8, 3), (8, 5), (2, 3)])
def test_compositions_are_stars_and_bars(total: int, parts: int) -> None:
    rows = compositions(total, parts)
    assert len(rows) == (comb(total - 1, parts - 1) if total >= parts else 0)
    assert (rows > 0).all()
    assert (rows.sum(axis=1) == total).all()
    assert len({tuple(r) for r in rows.tolist()}) == len(rows)


@pytest.mark.parametrize(("gpus", "each"), [(8, 8), (12, 8), (16, 8), (64, 8), (20, 8), (6, 2)])
def test_splits_are_of_whole_nodes_and_some_use_every_gpu(gpus: int, each: int) -> None:
    asked = request(gpus, each)
    for of in (partition(ROLES), partition(("actor", "critic"), ("rollout",))):
        sizes = splits(asked, of)
        used = sizes.sum(axis=1)
        assert used.max() == gpus
        assert (sizes > 0).all()
        assert len({tuple(row) for row in sizes.tolist()}) == len(sizes)
        if gpus > each:
            wide = sizes[used > each]  # or all pools lie inside the one full node
            assert (wide[:, :-1] % each == 0).all()  # the last pool takes a part-filled node
            assert set(used[used % each > 0].tolist()) <= {gpus - gpus % each + r for r in (1, 2, 4)}


def test_gpus_that_layouts_do_not_divide_may_stay_idle() -> None:
    assert splits(request(17), partition(ROLES))[:, 0].tolist() == [17, 16, 8]
    apart = partition(("actor", "critic"), ("rollout",))
    assert splits(request(17), apart).tolist() == [[8, 9], [16, 1], [8, 8]]
    assert splits(request(3), apart).tolist() == [[1, 2], [2, 1], [1, 1]]
    # ten nodes and more: one less, and what layouts divide
    used = splits(request(8 * 11), partition(ROLES))[:, 0] // 8
    assert used.tolist() == [11, 10, 8]
    assert splits(request(8 * 15), partition(ROLES))[1:, 0].tolist() == [14 * 8, 12 * 8]


def test_one_node_is_split_gpu_by_gpu_and_more_nodes_than_limits_in_steps() -> None:
    assert len(splits(request(8), partition(("actor",), ("rollout",)))) == 7 + 6 + 5 + 4 + 3 + 2 + 1
    assert unit(request(8)) == 1
    assert unit(request(64)) == 8
    nodes = 4 * MAX_UNITS
    assert unit(request(8 * nodes)) % 8 == 0
    assert len(splits(request(8 * nodes), partition(("actor",), ("rollout",)))) <= 3 * MAX_UNITS


def test_more_pools_than_gpus_have_no_split() -> None:
    assert len(splits(request(2, 2), partition(("actor",), ("critic",), ("rollout",)))) == 0


def test_mixed_hardware_is_used_kind_by_kind() -> None:
    asked = request(cluster=cluster((H100, 4, 4), (H20, 2, 2)))
    mixed = partition(("actor", "critic"), ("reward",), ("rollout",), hardware=(0, 1, 1))
    assert splits(asked, mixed).tolist() == [[n, 1, 1] for n in (4, 3, 2, 1)]
    pools = Skeleton(partition=mixed, sizes=(4, 1, 1)).pools()
    assert [(p.hardware, p.start, p.gpus) for p in pools] == [(0, 0, 4), (1, 0, 1), (1, 1, 1)]
    other = partition(("actor", "critic"), ("reward",), ("rollout",), hardware=(0, 1, 0))
    every = splits(asked, other).tolist()
    assert [row for row in sorted(every) if sum(row) == 6] == [[1, 2, 3], [2, 2, 2], [3, 2, 1]]
    assert {row[1] for row in every} == {1, 2}


def test_every_kind_of_hardware_is_used() -> None:
    asked = request(cluster=cluster((H100, 4, 4), (H20, 2, 2)))
    every = found(asked)
    assert every
    assert all(set(f.hardware) == {0, 1} for f in every)


def test_limits_on_gpus_cut_splits() -> None:
    apart = partition(("actor", "critic"), ("rollout",))
    limits = (
        Limit(role="critic", field="gpus", relation="<=", value=5),
        Limit(role="rollout", field="gpus", relation="!=", value=4),
    )
    assert splits(request(8, limits=limits), apart)[:4, 0].tolist() == [1, 2, 3, 5]
    assert splits(request(8, max_gpus_per_role=4), apart).max() == 4
    # one pool for everything is not a large pool of one role
    assert splits(request(8, max_gpus_per_role=4), partition(ROLES)).max() == 8


# --- paths and schedules ----------------------------------------------------------------------------


def paths(asked: Request, *, joined: bool) -> set[str]:
    return {f.path for f in found(asked) if f.joined == joined}


def test_paths_join_one_pool_or_two_as_the_backend_can() -> None:
    assert paths(request(), joined=True) == {"ipc", "host", "disk"}
    assert paths(request(), joined=False) == {"broadcast", "host", "disk"}
    priced = request(backend="megatron", framework=ANY)
    assert paths(priced, joined=True) == {"ipc", "host", "disk", "reshard"}
    assert paths(priced, joined=False) == {"broadcast", "host", "disk", "p2p"}


def test_a_framework_offers_the_paths_that_it_runs() -> None:
    nemo = request(backend="megatron", framework="nemo-rl")
    assert paths(nemo, joined=True) == {"ipc"}
    assert paths(nemo, joined=False) == {"broadcast", "p2p"}
    nodes = request(16)
    assert paths(nodes, joined=True) == {"ipc", "host", "disk"}
    assert paths(nodes, joined=False) == {"broadcast", "disk"}  # host memory ends at the node


@pytest.mark.parametrize("name", ["delta", "delta-disk"])
def test_changed_elements_alone_travel_only_where_that_is_asked_for(name: Any) -> None:
    assert name not in paths(request(), joined=False)
    asked = request(weight_path=name)
    assert (paths(asked, joined=False), paths(asked, joined=True)) == ({name}, set())
    lora = Workload(model="qwen2.5-0.5b", lora=Lora(rank=8), prompts=32)
    assert not paths(request(weight_path=name, workload=lora), joined=False)


def test_adapters_alone_can_move_only_where_adapters_are_trained() -> None:
    lora = Workload(model="qwen2.5-0.5b", lora=Lora(rank=8), prompts=32)
    assert "lora" in paths(request(workload=lora), joined=True)
    assert "lora" in paths(request(workload=lora), joined=False)
    assert "lora" not in paths(request(), joined=True)


def test_preference_training_has_no_rollout_and_no_path() -> None:
    dpo = Workload(algorithm="dpo", model="qwen2.5-0.5b", prompts=32)
    every = found(request(workload=dpo))
    assert {f.path for f in every} == {"none"}
    assert {f.groups for f in every} == {(("actor", "reference"),), (("actor",), ("reference",))}


def test_only_a_rollout_of_its_own_streams_or_runs_ahead() -> None:
    for f in found(request(allow=frozenset({"async"}), max_staleness=2)):
        if f.schedule.streaming or f.schedule.staleness:
            assert ("rollout",) in f.groups
            assert len(f.groups) > 1


def test_stale_schedules_compete_only_when_allowed() -> None:
    assert not any(f.schedule.staleness for f in found(request()))
    allowed = {
        f.schedule
        for f in found(request(allow=frozenset({"async"}), max_staleness=4))
        if f.schedule.staleness
    }
    assert {(s.staleness, s.partial_rollout, s.overlapped_sync) for s in allowed} == {
        (1, False, False),
        (1, False, True),
        (4, True, False),
        (4, True, True),
        (4, False, False),
        (4, False, True),
    }


def test_two_buffers_compete_only_with_an_environment() -> None:
    assert not any(f.schedule.double_buffered for f in found(request()))
    turns = Workload(model="qwen2.5-0.5b", environment=Environment(turns=2), prompts=32)
    assert {f.schedule.double_buffered for f in found(request(workload=turns, framework=ANY))} == {
        False,
        True,
    }


# --- what the user narrows ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["naive", "smart", "hybrid", "disaggregated"])
def test_an_architecture_leaves_its_partitions_alone(architecture: str) -> None:
    every = found(request(architecture=architecture))
    assert every
    assert all(architecture in f.labels for f in every)


def test_what_is_forbidden_is_in_no_partition() -> None:
    asked = request(forbid=frozenset({"disk", "split", "standalone", "streaming", "hybrid"}))
    every = found(asked)
    assert every
    for f in every:
        assert f.path != "disk"
        assert f.role_placement == "colocated"
        assert not f.schedule.streaming
        assert f.labels != {"hybrid"}


def test_naive_against_smart_is_decided_by_the_roles() -> None:
    one = next(f for f in found(request()) if f.joined and f.path == "host")
    assert freeing(request(), one) == "any"
    assert freeing(request(architecture="smart"), one) == "must"
    assert freeing(request(forbid=frozenset({"smart"})), one) == "must not"
    assert freeing(request(forbid=frozenset({"naive"})), one) == "must"
    hybrid = next(f for f in found(request()) if f.labels == {"hybrid"})
    assert freeing(request(forbid=frozenset({"smart"})), hybrid) == "any"


def test_the_partitions_of_ppo_are_counted_by_hand() -> None:
    # 52 partitions; actor and rollout together in 15 of them (Bell of 4), apart in 37; the rollout
    # alone in 15 (Bell of the other 4): 3 paths each, and where it is alone streaming beside plain
    every = found(request(8))
    assert len(every) == 15 * 3 + (37 + 15) * 3
    assert len(set(every)) == len(every)


def test_plans_of_a_search_are_the_product_of_the_options_of_every_role(questions: Any) -> None:
    from rlhfsim.search.branch_and_bound import Search

    for seed in range(1400, 1410):
        case = questions.drawn(seed, most=10**9)
        if case is not None and case.plans < 10**6:
            branches = Search(case.request, case.models)._branches()
            assert sum(b.bounds.legal() for b in branches) == case.plans
