"""What a search looks at of the space of its request, and how far it goes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from rlhfsim.frozen import frozen
from rlhfsim.search.options import Wish
from rlhfsim.search.space import Partition
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.iteration import Iteration

Steps = dict[Placement, tuple[Iteration, float]]
"""Simulated steps of plans, and up to which cutoff they say enough: inf where all of it was simulated."""


@frozen
class Scope:
    """What of a space is searched where the request cannot say so, and what ends the search."""

    below: float = inf
    """What a plan must beat, since one of another space reaches it."""
    only: Callable[[Partition], bool] | None = None
    """Ways to share the GPUs that may compete."""
    sizes: tuple[int, ...] | None = None
    """GPUs of each pool."""
    wishes: tuple[Wish, ...] = ()
    """What options of a role must be to compete; asked with prices only (`what_if.engine.search_of`)."""
    rivals: bool = True
    """Whether good plans of other kinds are wanted too, the best one or not."""
    work: float = inf
    """Options that may be priced, where that is less than a search may price (`branch_and_bound.WORK`)."""
    tolerance: float = 0.0
    """Share of the best plan by which another may be shorter, once it is proven."""
    steps: Steps | None = None
    """Plans that were simulated on the same cluster, to which the search adds its own; see `judged`."""


WHOLE = Scope()
"""The whole space, as far as a search goes by itself."""
ALONE = Scope(rivals=False)
"""The same, for the best plan alone."""
