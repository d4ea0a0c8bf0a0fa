"""Hashes that are computed once, for frozen data that caches look up again and again."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound="Hashed")


class Hashed:
    """Base of a frozen, slotted dataclass that remembers its hash; neither compared nor pickled."""

    __slots__ = ("_hash",)
    _hash: int


def hashed_once(kind: type[T]) -> type[T]:
    """Class decorator over `dataclass`: the hash of the fields, computed when it is first asked for."""
    compute = kind.__hash__

    def remembered(self: T) -> int:
        try:
            return self._hash
        except AttributeError:
            value = compute(self)
            object.__setattr__(self, "_hash", value)
            return value

    kind.__hash__ = remembered  # type: ignore[assignment,method-assign]
    return kind
