"""Which rank of a training engine does what: pipeline stage, data-parallel replica, tensor-parallel shard.

The order is DeepSpeed's own, both of its pipeline grid (axes pipe, data, model) and of AutoTP's mesh (axes
data, tensor): stages are slowest, shards fastest, so that the shards of a layer sit in one node.

    rank = (pp_index * dp + dp_index) * tp + tp_index

Ranks with one `dp` index get the same samples.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout


class Coordinates(NamedTuple):
    """Indices of one rank, each from 0."""

    pp: int
    """Pipeline stage; 0 holds the embedding, the last one the head."""
    dp: int
    """Data-parallel replica: which samples."""
    tp: int
    """Shard of every sharded matrix."""


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """Indices of `rank` in `layout`."""
    assert 0 <= rank < world_size(layout)
    pair, tp = divmod(rank, layout.tp)
    pp, dp = divmod(pair, layout.dp)
    return Coordinates(pp=pp, dp=dp, tp=tp)


def rank_at(layout: Layout, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
    """The rank with these indices: inverse of `coordinates`."""
    return (pp * layout.dp + dp) * layout.tp + tp


def world_size(layout: Layout) -> int:
    """Ranks of an engine.

    Raises:
        RlhfsimError: context parallelism, which no engine of the executor has.
    """
    if layout.cp > 1:
        raise RlhfsimError(
            "executor-context-parallel",
            f"the executor does not run context parallelism, the layout has cp={layout.cp}",
            help="use cp: 1 with more tp, pp or dp",
        )
    return layout.tp * layout.pp * layout.dp


def leaders(layout: Layout) -> tuple[int, ...]:
    """One rank a data-parallel replica (its first stage, first shard): whose results coordination reads."""
    return tuple(rank_at(layout, dp=dp) for dp in range(layout.dp))
