from __future__ import annotations

import numpy as np
import pytest

from lab.fits.kernels import corners
from rlhfsim.kernels.grid import FEW, Grid, decode, encode

AXES = (np.array([0.0, 1.0, 3.0]), np.array([2.0, 4.0]))
GRID = Grid(AXES, (1.0, 2.0), np.log(np.array([[1.0, 4.0], [2.0, 8.0], [16.0, 32.0]])))


@pytest.mark.parametrize(
    ("point", "seconds"),
    [
        ((1, 4), 1),  # the first knot
        ((1, 8), 2),  # halfway in the logarithm of 4 to 16: root of 1 x 4
        ((2**0.25, 4), 2**0.25),
        ((4, 4), 32**0.5),  # halfway of 2 to 8: root of 2 x 16
        ((4, 8), (2 * 8 * 16 * 32) ** 0.25),
        ((8, 16), 32),  # the last knots
        ((16, 16), 64),  # twice as far: power 1 in the first coordinate
        ((8, 64), 32 * 16),  # four times as far: power 2 in the second
        ((0.5, 1), 1),  # below both axes: constant
        ((0, 0), 1),  # no logarithm, still the first knot
    ],
)
def test_time_between_knots_is_linear_in_logarithms_and_a_power_beyond(point, seconds) -> None:
    assert GRID.at(point) == pytest.approx(seconds)
    many = GRID(np.full(FEW + 1, point[0]), point[1])
    assert many.shape == (FEW + 1,)
    assert set(many.tolist()) == {GRID.at(point)}  # to the last bit


@pytest.mark.parametrize("rows", [3, 30])
def test_points_keep_their_shape_and_order(rows: int) -> None:
    x, y = np.geomspace(0.5, 40, rows)[:, None], np.array([3.0, 30.0])
    each = [[GRID.at((float(a), float(b))) for b in y] for a in x[:, 0]]
    assert GRID(x, y).tolist() == each


def test_weights_of_the_corners_of_a_cell_by_hand() -> None:
    # one quarter of the way from 1 to 3, half of the way from 2 to 4: cell of rows 1, 2 and columns 0, 1
    index, weights = corners(AXES, [np.array([1.5]), np.array([3.0])])
    assert dict(zip(index[0].tolist(), weights[0].tolist(), strict=True)) == {
        2: 0.75 * 0.5,
        3: 0.75 * 0.5,
        4: 0.25 * 0.5,
        5: 0.25 * 0.5,
    }
    index, weights = corners(AXES, [np.array([-7.0, 9.0]), np.array([2.0, 4.0])])
    assert index[:, weights[0] == 1].tolist()[0] == [0]
    assert index[1, weights[1] == 1].tolist() == [5]


def test_a_number_is_two_digits_of_base_36() -> None:
    assert encode(np.array([0.0, 35.4, 36.0, 1295.0, 9999.0, -3.0])) == "000z10zzzz00"
    assert decode("000z10zz").tolist() == [0, 35, 36, 1295]
