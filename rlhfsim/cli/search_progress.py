"""What standard error says of how far a search has come: one line, or a bar."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhfsim.search.progress import Progress, heard_by
from rlhfsim.units import format

FROM_S = 3.0
"""Shorter searches say nothing."""
EVERY_S = 0.2
CLEAR = "\r\x1b[K"


@contextmanager
def shown() -> Iterator[None]:
    """The line, where standard error is a terminal; it is gone when the search ends."""
    if not sys.stderr.isatty():
        yield
        return
    line = _Line()
    try:
        with heard_by(line.tell):
            yield
    finally:
        line.clear()


@contextmanager
def counted(doing: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar that each call advances, where somebody watches; without a total it moves to and fro."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda: None
        return
    from rlhfsim.present.terminal.progress import advancing

    with advancing() as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


class _Line:
    """A line of this process that is written over again and again; forked ones say nothing."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self._process, self._begin, self._last = os.getpid(), time.monotonic(), 0.0

    def tell(self, progress: Progress) -> None:
        """The line as it is now, not too often."""
        now = time.monotonic()
        if os.getpid() != self._process or now - self._begin < FROM_S or now - self._last < EVERY_S:
            return
        self._last = now
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(CLEAR + text(progress, now - self._begin)[:width])
        sys.stderr.flush()

    def clear(self) -> None:
        """Nothing is left of it."""
        if self._last:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()


def text(progress: Progress, elapsed_s: float) -> str:
    """`12 s: looking at plans, 40 of 171 ways to share the GPUs; best 143 s, gap 4.1%; Ctrl-C takes it`."""
    parts = [f"{elapsed_s:.0f} s: {progress.doing}, {progress.done:,} of {progress.total:,} {progress.unit}"]
    if progress.best_s is not None:
        gap = f", gap {progress.gap:.1%}" if progress.gap is not None else ""
        parts.append(f"best {format(progress.best_s, 's')}{gap}; Ctrl-C takes it")
    return "; ".join(parts)
