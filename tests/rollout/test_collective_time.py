"""Collectives between the GPUs of a replica: which of an engine's all-reduces a group can use."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfsim.kernels.devices import device_on
from rlhfsim.rollout.collective_time import collective
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.units import KIB

SIZE = np.array([64.0 * KIB])
RACK = device_on(Cluster(node_groups=(node_group("gb200", 64),)), 0, "megatron")


def seconds(ranks: int) -> float:
    return float(np.asarray(collective(RACK, "all_reduce", SIZE, ranks).seconds)[0])


def test_an_engines_own_all_reduce_is_used_inside_a_node_and_nccl_beyond_it_in_one_nvlink_domain() -> None:
    assert (RACK.gpus_per_node, RACK.domain) == (4, 64)
    assert seconds(4) == pytest.approx(RACK.curves.custom_all_reduce(SIZE, 4)[0])
    assert seconds(8) == pytest.approx(RACK.curves.collective("all_reduce", SIZE, 8)[0])
    assert seconds(8) > 2 * RACK.curves.custom_all_reduce(SIZE, 8)[0]


def test_what_the_lost_kernel_costs_is_of_the_size_that_was_measured() -> None:
    """10.7 us an all-reduce: Llama-4 Scout BF16, TP8 over two GB300 nodes, 220.66 and 180.03 tokens/s at one
    request, 2 x 48 all-reduces a token (sgl-project/sglang issue 36429)."""
    measured = (1 / 180.03 - 1 / 220.66) / 96
    one = np.array([5120 * 2.0])
    lost = RACK.curves.collective("all_reduce", one, 8)[0] - RACK.curves.custom_all_reduce(one, 8)[0]
    assert measured < lost < 2 * measured
