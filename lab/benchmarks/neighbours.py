"""How much other processes of this machine work while something is measured."""

from __future__ import annotations

import os
import threading
import time

import psutil

SAMPLE_S = 0.5


class Neighbours:
    """Samples CPU seconds of all processes that are not below this one; start it, then ask for a share."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def share(self, since: float) -> float:
        """Mean cores that others kept busy since that instant of the monotonic clock."""
        inside = [(at, used) for at, used in self._samples if at >= since]
        if len(inside) < 2:
            return 0.0
        return sum(used for _, used in inside[1:]) / (inside[-1][0] - inside[0][0])

    def _watch(self) -> None:
        before = _others()
        while not self._over.wait(SAMPLE_S):
            now = _others()
            self._samples.append(
                (time.monotonic(), sum(max(0.0, s - before.get(pid, 0.0)) for pid, s in now.items()))
            )
            before = now


def _others() -> dict[int, float]:
    """CPU seconds of every process outside this one's tree; a new one counts from its start."""
    found: dict[int, tuple[int, float]] = {}
    for process in psutil.process_iter(["pid", "ppid", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process.info["pid"]] = (process.info["ppid"], times.user + times.system)
    mine = {os.getpid()}
    grown = True
    while grown:
        below = {pid for pid, (parent, _) in found.items() if parent in mine}
        grown = not below <= mine
        mine |= below
    return {pid: used for pid, (_, used) in found.items() if pid not in mine}
