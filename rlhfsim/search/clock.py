"""When a search has to end: its time limit, its share of work, and Ctrl-C of someone who waits for it.

Whoever may be ended asks `over` between pieces of work of well under a second. Forked processes inherit the
limit, and see that the search was asked to end.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

_END_S: ContextVar[float] = ContextVar("_END_S", default=inf)
"""On the monotonic clock."""
_ANSWERS: ContextVar[bool] = ContextVar("_ANSWERS", default=False)
_WORK_LEFT: ContextVar[list[float] | None] = ContextVar("_WORK_LEFT", default=None)
"""Options that may still be priced; None: any number."""
_asked = mmap.mmap(-1, 1)
"""1 once the search was asked to end; shared with forked processes."""


class OutOfTime(Exception):
    """A search ended before it had what was asked of it."""


@contextmanager
def within(limit_s: float | None) -> Iterator[None]:
    """Searches end after `limit_s` seconds, or earlier where what they are part of ends earlier."""
    token = _END_S.set(min(_END_S.get(), time.monotonic() + (limit_s or inf)))
    try:
        yield
    finally:
        _END_S.reset(token)


@contextmanager
def worth(options: float | None) -> Iterator[None]:
    """Searches end once they have done the work of pricing so many options; None: however many.

    Unlike seconds, work is the same on every machine.
    """
    token = _WORK_LEFT.set(None if options is None else [options])
    try:
        yield
    finally:
        _WORK_LEFT.reset(token)


@contextmanager
def lifted() -> Iterator[None]:
    """Nothing ends a search meanwhile."""
    end, work, answers = _END_S.set(inf), _WORK_LEFT.set(None), _ANSWERS.set(False)
    try:
        yield
    finally:
        _END_S.reset(end)
        _WORK_LEFT.reset(work)
        _ANSWERS.reset(answers)


def spend(options: float) -> None:
    """Notes that the work of pricing so many options was done."""
    if (left := _WORK_LEFT.get()) is not None:
        left[0] -= options


@contextmanager
def answering() -> Iterator[None]:
    """`ask_to_end` is heard: the best that was met is then the answer."""
    token = _ANSWERS.set(True)
    _asked[0] = 0
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def ask_to_end() -> bool:
    """Whether a search hears, for the first time, that it has to end."""
    if not _ANSWERS.get() or _asked[0]:
        return False
    _asked[0] = 1
    return True


def was_asked() -> bool:
    """Whether the last search that answers was asked to end."""
    return bool(_asked[0])


def over() -> bool:
    """Whether time is up, or the work is done."""
    if (left := _WORK_LEFT.get()) is not None and left[0] <= 0:
        return True
    return (_ANSWERS.get() and was_asked()) or time.monotonic() >= _END_S.get()


def check() -> None:
    """Nothing while there is time.

    Raises:
        OutOfTime: there is none.
    """
    if over():
        raise OutOfTime
