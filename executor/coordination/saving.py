"""When a run saves its state: as its failures and the cost of a save ask, and before it stops for a signal.

    D* = sqrt(2 C M)        Young 1974, CACM 17(9): useful seconds between two saves

Legend: C seconds that a save takes, M mean seconds between failures of the whole job.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

NODE_MTBF_S = 6_300 * 3600.0
"""Seconds between failures of one node of 8 GPUs: 419 unexpected interruptions of 2,048 nodes in 54 days
(Llama 3, arXiv 2407.21783, section 3.3.4). Other clusters: 3,700 and 10,300 h (6.50 and 2.34 failures a
thousand node-days, arXiv 2410.21680)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True, kw_only=True)
class SaveTimes:
    """Which iterations end with a save."""

    every: int | None
    """Iterations; 0: only the last one; None: by time."""
    iterations: int
    nodes: int
    cost_s: float
    """Of a save; predicted until one was made."""
    _since: float = field(default_factory=lambda: time.monotonic())

    @property
    def interval_s(self) -> float:
        """Between two saves by time."""
        return math.sqrt(2 * self.cost_s * NODE_MTBF_S / self.nodes)

    def due(self, done: int) -> bool:
        """After `done` iterations."""
        if done == self.iterations:
            return True
        if self.every is None:
            return time.monotonic() - self._since >= self.interval_s
        return self.every > 0 and done % self.every == 0

    def saved(self, seconds: float) -> None:
        """A save is done and took so long."""
        self._since, self.cost_s = time.monotonic(), seconds


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asked the run to stop."""

    number: int | None = None
    """Of the signal."""

    def follow(self) -> None:
        """Stop, where that was asked.

        Raises:
            KeyboardInterrupt: for SIGINT.
            SystemExit: for SIGTERM, with the exit code that shells give it.
        """
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(128 + self.number)


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """The first Ctrl-C or SIGTERM is a request, the second one acts at once; beside the main thread both do."""
    request, before = StopRequest(), dict[int, Any]()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def ask(number: int, frame: FrameType | None) -> None:
        request.number = number
        restore()
        say(f"{signal.Signals(number).name}: the run saves its state after this iteration; again: at once")

    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield request
    finally:
        restore()
