from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, Group, group
from rlhfsim.kernels.devices import device_of, domain_of
from rlhfsim.kernels.routing import Routing
from rlhfsim.specs.hardware.hardware import Fabric, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.units import GB, MB
from tests.oracles import broadcast

PROFILE = load_profile("h100_sxm")
RACK = load_profile("gb200_nvl72")


def device(gpus: int = 64, oversubscription: float = 1.0) -> Device:
    return device_of(NodeGroup(profile=PROFILE, gpus=gpus, gpus_per_node=8), oversubscription)


ALL = (
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.all_to_all,
    broadcast,
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
    one = collectives.dispatch(d, 4096, 4096, Routing(top_k=1), ranks)
    many = collectives.dispatch(d, 4096, 4096, Routing(top_k=64), ranks)
    assert one < many < 2.1 * one + 1e-4  # at most one copy to the other node, instead of a half
    assert collectives.dispatch(d, 4096, 4096, Routing(top_k=8), ranks, skew=1.5) > collectives.dispatch(
        d, 4096, 4096, Routing(top_k=8), ranks
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
    assert broadcast(device(), 10 * MB, group(8, 8, 8)) > 10 * MB / (450 * GB)


H100 = {"nvlink": 450 * GB, "nic": 50 * GB}
"""Datasheet rates of one GPU and direction, byte/s."""


def test_every_gpu_of_an_all_reduce_across_nodes_moves_twice_its_share_by_hand() -> None:
    """2 (g-1)/g S / B_in against 2 (D-1)/D (S/g) / B_net, 16 GPUs in two nodes of eight."""
    d = device()
    two = Group(ranks=16, per_domain=8)
    inside = 2 * 7 / 8 * GB / (H100["nvlink"] * d["nvlink_efficiency"])
    between = 2 * 1 / 2 * GB / 8 / (H100["nic"] * d["nic_efficiency"])
    latency = 2 * (7 * d["nvlink_latency"] + d["nic_latency"])
    assert inside > between
    assert collectives.all_reduce(d, GB, two) == pytest.approx(inside + latency)
    many = Group(ranks=40, per_domain=2)  # 20 nodes: five hops of a tree, and the network is the slower
    between = 2 * 19 / 20 * GB / 2 / (H100["nic"] * d["nic_efficiency"])
    latency = 2 * (d["nvlink_latency"] + 5 * d["nic_latency"])
    assert collectives.all_reduce(d, GB, many) == pytest.approx(between + latency)


def test_one_gpu_a_node_uses_the_network_alone() -> None:
    d = device()
    between = 3 / 4 * GB / (H100["nic"] * d["nic_efficiency"])
    lone = Group(ranks=4, per_domain=1)
    assert collectives.reduce_scatter(d, GB, lone) == pytest.approx(between + 2 * d["nic_latency"])


def test_an_all_to_all_across_nodes_sends_to_seven_neighbours_and_eight_others_by_hand() -> None:
    """(g-1)/n S / B_in against (n-g)/n S / B_net; one latency a step."""
    d, two = device(), Group(ranks=16, per_domain=8)
    between = 8 / 16 * GB / (H100["nic"] * d["nic_efficiency"])
    latency = 7 * d["nvlink_latency"] + d["nic_latency"]
    assert collectives.all_to_all(d, GB, two) == pytest.approx(between + latency)
    fast = replace(d, network_bandwidth=10_000 * GB)
    inside = 7 / 16 * GB / (H100["nvlink"] * d["nvlink_all_to_all_efficiency"])
    assert collectives.all_to_all(fast, GB, two) == pytest.approx(inside + latency)


@pytest.mark.parametrize("network", [50 * GB, 10_000 * GB])
def test_one_sided_writes_wait_once_by_hand(network: float) -> None:
    d, two = replace(device(), network_bandwidth=network), Group(ranks=16, per_domain=8)
    inside = 7 / 16 * GB / (H100["nvlink"] * d["deepep_ll_nvlink_efficiency"])
    between = 8 / 16 * GB / (network * d["nic_efficiency"])
    seconds = max(inside, between) + max(d["nic_latency"], d["deepep_ll_latency"])
    assert float(collectives.one_sided(d, np.array(GB), two)) == pytest.approx(seconds)
    alone = Group(ranks=8, per_domain=8)
    inside = 7 / 8 * GB / (H100["nvlink"] * d["deepep_ll_nvlink_efficiency"])
    assert float(collectives.one_sided(d, np.array(GB), alone)) == pytest.approx(
        inside + d["deepep_ll_latency"]
    )


@pytest.mark.parametrize("network", [50 * GB, 10_000 * GB])
def test_dispatch_by_hand(network: float) -> None:
    """Of 16 ranks in two domains, 2 choices reach 16 (1 - (15/16)^2) = 1.9375 GPUs and 1.5 domains."""
    d, two = replace(device(), network_bandwidth=network), Group(ranks=16, per_domain=8)
    sent = 1000 * 14336 * 1.25
    inside = sent * 1.9375 * 7 / 8 / (H100["nvlink"] * d["nvlink_all_to_all_efficiency"])
    between = sent * 1.5 / 2 / (network * d["nic_efficiency"])
    latency = 7 * d["nvlink_latency"] + d["nic_latency"]
    seconds = collectives.dispatch(d, 1000, 14336, Routing(top_k=2), two, skew=1.25)
    assert seconds == pytest.approx(max(inside, between) + latency)


def test_dispatch_inside_one_node_is_an_all_to_all_of_the_copies() -> None:
    d, node = device(), Group(ranks=4, per_domain=4)
    sent = 1000 * 14336.0
    once = collectives.dispatch(d, 1000, 14336, Routing(top_k=2), node)  # 4 (1 - (3/4)^2) = 1.75 copies
    assert once == collectives.all_to_all(d, 1.75 * sent, node)
    assert collectives.dispatch(
        d, 1000, 14336, Routing(top_k=2), node, by="alltoall"
    ) == collectives.all_to_all(d, 2 * sent, node)
    two = Group(ranks=16, per_domain=8)
    assert collectives.dispatch(
        d, 1000, 14336, Routing(top_k=2), two, by="alltoall"
    ) == collectives.all_to_all(d, 2 * sent, two)


TWO, NODE = Group(ranks=16, per_domain=8), Group(ranks=8, per_domain=8)


def test_deepep_inside_a_node_has_its_own_rate_and_start_by_hand() -> None:
    """8 (1 - (7/8)^2) = 1.875 copies, an eighth of which stays."""
    d = device()
    rate = H100["nvlink"] * d["deepep_nvlink_efficiency"]
    seconds = 1000 * 14336 * 1.875 * 7 / 8 / rate + d["deepep_latency"]
    assert collectives.dispatch(d, 1000, 14336, Routing(top_k=2), NODE, by="deepep") == pytest.approx(seconds)


@pytest.mark.parametrize("network", [50 * GB, 10_000 * GB])
def test_deepep_across_nodes_waits_for_the_slower_tier_by_hand(network: float) -> None:
    d = replace(device(), network_bandwidth=network)
    inside = 1000 * 14336 * 1.9375 * 7 / 8 / (H100["nvlink"] * d["deepep_nvlink_efficiency"])
    between = 1000 * 14336 * 1.5 / 2 / (network * d["nic_efficiency"])
    start = 7 * d["nvlink_latency"] + d["nic_latency"] + d["deepep_latency"]
    seconds = collectives.dispatch(d, 1000, 14336, Routing(top_k=2), TWO, by="deepep")
    assert seconds == pytest.approx(max(inside, between) + start)


def test_other_dispatchers_are_the_collectives_that_they_call() -> None:
    d = device()
    sent = 1000 * 14336.0
    whole = 16 * sent
    assert collectives.dispatch(d, 1000, 14336, Routing(top_k=2), TWO, by="deepep-ll") == pytest.approx(
        float(collectives.one_sided(d, np.array(2 * sent), TWO))
    )
    both = collectives.all_gather(d, whole, TWO) + collectives.reduce_scatter(d, whole, TWO)
    assert collectives.dispatch(d, 1000, 14336, Routing(top_k=2), TWO, by="allgather") == pytest.approx(
        both / 2
    )
    for ranks in (NODE, TWO):
        said = collectives.dispatch(d, 1000, 14336, Routing(top_k=2), ranks, by="hybridep")
        assert said == collectives.dispatch(d, 1000, 14336, Routing(top_k=2), ranks)


@pytest.mark.parametrize(
    ("fabric", "all_to_all", "once"),
    [
        ("infiniband", "infiniband_all_to_all_efficiency", "infiniband_all_to_all_efficiency"),
        ("roce", "roce_all_to_all_efficiency", "roce_all_to_all_efficiency"),
        ("efa", "efa_all_to_all_efficiency", "efa_once_efficiency"),
    ],
)
def test_a_fabric_has_its_own_rate_for_tokens_and_for_nothing_else(
    fabric: Fabric, all_to_all: str, once: str
) -> None:
    plain, d = device(), replace(device(), fabric=fabric)
    slow = 8 / 16 * GB / (H100["nic"] * d[all_to_all]) + 7 * d["nvlink_latency"] + d["nic_latency"]
    assert collectives.all_to_all(d, GB, TWO) == pytest.approx(slow)
    single = 8 / 16 * GB / (H100["nic"] * d[once]) + max(d["nic_latency"], d["deepep_ll_latency"])
    assert float(collectives.one_sided(d, np.array(GB), TWO)) == pytest.approx(single)
    sent = 8 * GB * 1.5 / 2 / (H100["nic"] * d[once]) + 7 * d["nvlink_latency"] + d["nic_latency"]
    assert collectives.dispatch(d, 8 * GB, 1, Routing(top_k=2), TWO) == pytest.approx(sent)
    assert collectives.all_reduce(d, GB, TWO) == collectives.all_reduce(plain, GB, TWO)
    assert collectives.all_to_all(d, GB, NODE) == collectives.all_to_all(plain, GB, NODE)


def test_no_tokens_and_one_rank_take_no_dispatch() -> None:
    d = device()
    assert collectives.dispatch(d, 0, 14336, Routing(top_k=2), Group(ranks=16, per_domain=8)) == 0
    assert collectives.dispatch(d, 1000, 14336, Routing(top_k=2), Group(ranks=1, per_domain=1)) == 0


def test_a_broadcast_runs_at_the_slower_tier_by_hand() -> None:
    d = device()
    fast, nic = H100["nvlink"] * d["nvlink_efficiency"], H100["nic"] * d["nic_efficiency"]
    inside = 7 * d["nvlink_latency"] + GB / fast
    assert broadcast(d, GB, Group(ranks=8, per_domain=8)) == pytest.approx(inside)
    across = d["nvlink_latency"] + 2 * d["nic_latency"] + GB / min(fast, 2 * nic)  # 2 NICs enter a node
    assert 2 * nic < fast
    assert broadcast(d, GB, Group(ranks=8, per_domain=2)) == pytest.approx(across)
    bundle = 7 * d["nvlink_latency"] + d["nic_latency"] + GB / min(fast, 8 * nic)
    assert broadcast(d, GB, Group(ranks=16, per_domain=8)) == pytest.approx(bundle)


def test_no_bytes_are_sent_in_no_time_and_inside_a_node_at_nvlink_speed() -> None:
    d = device()
    assert collectives.p2p(d, 0, True) == 0
    inside = d["nvlink_latency"] + GB / (H100["nvlink"] * d["nvlink_efficiency"])
    assert collectives.p2p(d, GB, False) == pytest.approx(inside)


def test_ranks_cross_a_domain_when_their_span_is_longer() -> None:
    d = device()
    assert not collectives.crosses(d, 4, 2)
    assert collectives.crosses(d, 5, 2)
    assert not collectives.crosses(d, 1, 16)


def test_a_group_of_nine_in_domains_of_four_touches_three() -> None:
    assert Group(ranks=9, per_domain=4).domains == 3
    assert group(4, 16, 8).per_domain == 1


@pytest.mark.parametrize("collective", ALL)
def test_two_ranks_and_one_byte_take_time(collective) -> None:
    assert collective(device(), 0.5, Group(ranks=2, per_domain=2)) > 0
    assert collective(device(), 0.5, Group(ranks=2, per_domain=1)) > device()["nic_latency"]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_one_domain_is_timed_by_its_curve(op: str) -> None:
    d = device()
    seconds = getattr(collectives, op)(d, 1e8, Group(ranks=4, per_domain=4))
    assert seconds == float(d.curves.collective(op, 1e8, 4))


def test_half_a_token_and_two_ranks_are_dispatched() -> None:
    d = device()
    assert collectives.dispatch(d, 0.5, 14336, Routing(top_k=2), Group(ranks=2, per_domain=2)) > 0
    assert collectives.p2p(d, 0.5, True) > d["nic_latency"]


RANKS = [(1, 1), (2, 1), (8, 1), (8, 2), (16, 4), (64, 1)]
"""Ranks and the stride between them: alone, inside a domain of eight and across several."""


@pytest.mark.parametrize("collective", ALL[:4])
def test_a_column_of_groups_costs_what_each_costs_alone(collective) -> None:
    sizes = [0.0, 1e5, 1e8]
    rows = [(size, *place) for size in sizes for place in RANKS]
    size, ranks, stride = (np.array(column) for column in zip(*rows, strict=True))
    column = collective(device(), size, group(ranks, stride, 8))
    alone = [collective(device(), size, group(ranks, stride, 8)) for size, ranks, stride in rows]
    assert column.tolist() == alone
    assert len(set(alone)) > 9


@pytest.mark.parametrize("by", [None, "alltoall", "deepep", "deepep-ll", "hybridep", "allgather"])
def test_a_column_of_tokens_is_dispatched_as_each_is_alone(by) -> None:
    routing = Routing(top_k=8, groups=8, token_groups=4)
    tokens, places = [100.0, 4096.0], [place for place in RANKS if place[0] < 64]
    rows = [(count, *place) for count in tokens for place in places]
    count, ranks, stride = (np.array(column) for column in zip(*rows, strict=True))
    column = collectives.dispatch(device(), count, 4096.0, routing, group(ranks, stride, 8), skew=1.5, by=by)
    alone = [
        collectives.dispatch(device(), count, 4096.0, routing, group(ranks, stride, 8), skew=1.5, by=by)
        for count, ranks, stride in rows
    ]
    assert column.tolist() == alone
    assert len(set(alone)) == 9
