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

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import load_profile

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def mtbf(plan: Plan) -> float:
    """Mean seconds between failures of the whole job, by the published rate in its profile."""
    try:
        profile = load_profile(plan.hardware[0].profile)
    except RlhfsimError:  # of the machine where the plan was made
        profile = load_profile("h100-sxm")
    return float(profile.coefficient("mtbf_per_gpu").value) / sum(part.gpus for part in plan.hardware)


@dataclass(slots=True, kw_only=True)
class SaveTimes:
    """Which iterations end with a save."""

    every: int | None
    """Iterations; 0: only the last one; None: by time."""
    iterations: int
    mtbf_s: float
    """Mean seconds between failures of the whole job."""
    cost_s: float
    """Of a save; predicted until one was made."""
    _since: float = field(default_factory=lambda: time.monotonic())

    @property
    def interval_s(self) -> float:
        """Between two saves by time."""
        return math.sqrt(2 * self.cost_s * self.mtbf_s)

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
    """The first Ctrl-C or SIGTERM is a request, the second one acts at once; in another thread both do."""
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
