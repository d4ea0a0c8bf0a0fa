"""Wall and CPU seconds and memory of whole processes, on a fixed number of cores.

Memory is the proportional set size of the process and its workers together, sampled: a page that
forked workers share with their parent counts once. Where /proc does not tell, it is the largest
resident set of one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

CORES = 2
SAMPLE_S = 0.05
"""Seconds between two samples of memory."""
KIB, MB = 1024, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one process took."""

    wall_s: float
    cpu_s: float
    """CPU seconds of the process and its workers."""
    memory_bytes: float
    output: str
    """Its standard output."""


def bind(cores: int = CORES) -> int:
    """Keeps this process and its children on that many cores; how many they have."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    return len(os.sched_getaffinity(0))


def run(command: list[str]) -> Spent:
    """One run of `python <command>` from start to exit; the benchmark ends where it fails."""
    spent, code = measured(command)
    if code != 0:
        raise SystemExit(f"{' '.join(command)} failed with {code}")
    return spent


def measured(command: list[str], tree: Path | None = None) -> tuple[Spent, int]:
    """One run of `python <command>` from start to exit, on the sources of `tree`, and its exit code."""
    env = None if tree is None else {**os.environ, "PYTHONPATH": str(tree)}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=env, cwd=tree
    )
    peak = _Peak(process.pid)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    spent = Spent(
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        memory_bytes=max(peak.stop(), usage.ru_maxrss * KIB),
        output=output,
    )
    return spent, process.returncode


class _Peak:
    """Samples the memory of a process and its children until it is stopped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.bytes = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, sum(map(_pss, _tree(self.pid))))

    def stop(self) -> float:
        """The largest sample, bytes."""
        self._over.set()
        self._thread.join()
        return self.bytes


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in _tree(int(child)))]


def _pss(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))


def pace() -> str:
    """A loop of ten million additions, near 0.5 s on an idle machine: tells how busy this one is."""
    begin, cpu, total = time.perf_counter(), time.process_time(), 0
    for i in range(10_000_000):
        total += i
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return f"python loop of 10M additions: {wall:.2f} s, {cpu:.2f} s CPU"
