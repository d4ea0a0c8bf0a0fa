"""Where something begins to hold along a quantity, by halving: break-evens, enough memory, crossings."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_HALVINGS = 60


def edge(
    near: float,
    far: float,
    beyond: Callable[[float], bool],
    middle: Callable[[float, float], float] = lambda near, far: (near + far) / 2,
    halvings: int = MAX_HALVINGS,
) -> float:
    """The value nearest to `near` that was seen to lie beyond, by halving; `far` does, `near` does not.

    It ends early where the middle is one of the ends.
    """
    for _ in range(halvings):
        between = middle(near, far)
        if between in (near, far):
            break
        if beyond(between):
            far = between
        else:
            near = between
    return far


def geometric(low: float, high: float) -> float:
    """The middle of two positive values in equal factors."""
    return math.sqrt(low * high)
