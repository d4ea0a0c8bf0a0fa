"""Which process lies on which GPU: worker groups, replicas, process groups, transfer groups."""

from __future__ import annotations

from functools import cache

import pytest

from executor import ranks
from rlhfsim.api import design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Workload


@cache
def plan(architecture: str) -> Plan:
    """PPO of an 8B model on 16 GPUs."""
    cluster = parse_cluster(gpus=16, gpu="h200", gpus_per_node=8)
    request = Request(cluster=cluster, workload=Workload(model="8b"), architecture=architecture)
    chosen = design(request, explain=False, rivals=False).chosen
    assert chosen is not None
    return chosen


@pytest.mark.parametrize(
    "layout", [Layout(tp=4, dp=2), Layout(pp=2, dp=2, tp=2), Layout(dp=8, zero=3), Layout(pp=8)]
)
def test_every_rank_is_in_one_group_of_each_kind(layout: Layout) -> None:
    sizes = {"tensor": layout.tp, "data": layout.dp, "pipeline": layout.pp}
    for kind, groups in ranks.process_groups(layout).items():
        assert {len(group) for group in groups} == {sizes[kind]}
        assert sorted(rank for group in groups for rank in group) == list(range(8))


def test_tensor_groups_are_neighbours_and_pipelines_stride_over_them() -> None:
    groups = ranks.process_groups(Layout(pp=2, dp=2, tp=2))
    assert groups["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["data"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["pipeline"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_on_shared_gpus_each_rank_hands_weights_to_the_worker_on_its_gpu() -> None:
    hybrid = plan("hybrid")
    replicas = ranks.replica_places(hybrid)
    [actor] = [s for s in hybrid.gpu_map if s.role == "actor"]
    groups = ranks.transfer_groups(hybrid)
    assert len(groups) == 16
    for group in groups:
        [(replica, worker)] = group.receivers
        assert replicas[replica][worker] == (actor.nodes[group.sender], actor.gpus[group.sender])


def test_between_pools_rank_0_sends_to_every_worker() -> None:
    apart = plan("disaggregated")
    [group] = ranks.transfer_groups(apart)
    assert group.sender == 0
    assert len(group.receivers) == sum(map(len, ranks.replica_places(apart)))


def test_a_smaller_cluster_is_refused_with_need_and_offer() -> None:
    ranks.check_room(plan("hybrid"), [8, 8, 4])
    with pytest.raises(
        RlhfsimError, match=r"needs 16 GPUs \(2 nodes of 8\).*has 12 \(1 node of 8, 1 node of 4\)"
    ):
        ranks.check_room(plan("hybrid"), [4, 8])
