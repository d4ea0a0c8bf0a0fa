"""The class decorator of values: data that is read by name and never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A class as a frozen dataclass with slots, whose fields are given by name."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
