"""The same function over several inputs, on every core where processes can be forked.

A forked worker inherits imports and caches, so only indices go out and results come back. Order and
results do not depend on the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MAX_WORKERS = 8


@dataclass(slots=True)
class _Inherited:
    """What a forked worker finds in place: the work, and that it is a worker."""

    function: Callable[[Any], Any] | None = None
    items: Sequence[Any] = ()
    alone: bool = False
    """Nothing is forked, see `serial`."""


_INHERITED = _Inherited()


def mapped(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`[function(x) for x in items]`; serial inside a worker, on one core, or without fork."""
    workers = min(MAX_WORKERS, cores(), len(items))
    if (
        workers < 2
        or _INHERITED.function is not None
        or _INHERITED.alone
        or "fork" not in multiprocessing.get_all_start_methods()
    ):
        return [function(x) for x in items]
    _INHERITED.function, _INHERITED.items = function, items
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            return pool.map(_run, range(len(items)), chunksize=1)
    finally:
        _INHERITED.function, _INHERITED.items = None, ()


@contextmanager
def serial() -> Iterator[None]:
    """Nothing is forked meanwhile: for processes that must not be, such as the driver of a Ray job."""
    before, _INHERITED.alone = _INHERITED.alone, True
    try:
        yield
    finally:
        _INHERITED.alone = before


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(index: int) -> Any:
    assert _INHERITED.function is not None
    return _INHERITED.function(_INHERITED.items[index])
