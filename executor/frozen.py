"""The decorator of values: what flows through a run is frozen, and its fields are given by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A class as a dataclass that is frozen, without a dictionary, and made by keyword alone."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
