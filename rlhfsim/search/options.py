"""One seat with one layout, priced by itself; and which of them are worth combining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import log

import numpy as np

from rlhfsim.specs.placement import RolloutSeat, Seat

TOLERANCE = 0.003
"""Relative time within which two layouts count as equally fast and the leaner one wins."""
KEPT = 32
"""Non-dominated layouts of a seat that enter the combination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A seat with a layout, by itself."""

    seat: Seat | RolloutSeat
    seconds: float
    """Its calls and moves in one step."""
    idle: float
    """Bytes on a GPU while others work."""
    busy: float
    """Most bytes on a GPU while it works."""


@dataclass(slots=True)
class Tally:
    """What was considered on the way."""

    layouts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> layouts that the backend or the batch rules out."""
    too_large: Counter[str] = field(default_factory=Counter)
    """Seat -> layouts that do not fit even alone."""
    structures: int = 0
    """Choices of pools, of who sits where and of what leaves memory between calls."""
    plans: int = 0
    """Complete plans: the cross product of layouts over seats, pools and policies."""
    unfit: int = 0
    """Plans that do not fit together, counted among the non-dominated ones."""
    priced: int = 0
    """Plans priced in full."""

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)}
        )


def undominated(options: list[Option]) -> tuple[Option, ...]:
    """Options that no other beats in time (within `TOLERANCE`), idle and added bytes; fastest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (_rounded(o.seconds), o.busy)):
        if not any(
            k.idle <= option.idle and k.busy - k.idle <= option.busy - option.idle for k in kept
        ):
            kept.append(option)
    return thinned(kept, KEPT)


def thinned(options: Sequence[Option], count: int) -> tuple[Option, ...]:
    """At most `count` of options in the order of time: the fastest half and an even sample of the rest."""
    if len(options) <= count:
        return tuple(options)
    half = count // 2
    lean = np.linspace(half, len(options) - 1, count - half).round().astype(int)
    return (*options[:half], *(options[i] for i in sorted(set(lean.tolist()))))


def _rounded(seconds: float) -> int:
    """Times on a logarithmic grid of `TOLERANCE`: within a cell the leaner option counts as better."""
    return round(log(max(seconds, 1e-9)) / TOLERANCE)
