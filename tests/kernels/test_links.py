from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.kernels.cost import part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import (
    Rate,
    Stage,
    deepspeed_chat_volume,
    gather_rate,
    handled,
    hbm,
    host_rate,
    moved,
    network,
    pageable_rate,
    pipelined,
    read_rate,
    scale_up,
    serial,
    vanilla_volume,
    write_rate,
)
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.units import GB

M = 140 * GB


def device(gpu: str = "h100_sxm", oversubscription: float = 1.0) -> Device:
    return device_of(NodeGroup(profile=load_profile(gpu), gpus=16, gpus_per_node=8), oversubscription)


def stage(seconds: float) -> Stage:
    return (part("network", seconds, "c"),)


def test_table_2_of_hybridflow_for_tp8_pp1_dp2_to_tp2() -> None:
    # arXiv 2409.19256, Table 2: t=8, p=1, d=2, t_g=2, p_g=1
    assert deepspeed_chat_volume(M, 8, 1, 2) == pytest.approx(15 / 16 * M)
    assert vanilla_volume(M, 8, 1) == pytest.approx(7 / 8 * M)


def test_table_2_of_hybridflow_with_pipeline_on_both_sides() -> None:
    assert deepspeed_chat_volume(M, 4, 2, 3) == pytest.approx(23 / 24 * M)
    assert vanilla_volume(M, 4, 2) == pytest.approx(7 / 8 * M)


def test_one_rank_gathers_nothing() -> None:
    assert deepspeed_chat_volume(M, 1, 1, 1) == 0
    assert vanilla_volume(M, 1, 1) == 0


def test_a_pipeline_is_its_slowest_stage_plus_the_filling() -> None:
    # 4 buckets, stages of 4, 8 and 2 s: (4 + 8 + 2) / 4 to fill, then 3/4 of the slowest
    assert pipelined([stage(4), stage(8), stage(2)], 4).seconds == pytest.approx(3.5 + 6)


def test_a_pipeline_of_one_bucket_is_serial() -> None:
    stages = [stage(4), stage(8)]
    assert pipelined(stages, 1).seconds == pytest.approx(serial(stages).seconds) == 12


def test_many_buckets_leave_only_the_slowest_stage() -> None:
    assert pipelined([stage(4), stage(8)], 1e9).seconds == pytest.approx(8)


def test_zero_bytes_take_no_time() -> None:
    assert moved(0, network(device())).seconds == 0


def test_a_slow_rate_is_the_long_end_of_the_interval() -> None:
    link = network(device())
    found = moved(link.value, link)
    assert found.seconds == pytest.approx(1)
    assert found.low == pytest.approx(1 / link.spread[1])
    assert found.high == pytest.approx(1 / link.spread[0])


def test_a_gather_in_one_domain_runs_at_nvlink_speed_and_across_at_the_nics_it_has() -> None:
    h100 = device()
    assert gather_rate(h100, 8).value == scale_up(h100).value
    assert gather_rate(h100, 16).value == pytest.approx(min(scale_up(h100).value, 8 * network(h100).value))
    assert gather_rate(h100, 16, network(h100).scaled(0.5)).value == pytest.approx(4 * network(h100).value)


def test_an_oversubscribed_fabric_slows_the_network_only() -> None:
    thin = device(oversubscription=2.0)
    assert network(thin).value == pytest.approx(network(device()).value / 2)
    assert scale_up(thin).value == scale_up(device()).value


def test_gpus_that_copy_at_once_share_the_host() -> None:
    h100 = device()
    alone, all_eight = host_rate(h100, 1), host_rate(h100, 8)
    assert alone.value == pytest.approx(h100.profile.pcie.value * h100["pcie_efficiency"])
    assert all_eight.value == pytest.approx(alone.value * h100["pcie_shared_fraction"])


def test_very_many_copying_gpus_are_bound_by_host_memory() -> None:
    assert host_rate(device(), 64).resource == "host"


def test_chip_to_chip_links_have_no_shared_port() -> None:
    gb200 = device("gb200_nvl72")
    assert host_rate(gb200, 1).rests_on in ("pcie_efficiency", "host_copy_efficiency")
    assert host_rate(gb200, 2).value >= host_rate(device(), 2).value


def test_pinned_copies_of_a_node_by_hand() -> None:
    """PCIe 5: 63 GB/s times its efficiency, less where neighbours share a port; host memory over all."""
    d = device()
    lane = d.profile.pcie.value * d["pcie_efficiency"]
    assert host_rate(d, 1).value == pytest.approx(lane)
    assert host_rate(d, 2).value == pytest.approx(lane * d["pcie_shared_fraction"])
    memory = d.profile.node.host_bandwidth.value * d["host_copy_efficiency"]
    assert host_rate(d, 1000).value == pytest.approx(memory / 1000)
    assert host_rate(d) == host_rate(d, 8)


def test_ordinary_memory_is_staged_at_a_fraction_of_the_pinned_rate() -> None:
    d = device()
    assert pageable_rate(d, 2).value == host_rate(d, 2).value * d["pageable_fraction"]
    assert pageable_rate(d, 2).spread == d.spread("pageable_fraction")


@pytest.mark.parametrize("way", [read_rate, write_rate])
def test_checkpoints_go_to_the_disk_that_is_asked_for(way) -> None:
    d = device()
    shared = d.profile.node.shared_storage.value * d["shared_storage_efficiency"]
    assert way(d, shared=True).value == pytest.approx(shared)
    name = "local_storage_write" if way is write_rate else "local_storage_read_efficiency"
    local = d.profile.node.local_storage.value * d[name]
    assert way(d, shared=False).value == pytest.approx(local)


def test_moved_bytes_take_bytes_over_rate_and_nothing_takes_nothing() -> None:
    link = Rate(value=4.0, resource="pcie", rests_on="c", spread=(0.5, 2.0))
    assert moved(12, link).seconds == 3
    assert moved(12, link).spread == (0.5, 2.0)
    assert moved(0, link).seconds == 0
    assert moved(12, Rate(value=4.0, resource="pcie", rests_on="c", spread=(0.0, 4.0))).spread == (0.25, 1.0)
    assert moved(12, link.scaled(2)).seconds == 1.5


def test_things_cost_their_latency_each_and_none_cost_nothing() -> None:
    d = device()
    assert handled(3, d, "nic_latency").seconds == 3 * d["nic_latency"]
    assert handled(-3, d, "nic_latency").seconds == 0


def test_a_pipeline_of_four_buckets_by_hand() -> None:
    """(1 + 3 + 2) / 4 to fill, and three quarters of the slowest."""
    assert pipelined([stage(1), stage(3), stage(2)], 4).seconds == pytest.approx(1.5 + 0.75 * 3)
    assert len(pipelined([stage(1), stage(0)], 4).parts) == 1
    assert len(serial([stage(1), stage(0)]).parts) == 1


def test_a_gather_takes_the_slower_of_nvlink_and_its_nics() -> None:
    d = device()
    assert gather_rate(d, 16).value == pytest.approx(8 * network(d).value)
    assert gather_rate(replace(d, domain=1), 16).value == network(d).value
    assert gather_rate(d, 8) == scale_up(d)
    fast = replace(d, network_bandwidth=1e15)
    assert gather_rate(fast, 16).value == scale_up(d).value


def test_device_memory_is_the_datasheet_times_its_efficiency() -> None:
    d = device()
    assert hbm(d).value == d.profile.hbm.value * d["hbm_efficiency"]
