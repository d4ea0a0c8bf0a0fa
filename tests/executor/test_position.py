"""Asynchronous runs train prompts out of order; an interrupted one goes on with exactly those that are
left."""

from __future__ import annotations

from executor.algorithms.iteration import Position


def test_prompts_trained_out_of_order_are_remembered_until_the_gap_before_them_is_closed() -> None:
    position = Position()
    position.add([0, 1, 3, 5])
    assert (position.prompts, position.ahead) == (2, {3, 5})
    assert [group for group in range(7) if group not in position] == [2, 4, 6]
    position.add([2])
    assert (position.prompts, position.ahead) == (4, {5})


def test_copy_does_not_follow_the_original() -> None:
    position = Position(2, {4})
    copy = position.copy()
    position.add([2, 3])
    assert (copy.prompts, copy.ahead) == (2, {4})
