from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, Group, group
from rlhfsim.kernels.devices import device_of, domain_of
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.units import GB, MB

PROFILE = load_profile("h100_sxm")
RACK = load_profile("gb200_nvl72")


def device(gpus: int = 64, oversubscription: float = 1.0) -> Device:
    return device_of(NodeGroup(profile=PROFILE, gpus=gpus, gpus_per_node=8), oversubscription)


ALL = (
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.all_to_all,
    collectives.broadcast,
)


@pytest.mark.parametrize("collective", ALL)
def test_one_rank_and_no_bytes_take_no_time(collective) -> None:
    assert collective(device(), 1e9, group(1, 1, 8)) == 0
    assert collective(device(), 0.0, group(8, 1, 8)) == 0


def test_all_gather_across_nodes_is_the_slower_tier_by_hand() -> None:
    d = device()
    size, ranks = 8 * GB, Group(ranks=16, per_domain=8)
    between = 1 / 2 * size / 8 / (50 * GB * d["nic_efficiency"])
    inside = 7 / 8 * size / (450 * GB * d["nvlink_efficiency"])
    latency = 7 * d["nvlink_latency"] + d["nic_latency"]
    assert collectives.all_gather(d, size, ranks) == pytest.approx(max(between, inside) + latency)


def test_an_all_reduce_across_nodes_costs_two_all_gathers() -> None:
    d, ranks = device(), Group(ranks=32, per_domain=8)
    gather = collectives.all_gather(d, GB, ranks)
    assert collectives.all_reduce(d, GB, ranks) == pytest.approx(2 * gather, rel=1e-6)


def test_point_to_point_is_latency_plus_bytes_over_bandwidth() -> None:
    d = device()
    expected = d["nic_latency"] + 1e9 / (50 * GB * d["nic_efficiency"])
    assert collectives.p2p(d, 1e9, True) == pytest.approx(expected)
    assert collectives.p2p(d, 1e9, False) < expected


@given(size=st.floats(1e3, 1e11), nodes=st.integers(2, 64))
def test_no_collective_beats_its_network(size: float, nodes: int) -> None:
    d = device(8 * nodes)
    ranks = group(8 * nodes, 1, 8)
    sent = (nodes - 1) / nodes * size / 8
    assert collectives.all_gather(d, size, ranks) >= sent / d.network_bandwidth
    assert collectives.all_reduce(d, size, ranks) >= 2 * sent / d.network_bandwidth


@pytest.mark.parametrize("collective", ALL)
def test_a_thinner_network_is_never_faster(collective) -> None:
    ranks = Group(ranks=64, per_domain=8)
    thick, thin = collective(device(), 5 * GB, ranks), collective(device(64, 4.0), 5 * GB, ranks)
    assert thin >= thick
    times = [collective(device(), size, ranks) for size in (1e3, 1e6, 1e9, 1e10)]
    assert times == sorted(times)


def test_tokens_travel_once_to_a_node_whatever_experts_they_chose() -> None:
    d, ranks = device(64, 8.0), Group(ranks=16, per_domain=8)
    one = collectives.dispatch(d, 4096, 4096, 1, ranks)
    many = collectives.dispatch(d, 4096, 4096, 64, ranks)
    assert one < many < 2.1 * one + 1e-4  # at most one copy to the other node, instead of a half
    assert collectives.dispatch(d, 4096, 4096, 8, ranks, skew=1.5) > collectives.dispatch(
        d, 4096, 4096, 8, ranks
    )


def test_a_rack_is_one_domain_and_a_node_of_four_is_four() -> None:
    assert domain_of(NodeGroup(profile=RACK, gpus=144, gpus_per_node=4)) == 72
    assert domain_of(NodeGroup(profile=PROFILE, gpus=64, gpus_per_node=4)) == 4


def test_the_same_pool_gives_the_same_device_object() -> None:
    assert device() is device()
    assert device() is not device(64, 2.0)


def test_groups_with_a_wide_stride_touch_more_domains() -> None:
    assert group(8, 8, 8).domains == 8
    assert group(8, 1, 8).domains == 1
    assert not collectives.crosses(device(), 8, 1)
    assert collectives.crosses(device(), 8, 8)
    assert collectives.broadcast(device(), 10 * MB, group(8, 8, 8)) > 10 * MB / (450 * GB)
