from __future__ import annotations

import pytest

from executor.engines.mesh import Coordinates, coordinates, leaders, rank_at, world_size
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout


def test_shards_are_neighbours_and_stages_are_far_apart() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    found = [coordinates(rank, layout) for rank in range(8)]
    assert found[:4] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(0, 1, 1),
    ]
    assert found[4:] == [Coordinates(1, dp, tp) for _, dp, tp in found[:4]]


def test_rank_at_undoes_coordinates() -> None:
    layout = Layout(pp=3, dp=2, tp=4)
    assert [rank_at(layout, **coordinates(rank, layout)._asdict()) for rank in range(24)] == list(range(24))


def test_ranks_of_one_replica_share_samples() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert [rank for rank in range(8) if coordinates(rank, layout).dp == 1] == [2, 3, 6, 7]
    assert leaders(layout) == (0, 2)


def test_context_parallelism_is_refused_by_name() -> None:
    with pytest.raises(RlhfsimError, match="executor-context-parallel"):
        world_size(Layout(cp=2))
