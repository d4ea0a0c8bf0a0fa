"""Links shared by what uses them at the same time, against rates and times worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.simulation.shared_links import SharedLinks, Topology, Use, fair_rates, use_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.placement import ResourcePool


def timed(*flows: tuple[float, float, Use]) -> tuple[list[float], SharedLinks]:
    """When each of (start, seconds, use) ends."""
    env = simpy.Environment()
    shared_links = SharedLinks(env)
    ends = [0.0] * len(flows)

    def run(i: int, start: float, seconds: float, use: Use) -> Any:
        yield env.timeout(start)
        yield shared_links.start(seconds, use).done
        ends[i] = env.now

    for i, flow in enumerate(flows):
        env.process(run(i, *flow))
    env.run()
    return ends, shared_links


def test_a_flow_alone_takes_exactly_its_seconds() -> None:
    assert timed((0.0, 0.1, {"nic:a": 1.0}))[0] == [0.1]
    assert timed((0.0, 12.3, {}))[0] == [12.3]


def test_flows_on_links_of_their_own_take_exactly_their_seconds() -> None:
    ends, shared_links = timed((0.0, 0.3, {"nic:a": 0.9}), (0.0, 0.7, {"nic:b": 1.0}))
    assert ends == [0.3, 0.7]
    assert shared_links.lost == {}


def test_flows_that_fill_a_link_exactly_do_not_wait() -> None:
    ends, shared_links = timed((0.0, 3.0, {"host:a": 0.5}), (0.0, 7.0, {"host:a": 0.5}))
    assert ends == [3.0, 7.0]
    assert shared_links.lost == {}


def test_two_flows_at_six_tenths_of_one_link() -> None:
    # 0.6 x + 0.6 x = 1, so x = 1 / 1.2 and 12 s of work take 14.4 s
    ends, shared_links = timed((0.0, 12.0, {"nic:a": 0.6}), (0.0, 12.0, {"nic:a": 0.6}))
    assert ends == [pytest.approx(14.4), pytest.approx(14.4)]
    assert shared_links.lost == {"nic:a": pytest.approx(4.8)}


def test_rates_change_when_a_flow_starts_and_when_one_ends() -> None:
    # alone until 3 s (9 s left); both at 1/1.2 until B's 6 s are done, 7.2 s later at 10.2 s;
    # A has done 6 of its 9 s by then and ends alone 3 s later
    ends, _ = timed((0.0, 12.0, {"nic:a": 0.6}), (3.0, 6.0, {"nic:a": 0.6}))
    assert ends == [pytest.approx(13.2), pytest.approx(10.2)]


def test_a_flow_that_is_held_elsewhere_leaves_its_room_to_the_others() -> None:
    # link b: 1.0 x2 + 1.0 x3 <= 1 holds both at 1/2; link a then has 1 - 0.5 left for flow 1,
    # which needs 0.8 of it: x1 = 0.625
    found = fair_rates([{"a": 0.8}, {"a": 1.0, "b": 1.0}, {"b": 1.0}])
    assert [rate for rate, _ in found] == [pytest.approx(0.625), pytest.approx(0.5), pytest.approx(0.5)]
    assert [link for _, link in found] == ["a", "b", "b"]


def test_a_flow_that_needs_little_of_a_full_link_waits_as_long_as_the_others() -> None:
    # max-min fair in progress, not in bytes: 0.2 x + 1.0 x = 1
    found = fair_rates([{"a": 0.2}, {"a": 1.0}])
    assert [rate for rate, _ in found] == [pytest.approx(1 / 1.2)] * 2


def test_a_stopped_flow_says_what_is_left_and_frees_its_links() -> None:
    env = simpy.Environment()
    shared_links = SharedLinks(env)
    first, second = shared_links.start(10.0, {"l": 1.0}), shared_links.start(10.0, {"l": 1.0})
    left: list[float] = []

    def stop() -> Any:
        yield env.timeout(4)
        left.append(shared_links.stop(first))

    env.process(stop())
    env.run(until=second.done)
    assert left == [pytest.approx(8)]  # 4 s at half rate
    assert env.now == pytest.approx(4 + 8)
    assert not first.done.triggered


def test_the_delay_of_a_flow_becomes_a_part_of_its_cost() -> None:
    env = simpy.Environment()
    shared_links = SharedLinks(env)
    flows = [shared_links.start(12.0, {"nic:a": 0.6}) for _ in range(2)]
    env.run()
    (extra,) = flows[0].contention
    assert (extra.resource, extra.rests_on) == ("network", "contention")
    assert extra.seconds == pytest.approx(2.4)


USES = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=6
)


@given(USES)
def test_rates_are_feasible_and_max_min_fair(uses: list[dict[str, float]]) -> None:
    found = fair_rates(uses)
    load = {
        link: sum(rate * use.get(link, 0.0) for (rate, _), use in zip(found, uses, strict=True))
        for link in "abc"
    }
    assert all(total <= 1 + 1e-9 for total in load.values())
    for rate, link in found:
        assert 0 < rate <= 1
        if link is None:
            assert rate == 1
        else:  # its link is full, and nobody on it is faster: to raise it lowers a slower or equal one
            assert load[link] == pytest.approx(1)
            others = [r for (r, _), use in zip(found, uses, strict=True) if use.get(link)]
            assert rate == pytest.approx(max(others))


FLOWS = st.lists(
    st.tuples(
        st.floats(0, 20),
        st.floats(0.1, 20),
        st.dictionaries(st.sampled_from("abc"), st.floats(0.05, 1.0), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(FLOWS)
def test_flows_take_their_seconds_or_longer_and_no_link_does_more_than_its_time(
    flows: list[tuple[float, float, dict[str, float]]],
) -> None:
    ends, shared_links = timed(*flows)
    waited = 0.0
    for (start, seconds, _), end in zip(flows, ends, strict=True):
        assert end - start >= seconds * (1 - 1e-9)
        waited += end - start - seconds
    assert waited == pytest.approx(sum(shared_links.lost.values()), abs=1e-6)
    for link in "abc":
        begin = min((s for s, _, use in flows if link in use), default=0.0)
        end = max((e for (_, _, use), e in zip(flows, ends, strict=True) if link in use), default=0.0)
        assert sum(s * use.get(link, 0.0) for _, s, use in flows) <= (end - begin) * (1 + 1e-9)


def test_a_seed_of_events_gives_the_same_times_twice() -> None:
    flows = [(float(i % 3), 5.0 + i, {"a": 0.3 + 0.1 * i, "b": 0.5}) for i in range(6)]
    assert timed(*flows)[0] == timed(*flows)[0]


# --- which links a call uses ------------------------------------------------------------------------

H100 = Cluster(node_groups=(node_group("h100", 32),))


def topology(cluster: Cluster, **pools: tuple[int, int]) -> Topology:
    return Topology(cluster, [ResourcePool(name=n, start=s, gpus=g) for n, (s, g) in pools.items()])


def test_a_cost_needs_a_link_for_the_share_of_time_bound_by_it() -> None:
    cost = Cost(parts=(part("compute", 6.0, "x"), part("network", 3.0, "x"), part("network", 1.0, "y")))
    links = topology(H100, a=(0, 16)).links(("a",))
    assert use_of(cost, links) == {"nic:a": pytest.approx(0.4)}
    assert use_of(Cost(), links) == {}


def test_a_weight_sync_uses_the_links_of_both_pools() -> None:
    links = topology(H100, a=(0, 16), b=(16, 16)).links(("a", "b"))
    use = use_of(Cost(parts=(part("network", 2.0, "nic_efficiency"),)), links)
    assert use == {"nic:a": 1.0, "nic:b": 1.0}


def test_two_pools_on_one_node_have_half_of_its_host_memory_each() -> None:
    both = topology(H100, a=(0, 12), b=(12, 4))
    copy = Cost(parts=(part("host", 5.0, "host_copy_efficiency"),))
    assert use_of(copy, both.links(("a",))) == {"host:node 1": 0.5, "host:a": 1.0}
    assert use_of(copy, both.links(("b",))) == {"host:node 1": 0.5}


def test_the_shared_file_system_is_one_link_and_disks_belong_to_nodes() -> None:
    both = topology(H100, a=(0, 8), b=(8, 8))
    shared = Cost(parts=(part("storage", 5.0, "shared_storage_efficiency"),))
    local = Cost(parts=(part("storage", 5.0, "local_storage_write"),))
    for pool in "ab":
        assert use_of(shared, both.links((pool,))) == {"storage": 1.0}
        assert use_of(local, both.links((pool,))) == {f"disk:{pool}": 1.0}


def test_an_oversubscribed_spine_is_shared_by_all_in_proportion_to_their_gpus() -> None:
    thin = Cluster(node_groups=H100.node_groups, oversubscription=4)
    both = topology(thin, a=(0, 24), b=(24, 8))
    wire = Cost(parts=(part("network", 1.0, "nic_efficiency"),))
    uses = [use_of(wire, both.links((pool,))) for pool in "ab"]
    assert uses == [{"nic:a": 1.0, "spine": 0.75}, {"nic:b": 1.0, "spine": 0.25}]
    # each is priced at a quarter of its NIC already: side by side they do not wait again
    assert [rate for rate, _ in fair_rates(uses)] == [1.0, 1.0]
    # a sync beside the traffic of the pool that it reads from does
    sync = use_of(wire, both.links(("a", "b")))
    assert [rate for rate, _ in fair_rates([*uses, sync])] == [pytest.approx(0.5)] * 3


@pytest.mark.parametrize(("start", "gpus"), list(itertools.product((0, 3, 8), (1, 5, 8, 13, 16))))
def test_shares_of_nodes_add_up_to_the_gpus_of_the_pool(start: int, gpus: int) -> None:
    links = topology(H100, a=(start, gpus)).links(("a",))["host"]
    whole = sum(1 for node in range(4) if start <= 8 * node and 8 * (node + 1) <= start + gpus)
    partly = sum(share for name, share in links.items() if name != "host:a")
    assert ("host:a" in links) == (whole > 0)
    assert 8 * (partly + whole) == pytest.approx(gpus)
