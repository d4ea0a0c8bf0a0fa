"""What a record is, said once: a dataclass that is frozen, has slots and takes keywords alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A class of annotated fields as a record."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
