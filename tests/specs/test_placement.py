"""Labels of placements, and everything that a placement must not do on a given cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.scenario import check_placement
from rlhfsim.specs.workload.workload import Lora, Workload

GRPO = Workload(algorithm="grpo", model="qwen3-8b", kl=False)  # reward model, no reference
PPO = Workload(algorithm="ppo", model="qwen3-8b")
TWO_NODES = Cluster(node_groups=(node_group("h100", 16),))
ALL, LEFT, RIGHT = (
    ResourcePool(name="all", gpus=16),
    ResourcePool(name="left", gpus=8),
    ResourcePool(name="right", start=8, gpus=8),
)


def role(pool: str = "all", **layout: Any) -> RolePlacement:
    return RolePlacement(pool=pool, layout=Layout(**({"dp": 8} | layout)))


def rollout(pool: str = "all", sleep: int = 0, **layout: Any) -> RolloutPlacement:
    return RolloutPlacement(pool=pool, sleep=sleep, layout=RolloutLayout(**({"dp": 8} | layout)))


def one_pool(**more: Any) -> Placement:
    given: dict[str, Any] = {
        "pools": (ALL,),
        "rollout": rollout(),
        "actor": role(),
        "reward": role(),
        "weight_path": "host",
    }
    return Placement(**(given | more))


def two_pools(**more: Any) -> Placement:
    given: dict[str, Any] = {
        "pools": (LEFT, RIGHT),
        "rollout": rollout("right"),
        "actor": role("left"),
        "reward": role("left"),
        "weight_path": "broadcast",
    }
    return Placement(**(given | more))


def check(placement: Placement, workload: Workload = GRPO, cluster: Cluster = TWO_NODES) -> None:
    check_placement(placement, workload, models_of(workload), cluster)


def refused(placement: Placement, workload: Workload = GRPO, cluster: Cluster = TWO_NODES) -> str:
    with pytest.raises(RlhfsimError) as error:
        check(placement, workload, cluster)
    assert error.value.help
    return error.value.code


# --- labels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "label"),
    [
        (one_pool(), "naive"),
        (one_pool(weight_path="none"), "naive"),
        (one_pool(rollout=rollout(sleep=1)), "smart"),
        (one_pool(rollout=rollout(sleep=2)), "smart"),
        (one_pool(actor=replace(role(), offload_between=True)), "smart"),
        (one_pool(reward=replace(role(), residency="offloaded")), "smart"),
        (one_pool(rollout=replace(rollout(), residency="recreated"), weight_path="disk"), "smart"),
        (one_pool(weight_path="ipc"), "hybrid"),
        (one_pool(weight_path="reshard"), "hybrid"),
        (one_pool(weight_path="ipc", rollout=rollout(sleep=2)), "hybrid"),  # hybrid wins over smart
        (two_pools(), "disaggregated"),
        (two_pools(weight_path="disk", rollout=rollout("right", sleep=1)), "disaggregated"),
        (two_pools(schedule=Schedule(streaming=True)), "disaggregated"),
        (two_pools(schedule=Schedule(staleness=1)), "async"),
        (two_pools(schedule=Schedule(staleness=0.5, partial_rollout=True)), "async"),
    ],
)
def test_the_architecture_is_a_label_of_generation_against_training(placement: Placement, label: str) -> None:
    assert placement.architecture == label
    check(placement)


@pytest.mark.parametrize(
    ("pools", "label"),
    [
        (("a", "a", "a", "a"), "colocated"),
        (("a", "b", "a", "b"), "split"),
        (("a", "b", "c", "c"), "split"),
        (("a", "b", "c", "d"), "standalone"),
    ],
)
def test_role_placement_looks_at_the_four_roles_and_not_at_the_rollout(
    pools: tuple[str, ...], label: str
) -> None:
    names = ("actor", "critic", "reference", "reward")
    placement = Placement(
        pools=tuple(ResourcePool(name=n, start=4 * i, gpus=4) for i, n in enumerate("abcd")),
        rollout=rollout("d", dp=4),
        weight_path="disk",
        **{name: role(pool, dp=4) for name, pool in zip(names, pools, strict=True)},
    )
    assert placement.role_placement == label
    check(placement, PPO)


def test_preference_training_is_naive_or_smart() -> None:
    workload = Workload(algorithm="dpo", model="qwen3-8b")
    resident = Placement(pools=(ALL,), actor=role(), reference=role())
    check(resident, workload)
    assert resident.architecture == "naive"
    assert replace(resident, reference=replace(role(), residency="offloaded")).architecture == "smart"


# --- what is refused --------------------------------------------------------------------------------


def test_every_role_of_the_algorithm_needs_a_role() -> None:
    assert refused(one_pool(reward=None)) == "missing-role"
    assert refused(one_pool(rollout=None)) == "missing-role"
    assert refused(one_pool(), PPO) == "missing-role"


def test_a_role_without_a_role_is_refused() -> None:
    assert refused(one_pool(critic=role())) == "role-without-role"
    assert refused(one_pool(reference=role())) == "role-without-role"


def test_tensor_parallelism_must_divide_the_heads() -> None:
    # qwen3-8b has 32 query and 8 key/value heads
    assert refused(one_pool(actor=role(tp=3, dp=1))) == "tp-does-not-divide-heads"
    assert refused(one_pool(rollout=rollout(tp=6, dp=1))) == "tp-does-not-divide-heads"


def test_tensor_parallelism_stays_in_one_node() -> None:
    assert refused(one_pool(actor=role(tp=16, dp=1))) == "tp-exceeds-node"
    assert refused(one_pool(rollout=rollout(tp=12, dp=1))) == "tp-exceeds-node"


def test_a_rollout_replica_may_fill_whole_nodes() -> None:
    check(one_pool(rollout=rollout(tp=16, dp=1)))
    racks = Cluster(node_groups=(node_group("gb200_nvl72", 144),))
    check(one_pool(pools=(ResourcePool(name="all", gpus=144),), rollout=rollout(tp=16, dp=9)), cluster=racks)


def test_the_edge_of_a_rack_cuts_no_group_of_whole_nodes() -> None:
    """16 GPUs of 72: the search offers them, for roles that train too."""
    racks = Cluster(node_groups=(node_group("gb200_nvl72", 144),))
    trains = role(tp=16, dp=9)
    pool = ResourcePool(name="all", gpus=144)
    check(
        one_pool(pools=(pool,), actor=trains, reward=trains, reference=None, rollout=rollout(tp=8, dp=18)),
        cluster=racks,
    )


def test_a_pool_that_starts_inside_a_node_must_not_push_a_group_over_its_edge() -> None:
    pools = (ResourcePool(name="left", gpus=4), ResourcePool(name="right", start=4, gpus=8))
    shifted = two_pools(
        pools=pools, rollout=rollout("right", tp=8, dp=1), actor=role("left", dp=4), reward=role("left", dp=4)
    )
    assert refused(shifted) == "tp-crosses-nodes"
    check(replace(shifted, rollout=rollout("right", tp=4, dp=2)))


def test_a_rack_is_one_domain() -> None:
    rack = Cluster(node_groups=(node_group("gb200_nvl72", 16),))
    check(one_pool(rollout=rollout(tp=8, dp=2)), cluster=rack)


def test_pools_must_not_share_gpus() -> None:
    pools = (LEFT, ResourcePool(name="right", start=4, gpus=8))
    assert refused(two_pools(pools=pools)) == "pools-overlap"


def test_pools_on_different_hardware_may_have_the_same_numbers() -> None:
    mixed = Cluster(node_groups=(node_group("h100", 8), node_group("a100", 8)))
    other = ResourcePool(name="right", gpus=8, hardware=1)
    check(two_pools(pools=(LEFT, other)), cluster=mixed)
    assert refused(two_pools(pools=(LEFT, replace(other, hardware=2))), cluster=mixed) == "unknown-hardware"


def test_pools_must_not_leave_the_cluster() -> None:
    pools = (LEFT, ResourcePool(name="right", start=12, gpus=8))
    assert refused(two_pools(pools=pools)) == "pool-exceeds-cluster"


def test_pools_have_names_of_their_own() -> None:
    with pytest.raises(RlhfsimError, match="declared twice"):
        two_pools(pools=(LEFT, LEFT, RIGHT))


def test_a_role_names_a_declared_pool_and_fits_in_it() -> None:
    with pytest.raises(RlhfsimError, match="not declared"):
        one_pool(actor=role("elsewhere"))
    with pytest.raises(RlhfsimError, match="needs 32 GPUs, its pool has 16"):
        one_pool(actor=role(dp=32))


def test_staleness_needs_a_rollout_pool_of_its_own() -> None:
    assert refused(one_pool(schedule=Schedule(staleness=1))) == "async-in-one-pool"


@pytest.mark.parametrize("flag", ["overlapped_sync", "partial_rollout"])
def test_overlap_without_staleness_is_refused(flag: str) -> None:
    assert refused(two_pools(schedule=Schedule(**{flag: True}))) == "overlap-needs-staleness"


@pytest.mark.parametrize("path", ["ipc", "reshard", "none"])
def test_paths_inside_one_pool(path: str) -> None:
    check(one_pool(weight_path=path))
    assert refused(two_pools(weight_path=path)) == "path-needs-one-pool"


@pytest.mark.parametrize("path", ["broadcast", "p2p"])
def test_paths_between_two_pools(path: str) -> None:
    check(two_pools(weight_path=path))
    assert refused(one_pool(weight_path=path)) == "path-needs-two-pools"


@pytest.mark.parametrize("path", ["host", "disk"])
def test_paths_that_work_everywhere(path: str) -> None:
    check(one_pool(weight_path=path))
    check(two_pools(weight_path=path))


def test_moving_adapters_needs_adapters() -> None:
    assert refused(one_pool(weight_path="lora")) == "path-needs-lora"
    check(one_pool(weight_path="lora"), replace(GRPO, lora=Lora()))


def test_a_layout_that_the_backend_cannot_run_is_refused() -> None:
    assert refused(one_pool(actor=role(tp=2, dp=4, zero=3))) == "backend-cannot-run"
    assert refused(one_pool(actor=role(tp=2, pp=2, dp=4, zero=2))) == "backend-cannot-run"
    check(one_pool(actor=role(tp=2, pp=2, dp=4), backend="megatron"))
