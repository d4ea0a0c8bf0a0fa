"""Degrees of parallelism that a model or a user lets compete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.model import ModelSpec


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `limit`."""
    return tuple(1 << i for i in range(max(1, limit).bit_length()))


@lru_cache(maxsize=4096)
def divides_heads(model: ModelSpec, tp: int) -> bool:
    """Whether tensor parallelism `tp` splits the attention heads evenly."""
    try:
        model.check_tp(tp)
    except RlhfsimError:
        return False
    return True


def splits_layers(model: ModelSpec, pp: int) -> bool:
    """Whether `pp` stages are usual: equal ones, or a power of two with shorter first and last stages.

    Engines cut 61 or 126 layers unevenly (`training.pipeline.split`).
    """
    even = pp & (pp - 1) == 0
    return all(pp <= one.num_layers and (one.num_layers % pp == 0 or even) for one in model.each)


def values(fixed: Mapping[str, int | str], name: str, default: Iterable[int]) -> tuple[int, ...]:
    """What is fixed for a field, or else those that compete."""
    return (int(fixed[name]),) if name in fixed else tuple(default)
