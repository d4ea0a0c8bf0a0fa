"""What every probe is given, and how calls are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

Device = Literal["cpu", "cuda"]
LEAST_S = 1e-3
"""A sample spans as many calls as take this long, so that the clock's own time does not count."""
MOST_S = 2.0
"""Repeats of one point end here, except the first `FEWEST`."""
FEWEST = 3


@frozen
class ProbeSetup:
    """One probe's task."""

    device: Device
    scratch: Path
    """An empty folder of its own, on the file system of the working directory."""
    quick: bool = False
    """Fewer points and repeats: about a minute for all probes."""
    part: str = ""
    """For probes that need several clean processes: which of them this is."""
    spawned: float = 0.0
    """`time.monotonic()` of the parent when it started this process."""

    def repeats(self, full: int, quick: int) -> int:
        """How often to repeat."""
        return quick if self.quick else full

    def samples(self, call: Callable[[], object], full: int, quick: int) -> list[float]:
        """Seconds per call: a warm-up that also chooses how many calls make a sample, then the repeats."""
        inner = 1
        for _ in range(2):
            inner = max(1, int(LEAST_S / max(1e-9, timed(call, self.device, inner))))
        seconds: list[float] = []
        started = time.perf_counter()
        while len(seconds) < self.repeats(full, quick):
            seconds.append(timed(call, self.device, inner))
            if len(seconds) >= FEWEST and time.perf_counter() - started > MOST_S:
                break
        return seconds


def unavailable(reason: str) -> RlhfsimError:
    """The error of a probe that cannot run here; its coefficients keep their priors."""
    return RlhfsimError("not-measured", reason)


def timed(call: Callable[[], object], device: str, count: int = 1) -> float:
    """Seconds of each of `count` calls, the GPU's work included."""
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - started) / count


def wait(device: str) -> None:
    """Until the GPU has done what it was given."""
    if device != "cpu":
        torch.accelerator.synchronize()
