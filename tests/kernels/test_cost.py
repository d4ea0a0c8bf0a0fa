from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhfsim.kernels.cost import Cost, part, total
from rlhfsim.kernels.device import inverse_of, spread_of
from rlhfsim.kernels.devices import device_of
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient

GEMM = part("compute", 4.0, "gemm", spread=(0.5, 2.0))
AGAIN = part("compute", 2.0, "gemm", spread=(0.5, 2.0))
READ = part("hbm", 5.0, "memory", spread=(0.2, 1.8))
COST = Cost(parts=(GEMM, READ, AGAIN))


def test_seconds_add_up_by_resource() -> None:
    assert COST.seconds == 11
    assert COST.by_resource() == {"compute": 6, "hbm": 5}
    assert COST.bound_by == "compute"
    assert COST.rests_on == ("gemm", "memory")
    assert Cost().bound_by == "overhead"
    assert (GEMM.low, GEMM.high) == (2, 8)


def test_parts_on_one_coefficient_move_together_and_others_independently() -> None:
    """Down 3 and 4 seconds: 5 together; up 6 and 4: the root of 52."""
    assert COST.interval == (6, pytest.approx(11 + math.sqrt(52)))
    wide = Cost(parts=(part("hbm", 1.0, "a", spread=(-2.0, 1.0)),))
    assert wide.interval == (0, 1)


def test_costs_add_up_and_scale() -> None:
    twice = COST + COST
    assert (twice.seconds, len(twice.parts)) == (22, 6)
    assert COST.scaled(3).seconds == 33
    assert COST.scaled(1) is COST
    assert total([COST, COST, COST]).seconds == 33
    assert COST.scaled(3).parts[1].spread == READ.spread


def test_a_divisor_spreads_the_other_way() -> None:
    known = Coefficient(value=4.0, low=2.0, high=10.0, source="a test")
    assert spread_of(known) == (0.5, 2.5)
    assert inverse_of(known) == (0.4, 2.0)
    assert spread_of(replace(known, value=0.0, low=0.0)) == (1.0, 1.0)


def test_only_kernels_of_another_gpu_that_was_not_calibrated_are_less_certain() -> None:
    def device(name: str, **changes):
        return device_of(NodeGroup(profile=replace(load_profile(name), **changes), gpus=8, gpus_per_node=8))

    assert device("h100_sxm").borrowed((0.8, 1.5)) == (0.8, 1.5)
    lent = device("h20_sxm")
    widen = float(lent.curves.borrowed["widen"])
    assert widen > 1
    assert lent.borrowed((0.8, 1.5)) == (0.8 / widen, 1.5 * widen)
