"""FLOP and bytes of each kind of kernel, by hand on numbers that are all different."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhfsim.elementwise import most as largest
from rlhfsim.kernels.work import KINDS, Demand, roof


@pytest.mark.parametrize(
    ("kind", "size", "at", "flop", "hbm"),
    [
        # 2 m n k; one byte for each of k (m + n) operands, two for each of m n results
        ("gemm", 1.0, (2.0, 3.0, 5.0), 60, 5 * 5 + 2 * 6),
        # scores and values: 2 x 2 w q d c; keys and values of w c d, queries and outputs of w q d in BF16
        ("decode", 1.0, (2.0, 3.0, 5.0, 7.0), 4 * 210, 2 * 42 + 2 * 2 * 70),
        ("decode", 2.0, (2.0, 3.0, 5.0, 7.0), 4 * 210, 2 * 84 + 2 * 2 * 70),
        # half of 4 w q d s^2; 2 q + 2 tensors of w s d in BF16
        ("prefill", 2.0, (2.0, 3.0, 5.0, 7.0), 2 * 2 * 5 * 7 * 9, 2 * 42 * 12),
        # scores over 512 + 64 and values over 512; the cache is read once for all heads
        ("mla_decode", 1.0, (2.0, 3.0, 5.0), 2 * 5 * 1088 * 6, 6 * 576 + 2 * 10 * 1088),
        # half of 2 (192 + 128) a b s^2; queries and keys of 192, values and outputs of 128, all heads
        ("mla_prefill", 2.0, (2.0, 3.0, 5.0), 320 * 5 * 2 * 9, 2 * 2 * 30 * 320),
        # 3 matrices of f x h for 6 rows; 3 (1 - 1/e) of 3 experts touched; half of the rows in and out
        (
            "moe",
            1.0,
            (2.0, 3.0, 5.0, 7.0, 0.5),
            6 * 6 * 35,
            3 * 35 * 3 * (1 - 1 / math.e) + 2 * 2 * 7 * 6 / 2,
        ),
        ("moe", 1.0, (2.0, 3.0, 5.0, 7.0, 4.0), 6 * 6 * 35, 3 * 35 * 3 * (1 - 1 / math.e) + 2 * 2 * 7 * 6),
    ],
)
def test_a_kernel_does_the_work_that_is_counted_by_hand(kind, size, at, flop, hbm) -> None:
    demand = KINDS[kind].demand(size, *at)
    assert (demand.flop, float(demand.hbm), demand.link) == (flop, pytest.approx(hbm), 0)


def test_three_quarters_of_a_buffer_leave_one_of_four_gpus() -> None:
    assert KINDS["collective"].demand(2.0, 4.0, 100.0) == Demand(0, 0, 75)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"collective"}))
def test_beyond_its_table_a_kernel_grows_as_its_flop_do(kind: str) -> None:
    """The power of time in a coordinate is that of the FLOP: efficiency stays what it was at the last knot."""
    point = [64.0] * len(KINDS[kind].axes)
    base = KINDS[kind].demand(2.0, *point).flop
    for axis, power in enumerate(KINDS[kind].growth):
        longer = [x * 2 if i == axis else x for i, x in enumerate(point)]
        assert KINDS[kind].demand(2.0, *longer).flop == base * 2**power


def test_beyond_its_table_a_collective_grows_with_its_bytes_alone() -> None:
    assert KINDS["collective"].growth == (0, 1)


def test_a_roofline_is_the_slowest_of_compute_memory_and_link() -> None:
    demand = Demand(60.0, 60.0, 60.0)
    assert roof(demand, 2.0, 10.0, 10.0) == 30
    assert roof(demand, 10.0, 3.0, 10.0) == 20
    assert roof(demand, 10.0, 10.0, 4.0) == 15


def test_the_largest_of_arrays_is_taken_element_by_element() -> None:
    assert largest(np.array([1.0, 5.0]), 3.0).tolist() == [3, 5]
    assert largest(1.0, np.array([0.0, 4.0]), 2.0).tolist() == [2, 4]
    assert largest(1.0, 3.0, 2.0) == 3
