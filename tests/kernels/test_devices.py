"""From a pool to its device: what is kept for a profile."""

from dataclasses import replace

from rlhfsim.kernels.devices import device_of, interned, with_engine
from rlhfsim.specs.hardware.profiles import parse_cluster


def test_a_profile_that_is_read_again_has_the_same_device_whatever_its_rent() -> None:
    one, two = interned(parse_cluster(8, "h100")), interned(parse_cluster(8, "h100", price=9.0))
    assert device_of(one.node_groups[0]) is device_of(two.node_groups[0])


def test_another_coefficient_is_another_device() -> None:
    cluster = interned(parse_cluster(8, "h100"))
    pool = cluster.node_groups[0]
    profile = pool.profile
    changed = dict(profile.coefficients)
    name = "hbm_efficiency"
    changed[name] = replace(changed[name], value=changed[name].low)
    other = interned(
        replace(cluster, node_groups=(replace(pool, profile=replace(profile, coefficients=changed)),))
    )
    assert device_of(other.node_groups[0]) is not device_of(pool)


def test_a_device_has_the_kernels_of_an_inference_engine_once() -> None:
    device = device_of(parse_cluster(8, "h100").node_group)
    sglang = with_engine(device, "sglang")
    assert sglang is with_engine(device, "sglang")
    assert sglang is not device
    assert sglang["nic_latency"] == device["nic_latency"]
    assert with_engine(device, "vllm") is device
