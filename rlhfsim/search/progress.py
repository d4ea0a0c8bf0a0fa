"""What a search is doing, for someone who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a search has come."""

    doing: str
    """Such as `pricing layouts`."""
    done: int
    total: int
    unit: str
    """What `total` counts, such as `pool sizes`."""
    best_s: float | None = None
    """Step of the best plan that was met, seconds."""
    gap: float | None = None
    """Share by which a plan could still be better."""


Listener = Callable[[Progress], object]
_LISTENER: ContextVar[Listener | None] = ContextVar("_LISTENER", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Searches tell a listener how far they have come."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(progress: Progress) -> None:
    """Tells whoever waits, if anybody does."""
    if (listener := _LISTENER.get()) is not None:
        listener(progress)
