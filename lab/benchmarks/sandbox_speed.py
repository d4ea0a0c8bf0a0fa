"""Executions a second of the sandbox, beside a plain `python` process for each.

Run: python lab/benchmarks/sandbox_speed.py [--workers N] [--seconds S] The figure to beat: a code-reward
pipeline with one container an execution was reported at 20 a second on 192 cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

from executor.rewards.sandbox import MODES, CodeRun, Mode, Sandbox
from rlhfsim.errors import RlhfsimError

CODE = """
def primes(n):
    return [k for k in range(2, n) if all(k % d for d in range(2, int(k ** 0.5) + 1))]
"""
TESTS = "assert primes(30) == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]\nassert len(primes(100)) == 25"
DOCKER_PER_S, DOCKER_CORES = 20.0, 192
PROGRAM = CodeRun(code=CODE, tests=TESTS)
BATCH = 16  # programs a worker between looks at the clock


def main() -> None:
    """Measure all modes and print a table."""
    parser = argparse.ArgumentParser()
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(f"{cores} cores, {options.workers} workers, load average {os.getloadavg()[0]:.1f} before\n")
    print(f"{'':34}{'a second':>10}{'a core second':>15}{'CPU ms each':>13}")
    for mode in MODES:
        sandboxed(mode, options.workers, options.seconds)
    report("plain python process, unconfined", *repeat(plain, options.seconds))
    print(f"{'containers, as reported':34}{DOCKER_PER_S:10.0f}{DOCKER_PER_S / DOCKER_CORES:15.2f}")


def sandboxed(mode: Mode, workers: int, seconds: float) -> None:
    """One mode's line. CPU time is known after the workers have ended; their start is then counted too."""
    before = cpu_s()
    try:
        with Sandbox(workers, mode=mode) as sandbox:
            count, wall, _ = repeat(lambda: batch(sandbox, workers), seconds)
    except RlhfsimError as error:
        print(f"sandbox, {mode}: {error.message}")
    else:
        # bwrap does not wait for its child, so that the CPU time of its tree is nobody's
        known = mode != "bubblewrap"
        report(f"sandbox, {mode}", count, wall, cpu_s() - before if known else None)


def repeat(some: Callable[[], int], seconds: float) -> tuple[int, float, float]:
    """Repeat for a while: how many, wall seconds, CPU seconds of this process and those that ended."""
    start, before, count = time.perf_counter(), cpu_s(), 0
    while (wall := time.perf_counter() - start) < seconds:
        count += some()
    return count, wall, cpu_s() - before


def report(name: str, count: int, wall: float, cpu: float | None) -> None:
    """Rate by the clock (other work on the machine slows it) and by CPU time (it does not)."""
    by_cpu = f"{count / cpu:15.0f}{cpu / count * 1e3:13.1f}" if cpu else f"{'not known':>15}"
    print(f"{name:34}{count / wall:10.0f}{by_cpu}")


def batch(sandbox: Sandbox, workers: int) -> int:
    """Run some programs; how many."""
    outcomes = sandbox.map([PROGRAM] * (BATCH * workers))
    assert all(outcome.status == "passed" for outcome in outcomes)
    return len(outcomes)


def plain() -> int:
    """One fresh interpreter."""
    subprocess.run([sys.executable, "-I", "-S", "-c", CODE + TESTS], check=True)
    return 1


def cpu_s() -> float:
    """CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
